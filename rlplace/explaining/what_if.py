"""What other hardware, or more micro-batches, would bring: the same plan simulated there, and the best that a search finds.

Every question is asked twice, because a plan made for four devices does not use a fifth. What is found for the hardware as it
is starts the search for every other one, and the same plan is always among the answers, so no answer is worse than what is
known already. What a change is worth is therefore its re-planned step against the re-planned step as things are, by the
sample where the numbers of samples differ.
"""

from __future__ import annotations

import dataclasses
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
class _Answer:
    step_s: float
    devices: NDArray[np.int32]


def what_if(run: Run, *, calls: int = CALLS, time_limit_s: float | None = None, seed: int = 0) -> tuple[WhatIf, ...]:
    """The plan and its hardware as they are, then one change at a time.

    Args:
        run: The plan as it is; it completes.
        calls: Simulations of each search beside the classical floor; 0: nothing is planned anew.
        time_limit_s: Seconds of each search.
        seed: Of the search.
    """
    limits: dict[str, Any] = {"calls": calls, "time_limit_s": time_limit_s, "seed": seed}
    reason = _not_replanned(run.plan, calls)
    first = None if reason else _replan(run, run.given, [], **limits)
    answers = [_entry(AS_IS, run, first, reason or _execution_note(run.plan))]
    for name, problem, note in _changes(run):
        same = run_unchecked(problem, _fitted(run.plan, problem))
        found = None if reason else _replan(same, problem, [] if first is None else [first.devices], **limits)
        answers.append(_entry(name, same, found, note))
    more = _more_replicas(run)
    if more is not None:
        answers.append(_entry("one more device, one more replica", more, None, ""))
    if run.plan.order is None and not run.plan.shards:
        longer = _more_microbatches(run)
        if longer is not None:
            found = None if reason else _replan(longer, run.given, [] if first is None else [first.devices], **limits)
            answers.append(_entry(f"{longer.plan.microbatches} micro-batches", longer, found, ""))
    return tuple(answers)


def _entry(change: str, same: Run, found: _Answer | None, note: str) -> WhatIf:
    step = None if found is None else found.step_s
    return WhatIf(change, same.line.step_time_s, same.line.feasible, same.line.samples, step, note)


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


def _replan(
    same: Run, problem: Problem, starts: list[NDArray[np.int32]], *, calls: int, time_limit_s: float | None, seed: int
) -> _Answer | None:
    """The best plan of the floor, of a search from the same plan and of those given; None when nothing fits."""
    plan = same.plan
    if plan.recompute:
        from rlplace.plan.recompute import recompute

        problem = recompute(problem, plan.recompute)
    here = np.array(plan.device_of_group if plan.replicas is None else np.array(plan.replicas[0])[plan.device_of_group])
    schedule = plan.schedule if plan.schedule in FREE_SCHEDULES else "1f1b"
    execution: dict[str, Any] = {"microbatches": plan.microbatches, "schedule": schedule}
    found = [_Answer(same.step_s, here.astype(np.int32))] if same.line.feasible else []
    for start in starts:
        line = run_unchecked(problem, _plain(plan, start, schedule)).line
        if line.feasible and line.step_time_s is not None:
            found.append(_Answer(line.step_time_s, start))
    try:
        floor = get_planner("best")(problem, seed=seed, time_limit_s=time_limit_s, **execution)
        found.append(_Answer(float(floor.predicted["step_time_s"]), floor.device_of_group))
    except InfeasibleError:
        pass
    start = min(found, key=lambda answer: answer.step_s).devices if found else here
    try:
        searched = get_planner("local_search")(
            problem, seed=seed, time_limit_s=time_limit_s, start=start, calls=calls, **execution
        )
        found.append(_Answer(float(searched.predicted["step_time_s"]), searched.device_of_group))
    except InfeasibleError:
        pass
    return min(found, key=lambda answer: answer.step_s, default=None)


def _plain(plan: PlacementPlan, devices: NDArray[np.int32], schedule: str) -> PlacementPlan:
    """Devices alone, run as planners run them."""
    return dataclasses.replace(
        plan, device_of_group=devices, priority=None, order=None, stage_of_group=None, schedule=schedule, replicas=None,
        shards=None, recompute=None, optimizer_sharding=False,
    )  # fmt: skip


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
