"""What other hardware, or more micro-batches, would bring: the same plan simulated there, and the best that a search finds.

Every question is asked twice, because a plan made for four devices does not use a fifth. The same plan is among the answers,
and what is found for one question is simulated for all, so no answer is worse than what is known already. What a change is
worth is therefore its re-planned step against the re-planned step as things are, by the sample where the numbers of samples
differ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlplace.explaining.questions import AS_IS, questions
from rlplace.explaining.replan import assignments, strategies
from rlplace.explaining.simulated_plan import SimulatedPlan
from rlplace.plan.plan import PlacementPlan
from rlplace.problem import Problem
from rlplace.schedule import free_schedule

CALLS = 256
"""Simulations of each search beside the classical floor."""


@dataclass(frozen=True)
class WhatIf:
    """One change.

    Attributes:
        change: In words.
        same_s: Step time of the same plan; None when it cannot complete.
        same_feasible: Whether that fits.
        samples: Samples of a step.
        replanned_s: Step time of the best plan that was found, never above a feasible `same_s`; None when the search found
            nothing that fits, or was not made.
        note: What to know about the answer, or empty.
    """

    change: str
    same_s: float | None
    same_feasible: bool
    samples: int
    replanned_s: float | None
    note: str = ""

    @property
    def sample_s(self) -> float | None:
        """Seconds a sample of the best that is known; None when nothing fits."""
        step = self.replanned_s if self.replanned_s is not None else self.same_s if self.same_feasible else None
        return None if step is None else step / max(self.samples, 1)


def what_if(
    run: SimulatedPlan,
    *,
    at: Callable[[int], Problem] | None = None,
    calls: int = CALLS,
    time_limit_s: float | None = None,
    seed: int = 0,
) -> tuple[WhatIf, ...]:
    """The plan and its hardware as they are, then one change at a time.

    Args:
        run: The plan as it is; it completes.
        at: The plan's problem for a micro-batch of so many samples, for plans with replicas; None: for its own only.
        calls: Simulations of each search beside the classical floor; 0: nothing is planned anew.
        time_limit_s: Seconds of each search.
        seed: Seed of the search.
    """
    plan, asked = run.plan, list(questions(run))
    reason = _not_replanned(plan, calls)
    steps: list[float | None] = [None] * len(asked)
    if not reason:
        limits: dict[str, Any] = {"time_limit_s": time_limit_s, "seed": seed}
        steps = strategies(asked, at, **limits) if _replicated(plan) else assignments(asked, calls=calls, **limits)
    notes = {AS_IS: reason or _execution_note(plan, at is not None)}
    return tuple(
        WhatIf(q.change, q.same.line.step_time_s, q.same.line.feasible, q.same.line.samples, step, notes.get(q.change, ""))
        for q, step in zip(asked, steps, strict=True)
    )


def _replicated(plan: PlacementPlan) -> bool:
    return plan.replicas is not None and len(plan.replicas) > 1


def _not_replanned(plan: PlacementPlan, calls: int) -> str:
    if calls == 0:
        return "not planned anew: no simulations were allowed"
    if plan.shards:
        return "not planned anew: the plan cuts ops; plan again with 'rlplace place --planner pase'"
    return ""


def _execution_note(plan: PlacementPlan, any_size: bool) -> str:
    """How what is planned anew runs otherwise than the plan."""
    if not _replicated(plan):
        schedule = free_schedule(plan.schedule)
        return "" if schedule == plan.schedule else f"planned anew for schedule {schedule} instead of {plan.schedule}"
    kept = "any micro-batch" if any_size else "micro-batches of the plan's size"
    without = [
        name for name, used in (("recomputation", plan.recompute), ("a shared optimizer", plan.optimizer_sharding)) if used
    ]
    text = f"planned anew with any number of replicas and {kept}"
    return text + (f", without {' and '.join(without)}" if without else "")
