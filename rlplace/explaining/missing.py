"""What an infeasible problem or plan lacks: which constraint fails, on which device, by how many bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlplace.errors import InfeasibleError
from rlplace.explaining.simulated_plan import SimulatedPlan
from rlplace.explaining.trials import Tester, Trial, only_plan_short, overflow, without_advice
from rlplace.planners.common.bounds import lower_bounds
from rlplace.planners.common.shortage import check_possible
from rlplace.problem import Problem
from rlplace.text import bytes_text

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
        constraint: See `TOTAL` and the others.
        message: Where, by how much.
        device: The device that is short, None when it is all of them together or another constraint.
        short_bytes: Missing in the plan, or in the closest plan that was found; what is proven where no plan was looked at.
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
    """What is missing, and the plan that had to be looked for to know it.

    Args:
        problem: The problem.
        run: A plan of it that does not fit; None: it is not known that one exists.
        tester: Looks for a plan where no bound proves that there is none.
    """
    if run is not None:
        return _of_plan(run), None
    constraint, error, proven = _proof(problem)
    only = only_plan_short(problem, tester.execution)
    if error is None and only is not None and tester.microbatches == 1:
        single, limit = problem.devices[0].name, problem.devices[0].memory_bytes or 0
        message = f"{single} needs {bytes_text(limit + only)}, has {bytes_text(limit)}: {only} bytes short"
        return Shortage(DEVICE, message, single, only, only, True), None
    if error is None:
        trial = tester.plan("another plan", problem)
        message = f"a plan that fits was found by {trial.how}" if trial.fits else trial.how
        return Shortage(DEVICE, message, None, trial.short_bytes, 0, False), trial
    name = error.device
    if only is not None:  # there is one plan, so its shortage is exact
        name, proven = problem.devices[0].name, only
    return Shortage(constraint, without_advice(error), name, proven, proven, True), None


def _of_plan(run: SimulatedPlan) -> Shortage:
    """What a plan lacks, and whether any plan like it lacks something.

    Bounds know nothing of cut ops, and of replicas only that they need no less than one.
    """
    plan, replicated = run.plan, len(run.plan.replicas or [()]) > 1
    error, proven = None, 0
    if not plan.shards and not (replicated and plan.recompute):
        _, error, proven = _proof(run.given if replicated else run.problem)
    device, short = overflow(run)
    message = f"the plan does not fit: {'; '.join(run.line.violations)}"
    name = run.problem.devices[device].name if short else None
    return Shortage(DEVICE if short else OTHER, message, name, short, proven, error is not None)


def _proof(problem: Problem) -> tuple[str, InfeasibleError | None, int]:
    """The constraint that no plan can meet, its error, and the bytes that every plan lacks; no error where none is proven."""
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
