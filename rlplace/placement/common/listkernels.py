"""Compiled list scheduling: upward ranks, HEFT, earliest task first.

All of it lies in one file, because numba's on-disk cache only notices changes of the file that holds the compiled function.
`a` is an `rlplace.placement.common.oparrays.OpArrays`, `s` a `ListSchedule`, `busy` the `Busy` intervals of the devices.
"""

# Compiled functions take their types from their arguments.
# mypy: disable-error-code="no-untyped-def, assignment"
from __future__ import annotations

from heapq import heappop, heappush
from typing import Any, NamedTuple

import numpy as np

from rlplace.compiled import entry, inner

# Values that go to an inner function are made with `np.int64` and `np.bool_`: for literals numba would compile it once more.


class ListSchedule(NamedTuple):
    """A schedule that both schedulers fill."""

    mask: Any  # bool [D], devices that may be used
    devices: Any  # int32 [G], -1 where open
    room: Any  # float64 [D] bytes
    start: Any  # float64 [N]
    finish: Any  # float64 [N]
    arrival: Any  # float64 [T, D], when a tensor was sent there, -1 if it was not
    channel_free: Any  # float64 [C]


class Busy(NamedTuple):
    """Busy intervals of each device, in order and apart."""

    start: Any  # float64 [D, N + 1]
    end: Any  # float64 [D, N + 1]
    count: Any  # int64 [D]


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
    """Returns the time at which all inputs of an op can be on a device; `commit` books the transfers, one after another."""
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
def _find_gap(device, busy, ready, length):
    """Returns the start of the first idle gap of `length` not before `ready`, and the index of the busy interval after it."""
    low, high = 0, busy.count[device]
    while low < high:
        middle = (low + high) >> 1
        if busy.end[device, middle] <= ready:
            low = middle + 1
        else:
            high = middle
    time = ready
    while low < busy.count[device] and busy.start[device, low] < time + length:
        time = busy.end[device, low]
        low += 1
    return time, low


@inner
def _occupy(device, busy, at, start, end):
    """Inserts a busy interval before index `at`, merged with those it touches."""
    starts, ends, count = busy
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
def heft(order, contention, a, s):
    """Schedules by earliest finish time with insertion; `order` int32 [N] is that of the ops."""
    num_devices = len(s.mask)
    slots = (num_devices, len(order) + 1)
    busy = Busy(np.empty(slots), np.empty(slots), np.zeros(num_devices, dtype=np.int64))
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
                begin, slot = _find_gap(device, busy, ready, seconds)
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
            best_start, best_slot = _find_gap(best_device, busy, ready, seconds)
        s.start[op], s.finish[op] = best_start, best_start + seconds
        if seconds > 0.0:
            _occupy(best_device, busy, best_slot, best_start, best_start + seconds)


@entry
def earliest_task_first(priority, a, s):
    """Schedules by earliest start, ties to the higher `priority` float64 [N]."""
    num_ops, num_devices = a.time_s.shape
    missing = a.num_made_inputs.copy()
    no, yes, none = np.bool_(0), np.bool_(1), np.int64(-1)
    free, done = np.zeros(num_devices), np.zeros(num_ops, dtype=np.bool_)
    offered = np.zeros(num_ops, dtype=np.int64)  # devices that may take the op
    fresh = [np.int64(op) for op in a.order if missing[op] == 0]
    # Heaps of ready ops: of those whose inputs arrive later, by arrival, and of those that could start now, by priority.
    later = [[(0.0, none)][1:] for _ in range(num_devices)]
    now = [[(0.0, none)][1:] for _ in range(num_devices)]
    scheduled = 0
    while scheduled < num_ops:
        for op in fresh:
            group = a.op_group[op]
            if s.devices[group] < 0:
                fits, roomiest = False, -1
                for device in range(num_devices):
                    if a.time_s[op, device] < np.inf:
                        fits = fits or (s.mask[device] and s.room[device] >= a.footprint[group])
                        if roomiest < 0 or s.room[device] > s.room[roomiest]:
                            roomiest = device
                if not fits:  # there is always a device with a time
                    s.devices[group] = roomiest
                    s.room[roomiest] -= a.footprint[group]
            for device in range(num_devices):
                if s.devices[group] >= 0:
                    if device != s.devices[group]:
                        continue
                elif not s.mask[device] or a.time_s[op, device] == np.inf or s.room[device] < a.footprint[group]:
                    continue
                heappush(later[device], (_inputs_present(op, device, no, yes, a, s), op))
                offered[op] += 1
        fresh.clear()
        best, best_priority, best_device, best_op = np.inf, 0.0, none, none
        for device in range(num_devices):
            while True:
                while len(later[device]) > 0 and later[device][0][0] <= free[device]:
                    op = heappop(later[device])[1]
                    heappush(now[device], (-priority[op], op))
                if len(now[device]) > 0:
                    op, begin = now[device][0][1], free[device]
                elif len(later[device]) > 0:
                    begin, op = later[device][0]
                else:
                    break
                group = a.op_group[op]
                stale = done[op] or (s.devices[group] >= 0 and s.devices[group] != device)
                stale = stale or (s.devices[group] < 0 and s.room[device] < a.footprint[group])
                if not stale:
                    if begin < best or (begin == best and priority[op] > best_priority):
                        best, best_priority, best_device, best_op = begin, priority[op], device, op
                    break
                heappop(now[device] if len(now[device]) > 0 else later[device])
                offered[op] -= 1
                if offered[op] == 0 and not done[op]:
                    # No device is left for it: its group was settled elsewhere, or there is no room anywhere.
                    fresh.append(op)
        if len(fresh) > 0:
            continue
        device, op = best_device, best_op
        group = a.op_group[op]
        if s.devices[group] < 0:
            s.devices[group] = device
            s.room[device] -= a.footprint[group]
        ready = _inputs_present(op, device, yes, yes, a, s)
        s.start[op] = max(best, ready)
        s.finish[op] = s.start[op] + a.time_s[op, device]
        free[device] = s.finish[op]
        done[op] = True
        scheduled += 1
        for k in range(a.output_ptr[op], a.output_ptr[op + 1]):
            for j in range(a.consumer_ptr[a.outputs[k]], a.consumer_ptr[a.outputs[k] + 1]):
                consumer = a.consumers[j]
                missing[consumer] -= 1
                if missing[consumer] == 0:
                    fresh.append(np.int64(consumer))
