"""The order of priority in which ready tasks start."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.problem import FORWARD, Problem
from rlplace.schedule import SCHEDULES
from rlplace.simulator.tasks import TaskGraph


def reference_priority(problem: Problem) -> NDArray[np.float64]:
    """Bottom level of every op: the longest path from its start to the end of the step, without communication.

    An op counts with the mean of `time_s` over the devices that can run it, summed left to right.

    Returns:
        float64 [N] seconds.
    """
    level = np.zeros(problem.num_ops)
    successors: list[list[int]] = [[] for _ in range(problem.num_ops)]
    for producer, consumer in zip(*(ends.tolist() for ends in problem.op_edges), strict=True):
        successors[producer].append(consumer)
    for op in problem.topological_order[::-1].tolist():
        total, count = 0.0, 0
        for time in problem.time_s[op].tolist():
            if time == time:
                total, count = total + time, count + 1
        level[op] = total / count + max((level[s] for s in successors[op]), default=0.0)
    return level


def task_ranks(problem: Problem, tasks: TaskGraph, schedule: str, priority: NDArray[np.float64] | None) -> NDArray[np.int32]:
    """Which of two ready tasks starts first: the one of lower rank.

    By default the earlier micro-batch, then the longer bottom level, then the smaller op number; where the schedule says so,
    backward and update before forward (see also `ReferenceRun.start_tasks`). A `priority` stands in for the bottom level; under
    a schedule that goes by priority alone it also comes before the micro-batch.

    Returns:
        int32 [K], distinct.
    """
    value = (reference_priority(problem) if priority is None else priority)[tasks.op]
    keys: list[NDArray[Any]] = [tasks.op, -value, tasks.microbatch]  # the last key counts most
    if SCHEDULES[schedule].by_priority_alone and priority is not None:
        keys = [tasks.op, tasks.microbatch, -value]
    if SCHEDULES[schedule].backward_first:
        keys.append((problem.op_phase[tasks.op] == FORWARD).astype(np.int32))
    rank = np.empty(tasks.num_tasks, dtype=np.int32)
    rank[np.lexsort(keys)] = np.arange(tasks.num_tasks)
    return rank
