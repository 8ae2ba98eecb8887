"""Compiled list scheduling: upward ranks, HEFT and m-ETF.

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
def upward_rank(order, mean, edge, op_group, input_ptr, inputs, producer, below):
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
    """When all inputs of an op can be present on a device; `commit` books the transfers, one after another."""
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


@entry
def earliest_task_first(
    priority, mask, devices, room, start, finish, arrival, channel_free, free, missing, done, offered, fresh, later_key,
    later_op, later, now_key, now_op, now, output_ptr, outputs, consumer_ptr, consumers, time_s, op_group, footprint,
    input_ptr, inputs, producer, holder, size, table, tables, latency, inverse, channel_ptr, channels, num_fresh,
):  # fmt: skip
    """m-ETF: fills `devices`, `start` and `finish`.

    priority: float64 [N]. mask: bool [D], devices that may be used. free: float64 [D], zeros.
    missing: int64 [N], inputs that ops must still make. done: bool [N]. offered: int64 [N], devices that may take the op.
    fresh: int64 [N], the first `num_fresh` are ops without such inputs.
    later_key, later_op, later: Per device a heap [D, N] of ready ops whose inputs arrive later (by arrival), its size [D].
    now_key, now_op, now: The same for those that could start now (by priority).
    """
    num_ops, num_devices = time_s.shape
    no, yes, none = np.bool_(0), np.bool_(1), np.int64(-1)
    scheduled = 0
    while scheduled < num_ops:
        for i in range(num_fresh):
            op = fresh[i]
            group = op_group[op]
            if devices[group] < 0:
                fits, roomiest = False, -1
                for device in range(num_devices):
                    if time_s[op, device] < np.inf:
                        fits = fits or (mask[device] and room[device] >= footprint[group])
                        if roomiest < 0 or room[device] > room[roomiest]:
                            roomiest = device
                if not fits:  # there is always a device with a time
                    devices[group] = roomiest
                    room[roomiest] -= footprint[group]
            for device in range(num_devices):
                if devices[group] >= 0:
                    if device != devices[group]:
                        continue
                elif not mask[device] or time_s[op, device] == np.inf or room[device] < footprint[group]:
                    continue
                ready = _inputs_present(
                    op, device, no, yes, devices, finish, arrival, channel_free, input_ptr, inputs, producer, holder,
                    size, table, tables, latency, inverse, channel_ptr, channels,
                )  # fmt: skip
                _push(device, later_key, later_op, later, ready, op)
                offered[op] += 1
        num_fresh = 0
        best, best_priority, best_device = np.inf, 0.0, none
        for device in range(num_devices):
            while True:
                while later[device] > 0 and later_key[device, 0] <= free[device]:
                    op = later_op[device, 0]
                    _pop(device, later_key, later_op, later)
                    _push(device, now_key, now_op, now, -priority[op], op)
                if now[device] > 0:
                    op, begin = now_op[device, 0], free[device]
                elif later[device] > 0:
                    op, begin = later_op[device, 0], later_key[device, 0]
                else:
                    break
                group = op_group[op]
                stale = done[op] or (devices[group] >= 0 and devices[group] != device)
                stale = stale or (devices[group] < 0 and room[device] < footprint[group])
                if not stale:
                    if begin < best or (begin == best and priority[op] > best_priority):
                        best, best_priority, best_device = begin, priority[op], device
                    break
                if now[device] > 0:
                    _pop(device, now_key, now_op, now)
                else:
                    _pop(device, later_key, later_op, later)
                offered[op] -= 1
                if offered[op] == 0 and not done[op]:
                    # No device is left for it: its group was settled elsewhere, or there is no room anywhere.
                    fresh[num_fresh] = op
                    num_fresh += 1
        if num_fresh > 0:
            continue
        device = best_device
        if now[device] > 0:
            op = now_op[device, 0]
            _pop(device, now_key, now_op, now)
        else:
            op = later_op[device, 0]
            _pop(device, later_key, later_op, later)
        group = op_group[op]
        if devices[group] < 0:
            devices[group] = device
            room[device] -= footprint[group]
        ready = _inputs_present(
            op, device, yes, yes, devices, finish, arrival, channel_free, input_ptr, inputs, producer, holder,
            size, table, tables, latency, inverse, channel_ptr, channels,
        )  # fmt: skip
        start[op] = max(free[device], ready)
        finish[op] = start[op] + time_s[op, device]
        free[device] = finish[op]
        done[op] = True
        scheduled += 1
        for k in range(output_ptr[op], output_ptr[op + 1]):
            for j in range(consumer_ptr[outputs[k]], consumer_ptr[outputs[k] + 1]):
                consumer = consumers[j]
                missing[consumer] -= 1
                if missing[consumer] == 0:
                    fresh[num_fresh] = consumer
                    num_fresh += 1
