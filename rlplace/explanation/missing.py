"""What an infeasible problem or plan lacks: which constraint fails, on which device, by how many bytes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlplace.errors import InfeasibleError
from rlplace.placement import get_planner
from rlplace.placement.common.bounds import lower_bounds
from rlplace.placement.common.shortage import check_possible
from rlplace.problem import Problem
from rlplace.simulator import simulate
from rlplace.simulator.simulated_plan import SimulatedPlan
from rlplace.text import bytes_text


@dataclass(frozen=True)
class Trial:
    """One relaxation, planned and simulated.

    Attributes:
        relaxation: In words.
        fits: Whether a plan was found that completes and fits.
        step_time_s: Step time of that plan, else None.
        samples: Samples of its step.
        peak_bytes: Peak memory of its fullest device, else 0.
        short_bytes: Bytes still missing when it does not fit: in the closest plan, or proven.
        how: Planner of the plan that fits, or why none does.
    """

    relaxation: str
    fits: bool
    step_time_s: float | None
    samples: int
    peak_bytes: int
    short_bytes: int
    how: str

    @property
    def sample_s(self) -> float:
        """Seconds a sample; inf when it does not fit."""
        return float("inf") if self.step_time_s is None else self.step_time_s / max(self.samples, 1)


Tester = Callable[[str, Problem], Trial]
"""`tried` with its budget."""


def tried(name: str, problem: Problem, *, calls: int, **limits: Any) -> Trial:
    """Returns the best plan of a changed problem by the floor, else, with `calls`, by a search of so many simulations."""
    samples = problem.samples_per_microbatch
    errors: list[InfeasibleError] = []
    for planner, extra in (("best", {}), *((("annealing", {"calls": calls}),) if calls else ())):
        try:
            plan = get_planner(planner)(problem, **limits, **extra)
        except InfeasibleError as error:
            errors.append(error)
            continue
        peak = max(plan.predicted.peak_memory_bytes)
        return Trial(name, True, plan.predicted.step_s, samples, peak, 0, f"planner {planner}")
    closest = errors[-1] if 0 < errors[-1].short_bytes < errors[0].short_bytes else errors[0]
    return Trial(name, False, None, samples, 0, only_plan_short(problem) or closest.short_bytes, without_advice(closest))


def only_plan_short(problem: Problem) -> int | None:
    """Returns bytes that a problem's single device lacks; None with several devices, or where memory is enough."""
    limit = problem.devices[0].memory_bytes
    if problem.num_devices > 1 or limit is None or not problem.group_allowed.all():
        return None
    line = simulate(problem, np.zeros(problem.num_groups, dtype=np.int32))
    short = int(line.peak_memory_bytes[0]) - limit
    return short if line.step_time_s is not None and short > 0 else None


def without_advice(error: InfeasibleError) -> str:
    """Returns the message without its advice: advice given here is tested first."""
    return str(error).partition("; ")[0]


TOTAL, GROUP, FIXED, NOWHERE, DEVICE, OTHER = (
    "total memory", "largest group", "fixed groups", "no device", "device memory", "times or links",
)  # fmt: skip
"""Constraints: all devices together are too small; the largest device is for one group; a device is for the groups fixed to
it; a group may sit nowhere; a device is too small in the plan, or in every plan that was found; ops sit where they cannot run,
or a link is missing."""


@dataclass(frozen=True)
class Shortage:
    """What is missing.

    Attributes:
        constraint: Name of the constraint that fails, `TOTAL` or another of the list above.
        message: The constraint, its device and the missing bytes in words.
        device: The device that is short; None for all of them together, or for another constraint.
        short_bytes: Missing in the plan, or in the closest plan that was found; without a plan `proven_bytes`.
        proven_bytes: Missing in every plan: total demand over total capacity, or the largest group over the largest device; 0
            when no bound says that there is no plan.
        proven: No plan of the problem fits, whatever its devices.
    """

    constraint: str
    message: str
    device: str | None
    short_bytes: int
    proven_bytes: int
    proven: bool


def find_shortage(problem: Problem, run: SimulatedPlan | None, tester: Tester) -> tuple[Shortage, Trial | None]:
    """What is missing, and the plan that was searched for to know it.

    Args:
        problem: The problem.
        run: A plan of it that does not fit; None: it is not known that one exists.
        tester: Looks for a plan where no bound proves that there is none.
    """
    constraint, error, proven = _proof(problem)
    if run is not None:  # what the plan lacks, and whether any plan like it lacks something
        over = np.maximum(run.line.peak_memory_bytes - problem.capacity_bytes, 0.0)
        short = int(over.max())
        message = f"the plan does not fit: {'; '.join(run.line.violations)}"
        name = problem.devices[int(over.argmax())].name if short else None
        shortage = Shortage(DEVICE if short else OTHER, message, name, short, proven, error is not None)
        return shortage, tester("another plan", problem) if error is None else None
    only = only_plan_short(problem)
    if error is None and only is not None:
        single, limit = problem.devices[0].name, problem.devices[0].memory_bytes or 0
        message = f"{single} needs {bytes_text(limit + only)}, has {bytes_text(limit)}: {only} bytes short"
        return Shortage(DEVICE, message, single, only, only, True), None
    if error is None:
        trial = tester("another plan", problem)
        message = f"a plan that fits was found by {trial.how}" if trial.fits else trial.how
        return Shortage(DEVICE, message, None, trial.short_bytes, 0, False), trial
    name = error.device
    if only is not None:  # there is one plan, so its shortage is exact
        name, proven = problem.devices[0].name, only
    return Shortage(constraint, without_advice(error), name, proven, proven, True), None


def _proof(problem: Problem) -> tuple[str, InfeasibleError | None, int]:
    """Returns the constraint that no plan can meet, its error, and the bytes that every plan lacks; no error where none is
    proven.
    """
    try:
        check_possible(problem)
    except InfeasibleError as error:
        constraint = _constraint(problem, error)
        if constraint == NOWHERE:
            return constraint, error, 0
        bounds = lower_bounds(problem)
        total = bounds.resident_bytes + bounds.live_bytes - bounds.capacity_bytes
        return constraint, error, max(error.short_bytes, int(total) if math.isfinite(total) else 0)
    return "", None, 0


def _constraint(problem: Problem, error: InfeasibleError) -> str:
    if not problem.group_allowed.any(axis=1).all():
        return NOWHERE
    if error.device is None:
        return TOTAL
    device = next(d for d, item in enumerate(problem.devices) if item.name == error.device)
    held = int(problem.resident_bytes[problem.group_device == device].sum())
    return FIXED if held > problem.memory_limit_bytes[device] else GROUP
