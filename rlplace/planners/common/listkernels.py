"""Compiled list scheduling: upward ranks, HEFT, and parts of other list schedulers.

All of it lies in one file, because numba's on-disk cache only notices changes of the file that holds the compiled function.
The kernels allocate nothing and take plain arrays of one type each: that halves the time to compile them, which the first
start after an installation pays.

Arrays are those of `rlplace.planners.common.oparrays.OpArrays`. State of a schedule that both schedulers fill:
    devices: int32 [G], -1 where open. finish: float64 [N]. room: float64 [D] bytes.
    arrival: float64 [T, D], when a tensor was sent there, -1 if it was not. channel_free: float64 [C].
"""

# Compiled functions take their types from their arguments.
# mypy: disable-error-code="no-untyped-def, assignment"
from __future__ import annotations

import numpy as np

from rlplace.compiled import entry, inner

# A division by zero cannot happen, so no code for its error, nor for callers in C. Values that go to an inner function are made
# with `np.int64` and `np.bool_`: for literals numba would compile it once more.


@entry
def upward_rank_kernel(order, mean, edge, op_group, input_ptr, inputs, producer, below):
    """Adds to `below` [N] the mean time of each op plus the longest way to the end; `edge` [T] counts between groups."""
    for i in range(len(order) - 1, -1, -1):
        op = order[i]
        below[op] += mean[op]
        for k in range(input_ptr[op], input_ptr[op + 1]):
            source = producer[inputs[k]]
            if source >= 0:
                cost = 0.0 if op_group[source] == op_group[op] else edge[inputs[k]]
                below[source] = max(below[source], cost + below[op])


@inner
def _inputs_present(
    op, device, commit, contention, devices, finish, arrival, channel_free, input_ptr, inputs, producer, holder, size, table,
    tables, latency, inverse, channel_ptr, channels,
):  # fmt: skip
    """Time at which all inputs of an op can be on a device; `commit` books the transfers, one after another."""
    present = 0.0
    for k in range(input_ptr[op], input_ptr[op + 1]):
        tensor = inputs[k]
        source = devices[holder[tensor]]
        at = finish[producer[tensor]] if producer[tensor] >= 0 else 0.0
        if source != device and source >= 0:
            if arrival[tensor, device] >= 0.0:
                at = arrival[tensor, device]
            else:
                pair = source * len(latency) + device
                if contention:
                    for c in range(channel_ptr[pair], channel_ptr[pair + 1]):
                        at = max(at, channel_free[channels[c]])
                if table[tensor] >= 0:
                    at += tables[table[tensor], source, device]
                else:
                    at += latency[source, device] + size[tensor] * inverse[source, device]
                if commit:
                    arrival[tensor, device] = at
                    for c in range(channel_ptr[pair], channel_ptr[pair + 1]):
                        channel_free[channels[c]] = at
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
def heft(
    order, mask, contention, devices, room, start, finish, arrival, channel_free, busy_start, busy_end, count, time_s, op_group,
    footprint, input_ptr, inputs, producer, holder, size, table, tables, latency, inverse, channel_ptr, channels,
):  # fmt: skip
    """Earliest finish time with insertion: fills `devices`, `start` and `finish`.

    order: int32 [N], ops in the order they are scheduled. mask: bool [D], devices that may be used.
    busy_start, busy_end: float64 [D, N + 1], busy intervals of each device. count: int64 [D], how many, zeros.
    """
    num_devices = len(mask)
    no, yes, none = np.bool_(0), np.bool_(1), np.int64(-1)
    for i in range(len(order)):
        op = np.int64(order[i])
        group = op_group[op]
        decided = devices[group]
        best, best_start, best_device, best_slot = np.inf, 0.0, none, 0
        # Rounds: devices of the subset with room; any device with room; any device the group may sit on.
        for attempt in range(3):
            for device in range(num_devices):
                seconds = time_s[op, device]
                if (decided >= 0 and device != decided) or seconds == np.inf:
                    continue
                if decided < 0 and ((attempt == 0 and not mask[device]) or (attempt < 2 and room[device] < footprint[group])):
                    continue
                ready = _inputs_present(
                    op, device, no, contention, devices, finish, arrival, channel_free, input_ptr, inputs, producer, holder,
                    size, table, tables, latency, inverse, channel_ptr, channels,
                )  # fmt: skip
                begin, slot = _find_gap(device, busy_start, busy_end, count, ready, seconds)
                if begin + seconds < best:
                    best, best_start, best_device, best_slot = begin + seconds, begin, device, slot
            if best_device >= 0:
                break
        if decided < 0:
            devices[group] = best_device
            room[best_device] -= footprint[group]
        seconds = time_s[op, best_device]
        ready = _inputs_present(
            op, best_device, yes, contention, devices, finish, arrival, channel_free, input_ptr, inputs, producer, holder,
            size, table, tables, latency, inverse, channel_ptr, channels,
        )  # fmt: skip
        if ready > best_start:
            # Inputs that queue for one channel arrive later together than each would alone.
            best_start, best_slot = _find_gap(best_device, busy_start, busy_end, count, ready, seconds)
        start[op], finish[op] = best_start, best_start + seconds
        if seconds > 0.0:
            _occupy(best_device, busy_start, busy_end, count, best_slot, best_start, best_start + seconds)


@inner
def _push(device, keys, items, size, key, item):
    """Adds to the device's binary heap with the smallest (key, item) on top."""
    i = size[device]
    size[device] = i + 1
    while i > 0:
        parent = (i - 1) >> 1
        if keys[device, parent] < key or (keys[device, parent] == key and items[device, parent] < item):
            break
        keys[device, i], items[device, i] = keys[device, parent], items[device, parent]
        i = parent
    keys[device, i], items[device, i] = key, item


@inner
def _pop(device, keys, items, size):
    """Removes the top of the device's heap; the caller has read it."""
    last = size[device] - 1
    size[device] = last
    key, item = keys[device, last], items[device, last]
    i = 0
    while True:
        child = 2 * i + 1
        if child >= last:
            break
        right = child + 1
        if right < last and (
            keys[device, right] < keys[device, child]
            or (keys[device, right] == keys[device, child] and items[device, right] < items[device, child])
        ):
            child = right
        if key < keys[device, child] or (key == keys[device, child] and item < items[device, child]):
            break
        keys[device, i], items[device, i] = keys[device, child], items[device, child]
        i = child
    keys[device, i], items[device, i] = key, item
