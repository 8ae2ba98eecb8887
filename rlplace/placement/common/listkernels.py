"""Compiled list scheduling: upward ranks, HEFT, and parts of other list schedulers.

All of it lies in one file, because numba's on-disk cache only notices changes of the file that holds the compiled function.
The kernels allocate nothing and take arrays of one type each: that halves the time to compile them, which the first start after
an installation pays. `a` is an `rlplace.placement.common.oparrays.OpArrays`, `s` a `Schedule`.
"""

# Compiled functions take their types from their arguments.
# mypy: disable-error-code="no-untyped-def, assignment"
from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from rlplace.compiled import entry, inner

# A division by zero cannot happen, so no code for its error, nor for callers in C. Values that go to an inner function are made
# with `np.int64` and `np.bool_`: for literals numba would compile it once more.


class Schedule(NamedTuple):
    """A schedule that both schedulers fill."""

    mask: Any  # bool [D], devices that may be used
    devices: Any  # int32 [G], -1 where open
    room: Any  # float64 [D] bytes
    start: Any  # float64 [N]
    finish: Any  # float64 [N]
    arrival: Any  # float64 [T, D], when a tensor was sent there, -1 if it was not
    channel_free: Any  # float64 [C]


@entry
def upward_rank_kernel(a, mean, edge, below):
    """Adds to `below` [N] the mean time of each op plus the longest way to the end; `edge` [T] counts between groups."""
    for i in range(len(a.order) - 1, -1, -1):
        op = a.order[i]
        below[op] += mean[op]
        for k in range(a.input_ptr[op], a.input_ptr[op + 1]):
            source = a.producer[a.inputs[k]]
            if source >= 0:
                cost = 0.0 if a.op_group[source] == a.op_group[op] else edge[a.inputs[k]]
                below[source] = max(below[source], cost + below[op])


@inner
def _inputs_present(op, device, commit, contention, a, s):
    """Time at which all inputs of an op can be on a device; `commit` books the transfers, one after another."""
    present = 0.0
    for k in range(a.input_ptr[op], a.input_ptr[op + 1]):
        tensor = a.inputs[k]
        source = s.devices[a.holder[tensor]]
        at = s.finish[a.producer[tensor]] if a.producer[tensor] >= 0 else 0.0
        if source != device and source >= 0:
            if s.arrival[tensor, device] >= 0.0:
                at = s.arrival[tensor, device]
            else:
                pair = source * len(a.latency) + device
                if contention:
                    for c in range(a.channel_ptr[pair], a.channel_ptr[pair + 1]):
                        at = max(at, s.channel_free[a.channels[c]])
                if a.table[tensor] >= 0:
                    at += a.tables[a.table[tensor], source, device]
                else:
                    at += a.latency[source, device] + a.size[tensor] * a.inverse[source, device]
                if commit:
                    s.arrival[tensor, device] = at
                    for c in range(a.channel_ptr[pair], a.channel_ptr[pair + 1]):
                        s.channel_free[a.channels[c]] = at
        present = max(present, at)
    return present


@inner
def _find_gap(device, starts, ends, count, ready, length):
    """Start of the first idle gap of `length` not before `ready`, and the index of the busy interval after it."""
    low, high = 0, count[device]
    while low < high:
        middle = (low + high) >> 1
        if ends[device, middle] <= ready:
            low = middle + 1
        else:
            high = middle
    time = ready
    while low < count[device] and starts[device, low] < time + length:
        time = ends[device, low]
        low += 1
    return time, low


@inner
def _occupy(device, starts, ends, count, at, start, end):
    """Inserts a busy interval before index `at`, merged with those it touches."""
    size = count[device]
    joins_left = at > 0 and ends[device, at - 1] == start
    joins_right = at < size and starts[device, at] == end
    if joins_left and joins_right:
        ends[device, at - 1] = ends[device, at]
        for i in range(at, size - 1):
            starts[device, i], ends[device, i] = starts[device, i + 1], ends[device, i + 1]
        count[device] = size - 1
    elif joins_left:
        ends[device, at - 1] = end
    elif joins_right:
        starts[device, at] = start
    else:
        for i in range(size, at, -1):
            starts[device, i], ends[device, i] = starts[device, i - 1], ends[device, i - 1]
        starts[device, at], ends[device, at] = start, end
        count[device] = size + 1


@entry
def heft(order, contention, busy_start, busy_end, count, a, s):
    """Earliest finish time with insertion.

    order: int32 [N], ops in the order they are scheduled.
    busy_start, busy_end: float64 [D, N + 1], busy intervals of each device. count: int64 [D], how many, zeros.
    """
    num_devices = len(s.mask)
    no, yes, none = np.bool_(0), np.bool_(1), np.int64(-1)
    for i in range(len(order)):
        op = np.int64(order[i])
        group = a.op_group[op]
        decided = s.devices[group]
        best, best_start, best_device, best_slot = np.inf, 0.0, none, 0
        # Rounds: devices of the subset with room; any device with room; any device the group may sit on.
        for attempt in range(3):
            for device in range(num_devices):
                seconds = a.time_s[op, device]
                if (decided >= 0 and device != decided) or seconds == np.inf:
                    continue
                if decided < 0 and (
                    (attempt == 0 and not s.mask[device]) or (attempt < 2 and s.room[device] < a.footprint[group])
                ):
                    continue
                ready = _inputs_present(op, device, no, contention, a, s)
                begin, slot = _find_gap(device, busy_start, busy_end, count, ready, seconds)
                if begin + seconds < best:
                    best, best_start, best_device, best_slot = begin + seconds, begin, device, slot
            if best_device >= 0:
                break
        if decided < 0:
            s.devices[group] = best_device
            s.room[best_device] -= a.footprint[group]
        seconds = a.time_s[op, best_device]
        ready = _inputs_present(op, best_device, yes, contention, a, s)
        if ready > best_start:
            # Inputs that queue for one channel arrive later together than each would alone.
            best_start, best_slot = _find_gap(best_device, busy_start, busy_end, count, ready, seconds)
        s.start[op], s.finish[op] = best_start, best_start + seconds
        if seconds > 0.0:
            _occupy(best_device, busy_start, busy_end, count, best_slot, best_start, best_start + seconds)
