"""Fine-tuning from a file of measurements, without a cluster.

The cost model is corrected to the measurements of each problem, and the network learns from moves that are priced in the
corrected simulator, around the plans that were fastest.

To keep old skills, moves of cases of the training stream are rehearsed, priced without any correction, and the
weights are held near those at the start.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from rlplace.agents.checkpoint import Checkpoint
from rlplace.agents.network import PlacerNetwork
from rlplace.agents.search import warm_up
from rlplace.agents.tuning.learn import Lesson, fit_moves, price_moves
from rlplace.envs.instance import make_instance
from rlplace.errors import InputError
from rlplace.measured.calibrate import Fit, fit_correction
from rlplace.measured.correction import corrected
from rlplace.measured.store import TrialStore
from rlplace.measured.trial import Trial
from rlplace.problem import Problem

_STATES = 60  # priced of every set of measurements
_FASTEST = 6  # plans that descents start from
_KEEP = 0.02


@dataclass(frozen=True, eq=False)
class Measurements:
    """Trials of one problem on one cluster.

    Attributes:
        problem: The problem as it was priced.
        site: Fingerprint of the cluster.
        mode: "computed" or "replayed".
        trials: Trials with times, one for each plan.
    """

    problem: Problem
    site: str
    mode: str
    trials: tuple[Trial, ...]


@dataclass(frozen=True, eq=False)
class Learned:
    """Result of fine-tuning.

    Attributes:
        network: The fine-tuned network.
        fits: Correction of the cost model for each set of measurements.
        facts: Facts for the card.
    """

    network: PlacerNetwork
    fits: tuple[Fit, ...]
    facts: dict[str, Any]


def measurements_of(store: TrialStore, *, site: str | None = None) -> list[Measurements]:
    """The measurements of a store by problem, cluster and mode; a plan timed several times counts once, by all its steps.

    Raises:
        InputError: No trial in it has times.
    """
    sets: dict[tuple[str, str, str], dict[tuple[int, ...], Trial]] = {}
    for trial in store.trials(site=site):
        if not trial.timed:
            continue
        key = (trial.problem, trial.site, trial.mode)
        plans = sets.setdefault(key, {})
        known = plans.get(trial.device_of_group)
        plans[trial.device_of_group] = trial if known is None else _joined(known, trial)
    if not sets:
        raise InputError("finetune: the file holds no plan with times; measure some: torchrun ... -m rlplace finetune MODEL")
    return [
        Measurements(store.problem(problem), where, mode, tuple(plans.values()))
        for (problem, where, mode), plans in sets.items()
    ]


def finetune_offline(
    checkpoint: Checkpoint,
    sets: Sequence[Measurements],
    *,
    steps: int = 600,
    rehearse: int = 16,
    seed: int = 0,
    report: Callable[[str], None] = lambda line: None,
) -> Learned:
    """Fine-tunes a copy of an agent's network.

    Args:
        checkpoint: An agent of Refinement-v0.
        sets: The measurements.
        steps: Steps of Adam.
        rehearse: Number of cases of the training stream whose moves are rehearsed.
        seed: Seed of all random choices.
        report: Called with lines about the progress.
    """
    warm_up()
    network = copy.deepcopy(checkpoint.network)
    lessons: list[Lesson] = []
    fits: list[Fit] = []
    for number, measured in enumerate(sets):
        fit = fit_correction(measured.problem, measured.trials)
        fits.append(fit)
        report(
            f"{measured.problem.name}: {len(measured.trials)} plans, error of predicted step times "
            f"{100 * fit.error_before:.1f} % before, {100 * fit.error_after:.1f} % after calibration"
        )
        lessons.append(_corrected_lesson(measured, fit, seed + number))
    old = _rehearsal(rehearse, seed, report)
    report(f"learning from {sum(len(lesson.rows) for lesson in lessons)} measured states and {len(old)} rehearsed cases")
    loss = fit_moves(network, lessons, rehearsed=old, steps=steps, seed=seed, keep=_KEEP)
    facts = {
        "plans": sum(len(measured.trials) for measured in sets),
        "problems": [measured.problem.name for measured in sets],
        "clusters": sorted({measured.site for measured in sets}),
        "modes": sorted({measured.mode for measured in sets}),
        "prediction_error_before": [round(fit.error_before, 4) for fit in fits],
        "prediction_error_after": [round(fit.error_after, 4) for fit in fits],
        "steps": steps,
        "rehearsed_cases": len(old),
        "loss": round(loss, 5) if np.isfinite(loss) else None,
        "seed": seed,
    }
    return Learned(network, tuple(fits), facts)


def _corrected_lesson(measured: Measurements, fit: Fit, seed: int) -> Lesson:
    problem = corrected(measured.problem, fit.correction)
    fastest = np.argsort([trial.median_s for trial in measured.trials])[:_FASTEST]
    plans = [np.array(measured.trials[number].device_of_group, dtype=np.int32) for number in fastest]
    instance = make_instance(problem, floor=plans[0], compute_floor=False)
    return price_moves(instance, plans, states=_STATES, seed=seed)


def _rehearsal(count: int, seed: int, report: Callable[[str], None]) -> list[Lesson]:
    """Moves of cases like those that agents are trained on."""
    from rlplace.agents.labels import starting_plans
    from rlplace.agents.problems import cases_of

    if count == 0:
        return []
    report(f"pricing moves of {count} cases to rehearse")
    source = cases_of([], seed=10_000 + seed)
    lessons: list[Lesson] = []
    for number in range(2 * count):
        if len(lessons) == count:
            break
        case = source.case(number)
        starts = starting_plans(case, np.random.default_rng([seed, number])) if case.problem.num_devices > 1 else []
        if starts:
            instance = make_instance(case.problem, floor=starts[0], compute_floor=False)
            lessons.append(price_moves(instance, starts, states=24, seed=seed + number))
    return lessons


def _joined(first: Trial, second: Trial) -> Trial:
    status = "done" if "done" in (first.status, second.status) else first.status
    return msgspec.structs.replace(first, step_s=(*first.step_s, *second.step_s), status=status)
