"""HEFT: heterogeneous earliest finish time.

Problem: makespan of a task graph on unlike devices with communication. Ops are taken by falling upward rank (mean time plus
the longest mean path, transfers included, to the end) and put on the device where they finish earliest, into the first idle
gap that is long enough (insertion).

Paper: Topcuoglu, Hariri, Wu, "Performance-effective and low-complexity task scheduling for heterogeneous computing", IEEE
Transactions on Parallel and Distributed Systems 13(3), 2002.

Departures: ops of a group share a device, so the first op of a group decides for all; a device is only considered while the
group's footprint (resident bytes plus saved activations) fits; a tensor that was sent to a device once is there for later
readers. Candidates differ in the number of devices, in whether transfers queue for channels, and in whether ranks count
transfers. HEFT's own schedule is thrown away: the executor, which never idles on purpose, runs the assignment.
"""

# Compiled functions take their types from their arguments.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from rlplace.plan import PlacementPlan
from rlplace.planners.evaluate import Assignment
from rlplace.planners.floor import one_shot
from rlplace.planners.oparrays import arrival_time, by_rank, op_arrays, upward_rank
from rlplace.planners.subsets import device_subsets
from rlplace.problem import Problem


def heft(problem: Problem, *, seed: int = 0, time_limit_s: float | None = None) -> PlacementPlan:
    """The best of HEFT's assignments; see the module docstring."""
    return one_shot(problem, "heft", candidates, seed=seed, time_limit_s=time_limit_s)


def candidates(problem: Problem, seed: int) -> Iterator[Assignment]:
    """Assignments for every number of devices, with and without queueing transfers and ranks that count them."""
    del seed
    orders = [by_rank(problem, upward_rank(problem, communication=flag)) for flag in (True, False)]
    for subset in reversed(device_subsets(problem, least=min(2, problem.num_devices))):
        for order, contention in ((orders[0], False), (orders[0], True), (orders[1], True)):
            yield schedule(problem, order, subset, contention=contention).devices


@dataclass(frozen=True, eq=False)
class Schedule:
    """HEFT's own schedule.

    Attributes:
        devices: int32 [G].
        start_s: float64 [N].
        finish_s: float64 [N].
    """

    devices: Assignment
    start_s: NDArray[np.float64]
    finish_s: NDArray[np.float64]

    @property
    def makespan_s(self) -> float:
        """End of the last op."""
        return float(self.finish_s.max())


def schedule(
    problem: Problem,
    order: NDArray[np.int32],
    subset: Sequence[int],
    *,
    contention: bool,
    decided: NDArray[np.int32] | None = None,
    room_bytes: NDArray[np.float64] | None = None,
) -> Schedule:
    """Insertion-based earliest finish time.

    Args:
        problem: The problem.
        order: int32 [N], ops in the order they are scheduled, producers first.
        subset: Devices that may be used; groups that may sit on none of them go anywhere they may.
        contention: Whether transfers wait for their channels.
        decided: int32 [G], devices that are settled beforehand, -1 elsewhere.
        room_bytes: float64 [D], memory for footprints; default the devices' limits.
    """
    arrays = op_arrays(problem)
    mask = np.zeros(problem.num_devices, dtype=bool)
    mask[list(subset)] = True
    devices = np.full(problem.num_groups, -1, dtype=np.int32) if decided is None else decided.astype(np.int32)
    room = problem.memory_limit_bytes.copy() if room_bytes is None else room_bytes.astype(np.float64)
    placed = devices >= 0
    np.subtract.at(room, devices[placed], arrays.footprint[placed].astype(np.float64))
    start, finish = _heft(tuple(arrays), order, mask, devices, room, contention)
    # A group without ops has nothing to schedule; it goes where there is most room.
    for group in np.flatnonzero(devices < 0):
        devices[group] = int(np.where(problem.group_allowed[group], room, -np.inf).argmax())
        room[devices[group]] -= float(arrays.footprint[group])
    return Schedule(devices, start, finish)


@njit(cache=True)
def _find_gap(starts, ends, count, ready, length):
    """Start of the first idle gap of `length` not before `ready`, and the index of the busy interval after it."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if ends[middle] <= ready:
            low = middle + 1
        else:
            high = middle
    time = ready
    while low < count and starts[low] < time + length:
        time = ends[low]
        low += 1
    return time, low


@njit(cache=True)
def _occupy(starts, ends, count, at, start, end):
    """Inserts a busy interval before index `at`, merged with those it touches; returns the new number of intervals."""
    joins_left = at > 0 and ends[at - 1] == start
    joins_right = at < count and starts[at] == end
    if joins_left and joins_right:
        ends[at - 1] = ends[at]
        for i in range(at, count - 1):
            starts[i], ends[i] = starts[i + 1], ends[i + 1]
        return count - 1
    if joins_left:
        ends[at - 1] = end
        return count
    if joins_right:
        starts[at] = start
        return count
    for i in range(count, at, -1):
        starts[i], ends[i] = starts[i - 1], ends[i - 1]
    starts[at], ends[at] = start, end
    return count + 1


@njit(cache=True)
def _heft(a, order, mask, devices, room, contention):
    (time_s, op_group, input_ptr, inputs, producer, _, _, _, _, _, _, _, _, channel_ptr, channels, footprint, _) = a
    num_ops, num_devices = time_s.shape
    start, finish = np.zeros(num_ops), np.zeros(num_ops)
    arrival = np.full((len(producer), num_devices), -1.0)
    channel_free = np.zeros(channels.max() + 1 if len(channels) else 1)
    busy_start, busy_end = np.empty((num_devices, num_ops + 1)), np.empty((num_devices, num_ops + 1))
    count = np.zeros(num_devices, dtype=np.int64)
    for op in order:
        group = op_group[op]
        decided = devices[group]
        best, best_start, best_device, best_slot = np.inf, 0.0, -1, 0
        # Rounds: devices of the subset with room; any device with room; any device the group may sit on.
        for attempt in range(3):
            for device in range(num_devices):
                if decided >= 0 and device != decided:
                    continue
                if time_s[op, device] == np.inf:
                    continue
                if decided < 0 and ((attempt == 0 and not mask[device]) or (attempt < 2 and room[device] < footprint[group])):
                    continue
                ready = 0.0
                for k in range(input_ptr[op], input_ptr[op + 1]):
                    at, _ = arrival_time(a, inputs[k], device, devices, finish, arrival, channel_free, contention)
                    ready = max(ready, at)
                begin, slot = _find_gap(busy_start[device], busy_end[device], count[device], ready, time_s[op, device])
                if begin + time_s[op, device] < best:
                    best, best_start, best_device, best_slot = begin + time_s[op, device], begin, device, slot
            if best_device >= 0:
                break
        device = best_device
        if decided < 0:
            devices[group] = device
            room[device] -= footprint[group]
        ready = 0.0
        for k in range(input_ptr[op], input_ptr[op + 1]):
            tensor = inputs[k]
            at, source = arrival_time(a, tensor, device, devices, finish, arrival, channel_free, contention)
            if source >= 0:
                arrival[tensor, device] = at
                pair = source * num_devices + device
                for c in range(channel_ptr[pair], channel_ptr[pair + 1]):
                    channel_free[channels[c]] = at
            ready = max(ready, at)
        if ready > best_start:
            # Inputs that queue for one channel arrive later together than each would alone.
            best_start, best_slot = _find_gap(busy_start[device], busy_end[device], count[device], ready, time_s[op, device])
        start[op], finish[op] = best_start, best_start + time_s[op, device]
        if time_s[op, device] > 0.0:
            count[device] = _occupy(busy_start[device], busy_end[device], count[device], best_slot, start[op], finish[op])
    return start, finish
