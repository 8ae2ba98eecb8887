"""Earliest task first on a subset of devices with a share of their memory: the schedules of m-ETF and m-SCT."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from rlplace.planners.common.earliestkernel import earliest_task_first
from rlplace.planners.common.evaluate import Assignment
from rlplace.planners.common.oparrays import op_arrays, place_rest, upward_rank
from rlplace.planners.common.subsets import device_subsets
from rlplace.problem import Problem


def earliest_assignments(problem: Problem, favorite: NDArray[np.int32] | None = None) -> Iterator[Assignment]:
    """Assignments for every number of devices and share of memory; see `earliest_schedule`."""
    limited = bool(np.isfinite(problem.memory_limit_bytes).any())
    for subset in reversed(device_subsets(problem, least=min(2, problem.num_devices))):
        for share in (1.0, 0.85) if limited else (1.0,):
            yield earliest_schedule(problem, subset, share, favorite)[0]


def earliest_schedule(
    problem: Problem, subset: Sequence[int], share: float = 1.0, favorite: NDArray[np.int32] | None = None
) -> tuple[Assignment, NDArray[np.float64], NDArray[np.float64], int]:
    """Of all ready ops and all devices with room for the op's group, the pair that can start earliest goes next.

    Args:
        problem: The problem.
        subset: Devices that may be used.
        share: Part of the memory that may be planned.
        favorite: int32 [N], the favorite child of every op, for which its device may wait; -1 for none. None: no op has one.

    Returns:
        int32 [G] devices; start and finish times of the schedule itself, float64 [N] seconds; how often a device waited for a
        favorite.
    """
    arrays = op_arrays(problem)
    mask = np.zeros(problem.num_devices, dtype=bool)
    mask[list(subset)] = True
    devices = np.full(problem.num_groups, -1, dtype=np.int32)
    room = problem.memory_limit_bytes * share
    ops, tensors, count = problem.num_ops, problem.num_tensors, problem.num_devices
    favorite = np.full(ops, -1, dtype=np.int32) if favorite is None else favorite
    start, finish, arrival = np.zeros(ops), np.zeros(ops), np.full((tensors, count), -1.0)
    missing, offered, fresh = arrays.num_made_inputs.copy(), np.zeros(ops, dtype=np.int64), np.zeros(ops, dtype=np.int64)
    ready = arrays.order[missing[arrays.order] == 0]
    fresh[: len(ready)] = ready
    later, now = (
        (np.empty((count, ops)), np.empty((count, ops), dtype=np.int64), np.zeros(count, dtype=np.int64)) for _ in range(2)
    )
    waits = earliest_task_first(
        favorite, upward_rank(problem, communication=False), mask, devices, room, start, finish, arrival,
        np.zeros(arrays.num_channels), np.zeros(count), missing, np.zeros(ops, dtype=np.bool_), offered, fresh, *later, *now,
        np.full((ops, count), np.inf), np.zeros(ops), np.full(count, -1, dtype=np.int64), arrays.output_ptr, arrays.outputs,
        arrays.consumer_ptr, arrays.consumers, arrays.time_s, arrays.op_group, arrays.footprint, *arrays.links(), len(ready),
    )  # fmt: skip
    place_rest(problem, devices, room)
    return devices, start, finish, int(waits)
