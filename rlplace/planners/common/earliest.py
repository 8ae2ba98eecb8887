"""What m-ETF and m-SCT share: the state that an earliest-task-first kernel fills, and what it leaves open."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.planners.common.evaluate import Assignment
from rlplace.planners.common.oparrays import op_arrays, upward_rank
from rlplace.problem import Problem


def schedule_earliest(
    problem: Problem, subset: Sequence[int], share: float, kernel: Callable[[tuple[Any, ...], tuple[Any, ...]], Any]
) -> tuple[Assignment, NDArray[np.float64], NDArray[np.float64], Any]:
    """Runs a kernel of the earliest-task-first family on a subset of devices with a share of their memory.

    Args:
        problem: The problem.
        subset: Devices that may be used.
        share: Part of the memory that may be planned.
        kernel: Called with the state that it fills (`priority` to `now`) and the graph (`output_ptr` to `num_fresh`), in the
            order of `rlplace.planners.common.listkernels.earliest_task_first`.

    Returns:
        int32 [G] devices; the kernel's own start and finish times, float64 [N] seconds; what it returned.
    """
    arrays = op_arrays(problem)
    mask = np.zeros(problem.num_devices, dtype=bool)
    mask[list(subset)] = True
    devices = np.full(problem.num_groups, -1, dtype=np.int32)
    room = problem.memory_limit_bytes * share
    priority = upward_rank(problem, communication=False)
    ops, tensors, count = problem.num_ops, problem.num_tensors, problem.num_devices
    start, finish, arrival = np.zeros(ops), np.zeros(ops), np.full((tensors, count), -1.0)
    missing, offered, fresh = arrays.num_made_inputs.copy(), np.zeros(ops, dtype=np.int64), np.zeros(ops, dtype=np.int64)
    ready = arrays.order[missing[arrays.order] == 0]
    fresh[: len(ready)] = ready
    later, now = (
        (np.empty((count, ops)), np.empty((count, ops), dtype=np.int64), np.zeros(count, dtype=np.int64)) for _ in range(2)
    )
    state = (
        priority, mask, devices, room, start, finish, arrival, np.zeros(arrays.num_channels), np.zeros(count), missing,
        np.zeros(ops, dtype=np.bool_), offered, fresh, *later, *now,
    )  # fmt: skip
    graph = (
        arrays.output_ptr, arrays.outputs, arrays.consumer_ptr, arrays.consumers, arrays.time_s, arrays.op_group,
        arrays.footprint, *arrays.links(), len(ready),
    )  # fmt: skip
    result = kernel(state, graph)
    for group in np.flatnonzero(devices < 0):  # groups without ops
        devices[group] = int(np.where(problem.group_allowed[group], room, -np.inf).argmax())
        room[devices[group]] -= float(arrays.footprint[group])
    return devices, start, finish, result
