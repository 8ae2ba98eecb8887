"""Labels: simulated effects of moves, on which the network is pre-trained.

Every state is a plan of a case; a set of moves is drawn from it and each is simulated once. States lie where searches pass: at
the answers of the one-shot planners, near them, along descents from there, and at what annealing reaches after some time.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as save_arrays

from rlplace.agents.cases import Case
from rlplace.envs.guide.features import NUM_FEATURES
from rlplace.envs.guide.guide import Guide
from rlplace.envs.instance import make_instance
from rlplace.errors import InfeasibleError, InputError
from rlplace.files import read_bytes, write_bytes
from rlplace.placement import get_planner
from rlplace.placement.common.evaluate import PlanEvaluator, descent_s
from rlplace.placement.common.shortage import check_possible
from rlplace.placement.search import floor_answers

FILL = 1.15
"""Moves that provably fill a device beyond this share of its memory are not priced."""

_EXPLORE = 0.3  # share of steps to a random move that costs at most `_LOSS`
_LOSS = 0.05
_SHARPNESS = 0.01  # otherwise a move that gains 1 % more is e times as likely
_DEEP = (300, 3000)  # simulations of annealing before two of the starts


Rows = list[tuple[NDArray[np.float16], NDArray[np.float32]]]
"""Features and change of each state, as in `Labels`."""


@dataclass(frozen=True, eq=False)
class Labels:
    """Labelled moves of one case: S states, K moves.

    Attributes:
        features: float16 [S, K, F], see `rlplace.envs.guide.features`.
        change: float32 [S, K], log of `descent_s` after the move over that before, at most that of a factor of
            1,000 (a step that cannot complete); NaN where there is no move.
    """

    features: NDArray[np.float16]
    change: NDArray[np.float32]

    def save(self, path: Path) -> None:
        """Writes a file, atomically."""
        write_bytes(path, save_arrays({"features": self.features, "change": self.change}))

    @staticmethod
    def load(path: Path) -> Labels:
        """Reads a file of `save`.

        Raises:
            InputError: The file is damaged, or holds arrays of other types or shapes.
        """
        payload = read_bytes(path)
        try:
            arrays = load_arrays(payload)
            labels = Labels(arrays["features"], arrays["change"])
        except Exception as error:  # safetensors raises its own type for every kind of damage
            raise InputError(f"{path}: not a file of labels ({type(error).__name__}); remove it to have it made anew") from None
        features, change = labels.features, labels.change
        fits = features.ndim == 3 and features.shape[2] == NUM_FEATURES and change.shape == features.shape[:2]
        if not fits or features.dtype != np.float16 or change.dtype != np.float32:
            raise InputError(f"{path}: its arrays are not of the shapes and types of labels; remove it to have it made anew")
        if not np.isfinite(features).all() or np.isinf(change).any():
            raise InputError(f"{path}: holds numbers that are not finite; remove it to have it made anew")
        return labels


def collect_labels(case: Case, *, states: int, moves: int, seed: int) -> Labels | None:
    """Labels of one case; None when it has one device, or no plan of it can complete.

    Args:
        case: The case.
        states: Number of plans whose moves are labelled.
        moves: Number of moves drawn from each plan.
        seed: Seed of all random choices.
    """
    problem, rng = case.problem, np.random.default_rng(seed)
    if problem.num_devices < 2:
        return None
    starts = starting_plans(case, rng)
    if not starts:
        return None
    instance = make_instance(problem, floor=starts[0], compute_floor=False)
    guide = Guide(instance, moves, seed)
    rows: Rows = []
    for number, start in enumerate(starts):
        share = (states * (number + 1)) // len(starts) - (states * number) // len(starts)
        rows += walk(guide, start, share, rng)
    if not rows:
        return None
    return Labels(*(np.stack(column) for column in zip(*rows, strict=True)))


def starting_plans(case: Case, rng: Generator) -> list[NDArray[np.int32]]:
    """Plans to label moves at: the floor; another planner's answer; the floor after random changes; what annealing reaches."""
    problem = case.problem
    try:
        check_possible(problem)
    except InfeasibleError:
        return []
    answers = [answer for _, answer in floor_answers(PlanEvaluator(problem))]
    answers = sorted((a for a in answers if a.score.step_time_s != np.inf), key=lambda answer: answer.score.objective_s)
    if not answers:
        return []
    starts = [answers[0].devices]
    others = [a.devices for a in answers[1:] if not np.array_equal(a.devices, starts[0])]
    if others:
        starts.append(others[int(rng.integers(min(3, len(others))))])
    changed = starts[0].copy()
    share = rng.choice([0.03, 0.1, 0.3])
    for group in np.flatnonzero(rng.random(len(changed)) < share):
        changed[group] = rng.choice(np.flatnonzero(problem.group_allowed[group]))
    starts.append(changed)
    for calls in _DEEP:
        try:
            seed = int(rng.integers(1 << 30))
            plan = get_planner("annealing")(problem, start=starts[0], calls=calls, seed=seed)
            starts.append(plan.device_of_group)
        except InfeasibleError:
            continue
    return starts


def walk(guide: Guide, start: NDArray[np.int32], states: int, rng: Generator) -> Rows:
    """Labels along one descent with occasional random moves.

    Args:
        guide: Draws and prices moves of the instance.
        start: int32 [G], plan at which the descent begins.
        states: Number of plans whose moves are priced.
        rng: Random numbers of the descent.

    """
    rows: Rows = []
    plan, moves = np.array(start, dtype=np.int32), len(guide.kinds)
    for _ in range(states):
        if guide.simulator.evaluate(plan)[0] == np.inf:
            break
        before = descent_s(*guide.look(plan))
        count = guide.draw(plan)
        which = np.flatnonzero(guide.table[:count, 12] <= FILL)
        if before == 0.0 or len(which) < 2:
            break
        price = np.array([descent_s(*outcome) for outcome in zip(*guide.price(plan, which), strict=True)])
        change = np.log(np.clip(price, 1e-3 * before, 1e3 * before) / before)
        features, changes = np.zeros((moves, NUM_FEATURES), dtype=np.float16), np.full(moves, np.nan, dtype=np.float32)
        features[: len(which)], changes[: len(which)] = guide.table[which], change
        rows.append((features, changes))
        choice = choose(np.where(np.isfinite(price), change, np.inf), rng)
        if choice is None:
            break
        plan = guide.moved(plan, int(which[choice]))
    return rows


def choose(change: NDArray[np.float64], rng: Generator) -> int | None:
    """Returns the next move of a descent: mostly one that gains, sometimes any that costs little.

    Args:
        change: float64 [M], log of the step time after each move over that before; infinite where it cannot complete.
        rng: Random numbers.

    Returns:
        Its place in `change`; None where no move can be made.
    """
    if rng.random() < _EXPLORE:
        weight = np.where(change < _LOSS, 1.0, 1e-9)
    else:
        gain = np.clip(-change, -_LOSS, 0.1)
        weight = np.exp((gain - gain.max(initial=-_LOSS)) / _SHARPNESS)
    weight = np.where(np.isfinite(change), weight, 0.0)
    return int(rng.choice(len(change), p=weight / weight.sum())) if weight.sum() > 0 else None
