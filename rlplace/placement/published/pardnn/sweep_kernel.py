"""The compiled sweep of heuristic H1: memory over the events of a run, and moves where it passes a limit.

All of it lies in one file, because numba's on-disk cache only notices changes of the file that holds the compiled function.
"""

# Compiled functions take their types from their arguments.
# mypy: disable-error-code="no-untyped-def, assignment"
from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from rlplace.compiled import entry, inner

OP_END, ARRIVED, SENT, OP_START, OP_END_AT_ONCE = range(5)
"""Kinds of events, in the order in which they count within an instant; the last is the end of an op of no time."""


class SweepFacts(NamedTuple):
    """Constant inputs of a sweep."""

    a: Any  # `rlplace.placement.common.oparrays.OpArrays`
    cost_s: Any  # float64 [T], seconds of a transfer
    ops_ptr: Any  # int64 [G + 1], ops of each group
    ops: Any  # int32 [N]
    temporary: Any  # float64 [N] bytes
    resident: Any  # float64 [G] bytes
    group_time: Any  # float64 [G, D], inf where a group may not sit
    movable: Any  # bool [G]
    limit: Any  # float64 [D] bytes


class SweepState(NamedTuple):
    """State that changes from event to event."""

    devices: Any  # int32 [G]
    phase: Any  # int8 [N], 1 running, 2 done
    uses: Any  # int32 [T, D], readers to come on each device
    sends: Any  # int32 [T], transfers to come
    held: Any  # bool [T, D], a copy is there; never of an owner's tensor on its owner's device
    rerouted: Any  # bool [T], still to be made, and its maker or a reader has moved
    memory: Any  # float64 [D], starts with resident bytes
    peak: Any  # float64 [D], a copy of it
    room: Any  # float64 [D], bytes under the limit at the device's peak in the run as it was
    seen: Any  # int64 [T, 2], scratch: reading groups are numbered, and their readers of a tensor counted
    stamp: Any  # int64 [1], last such number


@inner
def _hold(tensor, device, f, s):
    """Adds a copy to a device, unless it is there."""
    if not s.held[tensor, device]:
        s.held[tensor, device] = True
        s.memory[device] += f.a.size[tensor]
        s.peak[device] = max(s.peak[device], s.memory[device])


@inner
def _drop(tensor, device, f, s):
    """Removes a copy from a device, if it is there."""
    if s.held[tensor, device]:
        s.held[tensor, device] = False
        s.memory[device] -= f.a.size[tensor]


@inner
def _freed(group, f, s):
    """Returns the bytes that leave the group's device with it now, the paper's Mpot."""
    device = s.devices[group]
    s.stamp[0] += 1
    freed = f.resident[group]
    for op in f.ops[f.ops_ptr[group] : f.ops_ptr[group + 1]]:
        if s.phase[op] == 2:
            continue
        for tensor in f.a.inputs[f.a.input_ptr[op] : f.a.input_ptr[op + 1]]:
            if s.seen[tensor, 0] != s.stamp[0]:
                s.seen[tensor, 0], s.seen[tensor, 1] = s.stamp[0], 0
            s.seen[tensor, 1] += 1
            if s.held[tensor, device] and s.seen[tensor, 1] == s.uses[tensor, device]:
                freed += f.a.size[tensor]
        if s.phase[op] == 1:
            freed += f.temporary[op]
            for k in range(f.a.output_ptr[op], f.a.output_ptr[op + 1]):
                if s.uses[f.a.outputs[k], device] == 0:
                    freed += f.a.size[f.a.outputs[k]]
    return freed


@inner
def _move(group, target, f, s):
    """Moves a group: tensors that it still reads or makes are on the other device from now on."""
    device = s.devices[group]
    s.devices[group] = target
    s.memory[device] -= f.resident[group]
    s.memory[target] += f.resident[group]
    for op in f.ops[f.ops_ptr[group] : f.ops_ptr[group + 1]]:
        if s.phase[op] == 2:
            continue
        for tensor in f.a.inputs[f.a.input_ptr[op] : f.a.input_ptr[op + 1]]:
            s.uses[tensor, device] -= 1
            s.uses[tensor, target] += 1
            source = s.devices[f.a.holder[tensor]]
            if s.uses[tensor, device] == 0 and not (s.sends[tensor] > 0 and source == device):
                _drop(tensor, device, f, s)
            maker = f.a.producer[tensor]
            if maker >= 0 and s.phase[maker] != 2:
                s.rerouted[tensor] = True
            elif maker >= 0 or source != target:
                _hold(tensor, target, f, s)
        for k in range(f.a.output_ptr[op], f.a.output_ptr[op + 1]):
            s.rerouted[f.a.outputs[k]] = True
            if s.phase[op] == 1:
                _drop(f.a.outputs[k], device, f, s)
                _hold(f.a.outputs[k], target, f, s)
        if s.phase[op] == 1:
            s.memory[device] -= f.temporary[op]
            s.memory[target] += f.temporary[op]
    s.peak[target] = max(s.peak[target], s.memory[target])


@inner
def _neighbours(group, device, f, s):
    """Returns the seconds of transfers between a group and groups on a device, if they were apart."""
    seconds = 0.0
    for op in f.ops[f.ops_ptr[group] : f.ops_ptr[group + 1]]:
        for k in range(f.a.input_ptr[op], f.a.input_ptr[op + 1]):
            other = f.a.holder[f.a.inputs[k]]
            if other != group and s.devices[other] == device:
                seconds += f.cost_s[f.a.inputs[k]]
        for k in range(f.a.output_ptr[op], f.a.output_ptr[op + 1]):
            for j in range(f.a.consumer_ptr[f.a.outputs[k]], f.a.consumer_ptr[f.a.outputs[k] + 1]):
                other = f.a.op_group[f.a.consumers[j]]
                if other != group and s.devices[other] == device:
                    seconds += f.cost_s[f.a.outputs[k]]
    return seconds


@inner
def _added(group, target, f, s):
    """Returns the bytes that a group brings to a device now; what it reads may be there."""
    s.stamp[0] += 1
    added = f.resident[group]
    for op in f.ops[f.ops_ptr[group] : f.ops_ptr[group + 1]]:
        if s.phase[op] == 2:
            continue
        for tensor in f.a.inputs[f.a.input_ptr[op] : f.a.input_ptr[op + 1]]:
            maker = f.a.producer[tensor]
            here = s.held[tensor, target] or (maker < 0 and s.devices[f.a.holder[tensor]] == target)
            if s.seen[tensor, 0] == s.stamp[0] or here or (maker >= 0 and s.phase[maker] != 2):
                continue
            s.seen[tensor, 0] = s.stamp[0]
            added += f.a.size[tensor]
        if s.phase[op] == 1:
            added += f.temporary[op]
            for k in range(f.a.output_ptr[op], f.a.output_ptr[op + 1]):
                added += f.a.size[f.a.outputs[k]]
    return added


@inner
def _target(group, f, s):
    """Returns the device to move a group to, -1 if none has room.

    One that has room at its own peak is safe; one that has room only now may overflow later, and is the last resort.
    """
    best, lowest, safe = -1, np.inf, False
    for device in range(len(f.limit)):
        seconds = f.group_time[group, device]
        if device == s.devices[group] or seconds == np.inf:
            continue
        added = _added(group, device, f, s)
        if s.memory[device] + added > f.limit[device]:
            continue
        safe_now = s.room[device] >= added
        if safe and not safe_now:
            continue
        price = seconds - _neighbours(group, device, f, s)
        if best < 0 or (safe_now and not safe) or price < lowest or (price == lowest and s.room[device] > s.room[best]):
            best, lowest, safe = device, price, safe_now
    return best


@inner
def _relieve(device, slack, moves, f, s):
    """Moves groups off a device until it fits, by the paper's greedy min-knapsack; returns how many.

    The cheaper of the best group by cost per freed byte and the cheapest that is enough goes next.
    """
    need = s.memory[device] - f.limit[device] + slack
    pick = np.flatnonzero((s.devices == device) & f.movable)
    cost, freed = np.empty(len(pick)), np.empty(len(pick))
    count = 0
    for i in range(len(pick)):
        gain = _freed(pick[i], f, s)
        if gain > 0.0:
            cost[count] = f.group_time[pick[i], device] + _neighbours(pick[i], device, f, s)
            pick[count], freed[count] = pick[i], gain
            count += 1
    by_ratio, by_cost = np.argsort(cost[:count] / freed[:count]), np.argsort(cost[:count])
    gone = np.zeros(count, dtype=np.bool_)
    moved, first, second = 0, 0, 0
    while need > 0.0 and moved < moves:
        while first < count and gone[by_ratio[first]]:
            first += 1
        while second < count and (gone[by_cost[second]] or freed[by_cost[second]] < need):
            second += 1
        if first == count:
            break
        index = by_ratio[first]
        if second < count and cost[by_cost[second]] < cost[index]:
            index = by_cost[second]
        gone[index] = True
        group = pick[index]
        gain = _freed(group, f, s)
        target = _target(group, f, s)
        if gain <= 0.0 or target < 0:
            continue
        s.room[target] -= _added(group, target, f, s)
        _move(group, target, f, s)
        s.room[device] += f.resident[group]
        need -= gain
        moved += 1
    return moved


@inner
def _end(op, f, s):
    """Ends an op: frees its temporaries, inputs that no other op waits for, and outputs that no op waits for."""
    device = s.devices[f.a.op_group[op]]
    s.phase[op] = 2
    s.memory[device] -= f.temporary[op]
    for tensor in f.a.inputs[f.a.input_ptr[op] : f.a.input_ptr[op + 1]]:
        s.uses[tensor, device] -= 1
        if s.uses[tensor, device] == 0 and not (s.sends[tensor] > 0 and s.devices[f.a.holder[tensor]] == device):
            _drop(tensor, device, f, s)
    for tensor in f.a.outputs[f.a.output_ptr[op] : f.a.output_ptr[op + 1]]:
        # The run knows nothing of transfers that a move has made necessary; their copies come now.
        if s.rerouted[tensor]:
            for other in range(len(f.limit)):
                if other != device and s.uses[tensor, other] > 0:
                    _hold(tensor, other, f, s)
        if s.uses[tensor, device] == 0 and s.sends[tensor] <= 0:
            _drop(tensor, device, f, s)


@entry
def sweep(kind, item, destination, moves, slack, f, s):
    """Tracks Mcons over the events of a run and, where it passes a limit, moves groups away; returns the moves made.

    kind, item, destination: the events in order: ops that start and end, tensors that are sent to a device and arrive there.
    moves: how many may be made; 0 only measures. slack: float64 [D], bytes freed beyond the overflow.
    """
    moved = 0
    for event in range(len(kind)):
        what, which = kind[event], item[event]
        device = -1
        if what == OP_START:
            device = s.devices[f.a.op_group[which]]
            s.phase[which] = 1
            for k in range(f.a.output_ptr[which], f.a.output_ptr[which + 1]):
                _hold(f.a.outputs[k], device, f, s)
            s.memory[device] += f.temporary[which]
            s.peak[device] = max(s.peak[device], s.memory[device])
        elif what == SENT:
            device = destination[event]
            if s.uses[which, device] == 0 or s.devices[f.a.holder[which]] == device:
                continue
            _hold(which, device, f, s)
        elif what == ARRIVED:
            s.sends[which] -= 1
            source = s.devices[f.a.holder[which]]
            if s.sends[which] == 0 and s.uses[which, source] == 0:
                _drop(which, source, f, s)
        else:
            _end(which, f, s)
        if device >= 0 and moved < moves and s.memory[device] > f.limit[device]:
            moved += _relieve(device, slack[device], moves - moved, f, s)
    return moved
