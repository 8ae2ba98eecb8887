"""What other hardware, or more micro-batches, would bring: the same plan simulated there, and the best that a search finds.

Every question is asked twice, because a plan made for four devices does not use a fifth. The same plan is among the answers,
and what is found for one question is simulated for all, so no answer is worse than what is known already. What a change is
worth is therefore its re-planned step against the re-planned step as things are, by the sample where the numbers of samples
differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InfeasibleError
from rlplace.explaining.questions import AS_IS, Question, fitting_s, questions
from rlplace.explaining.simulated_plan import SimulatedPlan
from rlplace.planners import get_planner

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
    calls: int = CALLS,
    time_limit_s: float | None = None,
    seed: int = 0,
) -> tuple[WhatIf, ...]:
    """The plan and its hardware as they are, then one change at a time.

    Args:
        run: The plan as it is; it completes.
        calls: Simulations of each search beside the classical floor; 0: nothing is planned anew.
        time_limit_s: Seconds of each search.
        seed: Seed of the search.
    """
    asked = list(questions(run))
    reason = "" if calls else "not planned anew: no simulations were allowed"
    steps: list[float | None] = [None] * len(asked)
    if not reason:
        steps = assignments(asked, calls=calls, time_limit_s=time_limit_s, seed=seed)
    notes = {AS_IS: reason}
    return tuple(
        WhatIf(q.change, q.same.line.step_time_s, q.same.line.feasible, q.same.line.samples, step, notes.get(q.change, ""))
        for q, step in zip(asked, steps, strict=True)
    )


def assignments(questions: Sequence[Question], *, calls: int, time_limit_s: float | None, seed: int) -> list[float | None]:
    """The best step of every question with the plan's micro-batches and schedule; None where nothing fits.

    Args:
        questions: About a plan.
        calls: Simulations of each search beside the classical floor.
        time_limit_s: Seconds of each search.
        seed: Seed of the searches.
    """
    limits: dict[str, Any] = {"calls": calls, "time_limit_s": time_limit_s, "seed": seed}
    pool: dict[bytes, NDArray[np.int32]] = {}
    for question in questions:
        starts = [np.ascontiguousarray(question.same.plan.device_of_group, dtype=np.int32), *pool.values()]
        for devices in _searched(question, starts, limits):
            pool[devices.tobytes()] = devices
    best: list[float | None] = []
    for question in questions:
        known = [d for d in pool.values() if int(d.max(initial=0)) < question.problem.num_devices]
        best.append(_least(question, [question.step_s(devices) for devices in known]))
    return best


def _least(question: Question, steps: list[float]) -> float | None:
    step = min([fitting_s(question.same), *steps])
    return step if math.isfinite(step) else None


def _searched(question: Question, starts: list[NDArray[np.int32]], limits: dict[str, Any]) -> list[NDArray[np.int32]]:
    """The floor's plan, and what a search finds from the best plan that is known."""
    problem = question.problem
    execution = {"microbatches": question.same.plan.microbatches, "schedule": question.same.plan.schedule}
    candidates = [devices for devices in starts if int(devices.max(initial=0)) < problem.num_devices]
    try:
        fixed = {"seed": limits["seed"], "time_limit_s": limits["time_limit_s"]}
        candidates.append(get_planner("best")(problem, **fixed, **execution).device_of_group)
    except InfeasibleError:
        pass
    start = min(candidates, key=question.step_s)
    try:
        candidates.append(get_planner("local_search")(problem, start=start, **limits, **execution).device_of_group)
    except InfeasibleError:
        pass
    return [np.ascontiguousarray(devices, dtype=np.int32) for devices in candidates]
