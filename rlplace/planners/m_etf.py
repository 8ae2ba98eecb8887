"""m-ETF: earliest task first, with memory.

Problem: makespan on devices of limited memory. Of all ready ops and all devices with room for the op's group, the pair that
can start earliest goes next; ties go to the op with the longest path to the end.

Paper: Jeon et al., "Baechi: fast device placement of machine learning graphs", SoCC 2020, algorithm m-ETF; the memory-free
rule is Hwang, Chow, Anger, Lee, "Scheduling precedence graphs in systems with interprocessor communication times", SIAM
Journal on Computing 18(2), 1989.

Departures: a whole group (forward, backward and update) is placed when its first op is; room is counted by footprint
(resident bytes plus saved activations) instead of Baechi's replay of allocations, the exact peak is checked by simulation;
transfers queue for the problem's channels instead of one channel per device; candidates differ in the number of devices and
in the share of memory that may be planned (all of it, or 85 %).
"""

# Compiled functions take their types from their arguments.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numba import njit
from numpy.typing import NDArray

from rlplace.plan import PlacementPlan
from rlplace.planners.evaluate import Assignment
from rlplace.planners.floor import one_shot
from rlplace.planners.oparrays import arrival_time, op_arrays, upward_rank
from rlplace.planners.subsets import device_subsets
from rlplace.problem import Problem


def m_etf(problem: Problem, *, seed: int = 0, time_limit_s: float | None = None) -> PlacementPlan:
    """The best of m-ETF's assignments; see the module docstring."""
    return one_shot(problem, "m_etf", candidates, seed=seed, time_limit_s=time_limit_s)


def candidates(problem: Problem, seed: int) -> Iterator[Assignment]:
    """Assignments for every number of devices and share of memory."""
    del seed
    limited = bool(np.isfinite(problem.memory_limit_bytes).any())
    for subset in reversed(device_subsets(problem, least=min(2, problem.num_devices))):
        for share in (1.0, 0.85) if limited else (1.0,):
            yield earliest_task_first(problem, subset, share)[0]


def earliest_task_first(
    problem: Problem, subset: Sequence[int], share: float = 1.0
) -> tuple[Assignment, NDArray[np.float64], NDArray[np.float64]]:
    """Runs m-ETF on a subset of devices with a share of their memory.

    Returns:
        int32 [G] devices, and m-ETF's own start and finish times, float64 [N] seconds.
    """
    arrays = op_arrays(problem)
    mask = np.zeros(problem.num_devices, dtype=bool)
    mask[list(subset)] = True
    devices = np.full(problem.num_groups, -1, dtype=np.int32)
    room = problem.memory_limit_bytes * share
    priority = upward_rank(problem, communication=False)
    start, finish = _etf(tuple(arrays), priority, mask, devices, room)
    for group in np.flatnonzero(devices < 0):  # groups without ops
        devices[group] = int(np.where(problem.group_allowed[group], room, -np.inf).argmax())
        room[devices[group]] -= float(arrays.footprint[group])
    return devices, start, finish


@njit(cache=True)
def _push(keys, items, size, key, item):
    """Adds to a binary heap with the smallest (key, item) on top."""
    i = size
    while i > 0:
        parent = (i - 1) // 2
        if keys[parent] < key or (keys[parent] == key and items[parent] < item):
            break
        keys[i], items[i] = keys[parent], items[parent]
        i = parent
    keys[i], items[i] = key, item


@njit(cache=True)
def _pop(keys, items, size):
    """Removes the top; the caller has read it."""
    last = size - 1
    key, item = keys[last], items[last]
    i = 0
    while True:
        child = 2 * i + 1
        if child >= last:
            break
        right = child + 1
        if right < last and (keys[right] < keys[child] or (keys[right] == keys[child] and items[right] < items[child])):
            child = right
        if key < keys[child] or (key == keys[child] and item < items[child]):
            break
        keys[i], items[i] = keys[child], items[child]
        i = child
    keys[i], items[i] = key, item


@njit(cache=True)
def _etf(a, priority, mask, devices, room):
    (time_s, op_group, input_ptr, inputs, producer, _, consumer_ptr, consumers, _, _, _, _, _, channel_ptr, channels, footprint,
     order) = a  # fmt: skip
    num_ops, num_devices = time_s.shape
    start, finish = np.zeros(num_ops), np.zeros(num_ops)
    done = np.zeros(num_ops, dtype=np.bool_)
    arrival = np.full((len(producer), num_devices), -1.0)
    channel_free = np.zeros(channels.max() + 1 if len(channels) else 1)
    free = np.zeros(num_devices)
    missing = np.zeros(num_ops, dtype=np.int64)
    output_ptr = np.zeros(num_ops + 1, dtype=np.int64)
    for tensor in range(len(producer)):
        if producer[tensor] >= 0:
            output_ptr[producer[tensor] + 1] += 1
            for k in range(consumer_ptr[tensor], consumer_ptr[tensor + 1]):
                missing[consumers[k]] += 1
    for op in range(num_ops):
        output_ptr[op + 1] += output_ptr[op]
    outputs = np.empty(output_ptr[num_ops], dtype=np.int64)
    fill = output_ptr[:-1].copy()
    for tensor in range(len(producer)):
        if producer[tensor] >= 0:
            outputs[fill[producer[tensor]]] = tensor
            fill[producer[tensor]] += 1
    # Per device: ready ops whose inputs arrive later (by arrival), and those that could start now (by priority).
    later_key, later_op = np.empty((num_devices, num_ops)), np.empty((num_devices, num_ops), dtype=np.int64)
    now_key, now_op = np.empty((num_devices, num_ops)), np.empty((num_devices, num_ops), dtype=np.int64)
    later, now = np.zeros(num_devices, dtype=np.int64), np.zeros(num_devices, dtype=np.int64)
    offered = np.zeros(num_ops, dtype=np.int64)  # devices that may still take the op
    fresh = np.empty(num_ops, dtype=np.int64)  # ops that just became ready
    num_fresh = 0
    for op in order:
        if missing[op] == 0:
            fresh[num_fresh] = op
            num_fresh += 1
    scheduled = 0
    while scheduled < num_ops:
        for i in range(num_fresh):
            op = fresh[i]
            group = op_group[op]
            if devices[group] < 0:
                fits = False
                for device in range(num_devices):
                    fits = fits or (mask[device] and time_s[op, device] < np.inf and room[device] >= footprint[group])
                if not fits:
                    devices[group] = _roomiest(time_s[op], room)
                    room[devices[group]] -= footprint[group]
            for device in range(num_devices):
                if devices[group] >= 0:
                    if device != devices[group]:
                        continue
                elif not mask[device] or time_s[op, device] == np.inf or room[device] < footprint[group]:
                    continue
                ready = 0.0
                for k in range(input_ptr[op], input_ptr[op + 1]):
                    at, _ = arrival_time(a, inputs[k], device, devices, finish, arrival, channel_free, True)
                    ready = max(ready, at)
                _push(later_key[device], later_op[device], later[device], ready, op)
                later[device] += 1
                offered[op] += 1
        num_fresh = 0
        best, best_priority, best_device = np.inf, 0.0, -1
        for device in range(num_devices):
            while True:
                while later[device] > 0 and later_key[device, 0] <= free[device]:
                    op = later_op[device, 0]
                    _pop(later_key[device], later_op[device], later[device])
                    later[device] -= 1
                    _push(now_key[device], now_op[device], now[device], -priority[op], op)
                    now[device] += 1
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
                    _pop(now_key[device], now_op[device], now[device])
                    now[device] -= 1
                else:
                    _pop(later_key[device], later_op[device], later[device])
                    later[device] -= 1
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
            _pop(now_key[device], now_op[device], now[device])
            now[device] -= 1
        else:
            op = later_op[device, 0]
            _pop(later_key[device], later_op[device], later[device])
            later[device] -= 1
        group = op_group[op]
        if devices[group] < 0:
            devices[group] = device
            room[device] -= footprint[group]
        begin = free[device]
        for k in range(input_ptr[op], input_ptr[op + 1]):
            at, source = arrival_time(a, inputs[k], device, devices, finish, arrival, channel_free, True)
            if source >= 0:
                arrival[inputs[k], device] = at
                pair = source * num_devices + device
                for c in range(channel_ptr[pair], channel_ptr[pair + 1]):
                    channel_free[channels[c]] = at
            begin = max(begin, at)
        start[op], finish[op] = begin, begin + time_s[op, device]
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
    return start, finish


@njit(cache=True)
def _roomiest(times, room):
    """The device with most room among those with a time; there is always one."""
    best = -1
    for device in range(len(room)):
        if times[device] < np.inf and (best < 0 or room[device] > room[best]):
            best = device
    return best
