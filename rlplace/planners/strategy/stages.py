"""Other ways to run a pipeline once a plan for it is known: schedules for its stages, and several stages a device.

Some schedules want a chain of stages in a given layout, which a planner that minimises the step of one
micro-batch does not build. Here the groups are cut, in topological order, into contiguous parts with the smallest largest time
(exactly, by bisection on that time), which are then dealt out to the devices in a loop or a v.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InputError
from rlplace.planners.common.evaluate import Assignment
from rlplace.planners.common.groupgraph import group_graph
from rlplace.planners.common.subsets import device_order
from rlplace.problem import BACKWARD_WEIGHT, Problem
from rlplace.schedule import FREE_SCHEDULES, SCHEDULES, V
from rlplace.simulator import Timeline, simulate


@dataclass(frozen=True, eq=False)
class Pipelined:
    """A way to run the micro-batches of a problem.

    Attributes:
        devices: int32 [G].
        schedule: Name of the schedule.
        stage_of_group: int32 [G], or None where the stage is the device.
        line: What the simulator says.
    """

    devices: Assignment
    schedule: str
    stage_of_group: NDArray[np.int32] | None
    line: Timeline = field(repr=False)


def run_pipelined(
    problem: Problem, devices: Assignment, schedule: str, microbatches: int, stages: NDArray[np.int32] | None = None
) -> Pipelined | None:
    """Simulates a schedule; None where the problem or its stages do not allow it."""
    how: dict[str, Any] = {} if stages is None else {"stage_of_group": stages}
    try:
        line = simulate(problem, devices, microbatches=microbatches, schedule=schedule, **how)
    except InputError:  # no chain of stages, or torch has no such schedule for so many stages and micro-batches
        return None
    return Pipelined(devices, schedule, stages, line)


def other_schedules(problem: Problem, devices: Assignment, microbatches: int, *, known: str) -> Iterator[Pipelined]:
    """Every other way to run the micro-batches that the problem allows.

    Args:
        problem: The problem.
        devices: int32 [G], a plan's assignment, kept by the schedules that run any stages.
        microbatches: Micro-batches of a step.
        known: The schedule that is known already.
    """
    used = len(np.unique(devices))
    if used < 2:  # on one device all schedules do the same work, one task after the other
        return
    tries: list[tuple[Assignment, str, NDArray[np.int32] | None]] = [
        (devices, name, None) for name in FREE_SCHEDULES if name != known
    ]
    row = np.array(device_order(problem)[:used], dtype=np.int32)
    weights_apart = (problem.op_phase == BACKWARD_WEIGHT).any()
    for name, schedule in SCHEDULES.items():
        laps = schedule.tried_stages
        if laps == 0 or (schedule.splits_backward and not weights_apart):
            continue
        cut = contiguous_parts(problem, used * laps) if laps > 1 else None
        if cut is not None:
            turns = [row[::-1] if schedule.layout == V and lap % 2 else row for lap in range(laps)]
            tries.append((np.concatenate(turns)[cut], name, cut))
        elif laps == 1:
            tries.append((devices, name, None))
    for assignment, name, stages in tries:
        if problem.group_allowed[np.arange(problem.num_groups), assignment].all():
            found = run_pipelined(problem, assignment, name, microbatches, stages)
            if found is not None:
                yield found


def contiguous_parts(problem: Problem, parts: int) -> NDArray[np.int32] | None:
    """The contiguous cut of the groups, in topological order, with the smallest largest part.

    Args:
        problem: The problem; a group counts with its mean time.
        parts: Number of parts.

    Returns:
        int32 [G], the part of every group, none empty; None when there are fewer groups than parts.
    """
    if problem.num_groups < parts:
        return None
    graph = group_graph(problem)
    weight = graph.mean_time_s[graph.order]
    if not np.isfinite(weight).all():
        return None
    end = np.cumsum(weight)
    low, high = max(float(weight.max()), float(end[-1]) / parts), float(end[-1])
    cuts = _fill(end, high, parts)
    for _ in range(60):
        bound = 0.5 * (low + high)
        found = _fill(end, bound, parts)
        if found is None:
            low = bound
        else:
            cuts, high = found, bound
    assert cuts is not None
    part = np.empty(problem.num_groups, dtype=np.int32)
    part[graph.order] = np.repeat(np.arange(parts, dtype=np.int32), np.diff([0, *cuts]))
    return part


def _fill(end: NDArray[np.float64], bound: float, parts: int) -> list[int] | None:
    """Ends of parts of at most `bound` each, as full as they can be while later parts keep one item each; None: impossible."""
    cuts: list[int] = []
    start, count = 0, len(end)
    for part in range(parts):
        before = float(end[start - 1]) if start else 0.0
        # A part that holds just what the bound allows must not be lost to rounding.
        reach = int(np.searchsorted(end, (before + bound) * (1 + 1e-12), side="right"))
        start = max(min(reach, count - (parts - part - 1)), start + 1)
        cuts.append(start)
    return cuts if start == count else None
