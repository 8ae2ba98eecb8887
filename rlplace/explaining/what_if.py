"""What other hardware, or more micro-batches, would bring: the same plan simulated there, and the best that a search finds.

Every question is asked twice, because a plan made for four devices does not use a fifth. The same plan is among the answers,
and what is found for one question is simulated for all, so no answer is worse than what is known already. What a change is
worth is therefore its re-planned step against the re-planned step as things are, by the sample where the numbers of samples
differ.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InfeasibleError, InputError
from rlplace.explaining import changes
from rlplace.explaining.bounds import channel_loads, device_loads
from rlplace.explaining.runs import Run, run_unchecked
from rlplace.plan.plan import FREE_SCHEDULES, PlacementPlan
from rlplace.plan.recompute import recompute
from rlplace.planners import get_planner
from rlplace.problem import Problem

CALLS = 256
"""Simulations of each search beside the classical floor."""

AS_IS = "as it is"


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


@dataclass(frozen=True, eq=False)
class _Question:
    """A changed problem and the plan on it.

    Attributes:
        change: In words.
        problem: Changed, and with the plan's recomputation lowered: what is planned anew.
        same: The plan as it is, there.
        note: See `WhatIf`.
    """

    change: str
    problem: Problem
    same: Run
    note: str

    @property
    def schedule(self) -> str:
        """By which planners plan."""
        return self.same.plan.schedule if self.same.plan.schedule in FREE_SCHEDULES else "1f1b"

    def step_s(self, devices: NDArray[np.int32]) -> float:
        """Step time of an assignment; inf when it does not fit."""
        plan = dataclasses.replace(
            self.same.plan, device_of_group=devices, priority=None, order=None, stage_of_group=None, schedule=self.schedule,
            replicas=None, shards=None, recompute=None, optimizer_sharding=False,
        )  # fmt: skip
        line = run_unchecked(self.problem, plan).line
        return float(line.step_time_s) if line.feasible and line.step_time_s is not None else float("inf")


def what_if(run: Run, *, calls: int = CALLS, time_limit_s: float | None = None, seed: int = 0) -> tuple[WhatIf, ...]:
    """The plan and its hardware as they are, then one change at a time.

    Args:
        run: The plan as it is; it completes.
        calls: Simulations of each search beside the classical floor; 0: nothing is planned anew.
        time_limit_s: Seconds of each search.
        seed: Of the search.
    """
    reason = _not_replanned(run.plan, calls)
    questions = list(_questions(run, reason or _execution_note(run.plan)))
    steps: list[float | None] = [None] * len(questions)
    if not reason:
        limits: dict[str, Any] = {"calls": calls, "time_limit_s": time_limit_s, "seed": seed}
        steps = _replanned(questions, limits)
    return tuple(
        WhatIf(q.change, q.same.line.step_time_s, q.same.line.feasible, q.same.line.samples, step, q.note)
        for q, step in zip(questions, steps, strict=True)
    )


def _replanned(questions: list[_Question], limits: dict[str, Any]) -> list[float | None]:
    """The best step of every question.

    What is found for one question is simulated for all of them, so that the luck of a search is not taken for the worth of a
    change.
    """
    pool: dict[bytes, NDArray[np.int32]] = {}
    for question in questions:
        starts = [_devices(question.same.plan), *pool.values()]
        for devices in _searched(question, starts, limits):
            pool[devices.tobytes()] = devices
    best: list[float | None] = []
    for question in questions:
        known = [d for d in pool.values() if int(d.max(initial=0)) < question.problem.num_devices]
        steps = [question.same.step_s] if question.same.line.feasible else []
        step = min([*steps, *(question.step_s(devices) for devices in known)], default=float("inf"))
        best.append(step if math.isfinite(step) else None)
    return best


def _searched(question: _Question, starts: list[NDArray[np.int32]], limits: dict[str, Any]) -> list[NDArray[np.int32]]:
    """The floor's plan, and what a search finds from the best plan that is known."""
    problem = question.problem
    execution = {"microbatches": question.same.plan.microbatches, "schedule": question.schedule}
    found = [devices for devices in starts if int(devices.max(initial=0)) < problem.num_devices]
    try:
        fixed = {"seed": limits["seed"], "time_limit_s": limits["time_limit_s"]}
        found.append(get_planner("best")(problem, **fixed, **execution).device_of_group)
    except InfeasibleError:
        pass
    start = min(found, key=question.step_s)
    try:
        found.append(get_planner("local_search")(problem, start=start, **limits, **execution).device_of_group)
    except InfeasibleError:
        pass
    return [np.ascontiguousarray(devices, dtype=np.int32) for devices in found]


def _devices(plan: PlacementPlan) -> NDArray[np.int32]:
    """The plan's devices in the cluster."""
    own = plan.device_of_group if plan.replicas is None else np.asarray(plan.replicas[0])[plan.device_of_group]
    return np.ascontiguousarray(own, dtype=np.int32)


def _questions(run: Run, note: str) -> Iterable[_Question]:
    """All questions that make sense for the plan, things as they are first."""
    yield _question(AS_IS, run.given, run, note)
    for change, problem, remark in _changes(run):
        yield _question(change, problem, run_unchecked(problem, _fitted(run.plan, problem)), remark)
    replicated = _more_replicas(run)
    if replicated is not None:
        yield _question("one more device, one more replica", replicated.given, replicated, "")
    longer = None if run.plan.order is not None or run.plan.shards else _more_microbatches(run)
    if longer is not None:
        yield _question(f"{longer.plan.microbatches} micro-batches", run.given, longer, "")


def _question(change: str, problem: Problem, same: Run, note: str) -> _Question:
    again = same.plan.recompute
    return _Question(change, recompute(problem, again) if again else problem, same, note)


def _changes(run: Run) -> Iterable[tuple[str, Problem, str]]:
    """Name, changed problem and note of every question that makes sense for the problem."""
    given = run.given
    loads = device_loads(run)
    busiest = int(np.argmax([load.busy_s for load in loads]))
    larger = changes.with_device(given, busiest)
    if larger is not None:
        yield f"one more device like {given.devices[busiest].name}", larger, ""
    if any(device.memory_bytes is not None for device in given.devices):
        yield "double the memory", changes.with_memory(given, 2.0), ""
    yield f"{given.devices[busiest].name} twice as fast", changes.with_speed(given, busiest, 2.0), ""
    if given.num_devices == 1:
        return
    yield "all links twice as fast", changes.with_links(given, 2.0), ""
    used = channel_loads(run)
    if used:
        yield f"link {used[0].name} twice as fast", changes.with_links(given, 2.0, used[0].channel), ""
    yield "communication for free", changes.with_free_links(given), ""


def _fitted(plan: PlacementPlan, problem: Problem) -> PlacementPlan:
    """The plan for a problem that may have more devices."""
    if plan.order is None:
        return plan
    empty: list[Any] = [[]] * (problem.num_devices - len(plan.order))
    return dataclasses.replace(plan, order=[*plan.order, *empty])


def _not_replanned(plan: PlacementPlan, calls: int) -> str:
    if calls == 0:
        return "not planned anew: no simulations were allowed"
    if plan.shards:
        return "not planned anew: the plan cuts ops; plan again with 'rlplace place --planner pase'"
    if plan.replicas and len(plan.replicas) > 1:
        return "not planned anew: the plan has replicas; plan again with 'rlplace place --global-batch'"
    return ""


def _execution_note(plan: PlacementPlan) -> str:
    return "" if plan.schedule in FREE_SCHEDULES else f"planned anew for schedule 1f1b instead of {plan.schedule}"


def _more_microbatches(run: Run) -> Run | None:
    """The plan with 4 micro-batches instead of one, or with twice as many."""
    plan = run.plan
    single = plan.microbatches == 1
    schedule = "1f1b" if single and plan.schedule == "list" else plan.schedule
    try:
        return run_unchecked(
            run.given, dataclasses.replace(plan, microbatches=4 if single else 2 * plan.microbatches, schedule=schedule)
        )
    except InputError:  # too many tasks, or a schedule that cannot run so many
        return None


def _more_replicas(run: Run) -> Run | None:
    """Data parallel on single devices: the plan with one more replica on one more device."""
    rows = run.plan.replicas
    if not rows or len(rows) < 2 or any(len(row) != 1 for row in rows):
        return None
    problem = changes.with_device(run.given, int(rows[0][0]))
    if problem is None or problem.num_devices > run.given.num_devices + 1:
        return None
    plan = dataclasses.replace(run.plan, replicas=[*rows, [problem.num_devices - 1]])
    try:
        return run_unchecked(problem, _fitted(plan, problem))
    except InputError:
        return None
