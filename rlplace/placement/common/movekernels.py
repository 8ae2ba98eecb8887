"""Compiled random changes of an assignment; see `rlplace.placement.search`.

Random numbers come from SplitMix64 (Steele, Lea, Flood, 2014): one word of state, equal on every machine.
"""

# Compiled functions take their types from their arguments.
# mypy: disable-error-code="no-untyped-def, assignment, operator"
from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from rlplace.compiled import entry, inner

CLUSTER = 8
"""Most groups of a cluster move, plus one."""

# Upper ends of the shares of the kinds of moves.
NEIGHBOR, SINGLE, SWAP, SEGMENT = 0.32, 0.50, 0.62, 0.90


class Tables(NamedTuple):
    """Tables from which moves are drawn. Axes: G groups, D devices."""

    may: Any  # bool [G, D], where a group may sit
    allowed_ptr: Any  # int64 [G + 1]
    allowed: Any  # int32 [.], devices of each group
    movable: Any  # int32 [.], groups that may sit on more than one device
    neighbor_ptr: Any  # int64 [G + 1]
    neighbor: Any  # int32 [.]
    order: Any  # int32 [G], depth first
    position: Any  # int64 [G], of a group in `order`


@inner
def draw_uniform(state):
    """Returns a float64 in [0, 1); advances `state` uint64 [1]."""
    state[0] += np.uint64(0x9E3779B97F4A7C15)
    z = state[0]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return np.float64(z >> np.uint64(11)) * 2.0**-53


@inner
def _below(state, count):
    """Returns a whole number from 0 up, below `count`."""
    return np.int64(draw_uniform(state) * count)


@inner
def _other(t, state, group, devices):
    """Returns a device other than its own that the group may sit on."""
    first, count = t.allowed_ptr[group], t.allowed_ptr[group + 1] - t.allowed_ptr[group]
    at = _below(state, count)
    if t.allowed[first + at] == devices[group]:
        at = (at + 1) % count
    return t.allowed[first + at]


@inner
def _neighbor(t, state, group, devices, groups, targets):
    here, count = devices[group], 0
    for i in range(t.neighbor_ptr[group], t.neighbor_ptr[group + 1]):
        there = devices[t.neighbor[i]]
        count += there != here and t.may[group, there]
    groups[0] = group
    if count == 0:
        if draw_uniform(state) >= 0.3:
            return 0
        targets[0] = _other(t, state, group, devices)
        return 1
    chosen = _below(state, count)
    for i in range(t.neighbor_ptr[group], t.neighbor_ptr[group + 1]):
        there = devices[t.neighbor[i]]
        if there != here and t.may[group, there]:
            if chosen == 0:
                targets[0] = there
                break
            chosen -= 1
    return 1


@inner
def _swap(t, state, group, devices, groups, targets):
    for _ in range(4):
        other = t.movable[_below(state, len(t.movable))]
        a, b = devices[group], devices[other]
        if a != b and t.may[group, b] and t.may[other, a]:
            groups[0], targets[0], groups[1], targets[1] = group, b, other, a
            return 2
    return 0


@inner
def _segment(t, state, group, devices, groups, targets):
    # Short segments are common, long ones possible: lengths fall off geometrically up to half of all groups.
    size = len(devices)
    length = min(1 + np.int64(2.0 ** (draw_uniform(state) * np.log2(max(2.0, size / 2)))), size)
    first = max(np.int64(0), min(t.position[group] - _below(state, length), size - length))
    number = draw_uniform(state)
    if number < 0.4 and first > 0:
        device = devices[t.order[first - 1]]
    elif number < 0.8 and first + length < size:
        device = devices[t.order[first + length]]
    else:
        device = np.int32(_below(state, t.may.shape[1]))
    count = 0
    for i in range(first, first + length):
        member = t.order[i]
        if devices[member] != device and t.may[member, device]:
            groups[count], targets[count] = member, device
            count += 1
    return count


@inner
def _cluster(t, state, group, devices, groups, targets):
    here, device = devices[group], _other(t, state, group, devices)
    size = 2 + _below(state, 6)
    # `groups` holds the members, `targets` the frontier, until the devices are known to be legal.
    groups[0], targets[0] = group, group
    members, waiting = 1, 1
    while waiting > 0 and members < size:
        at = _below(state, waiting)
        last = targets[at]
        waiting -= 1
        targets[at] = targets[waiting]
        for i in range(t.neighbor_ptr[last], t.neighbor_ptr[last + 1]):
            n = t.neighbor[i]
            if devices[n] != here or members >= size:
                continue
            again = False
            for j in range(members):
                again = again or groups[j] == n
            if not again:
                groups[members], targets[waiting] = n, n
                members += 1
                waiting += 1
    count = 0
    for j in range(members):
        if t.may[groups[j], device]:
            groups[count], targets[count] = groups[j], device
            count += 1
    return count


@inner
def draw_move(t, state, devices, groups, targets):
    """Draws a move that changes `devices` int32 [G] into `groups` and `targets` int32 [max(G, CLUSTER)]; returns its length.

    0 when the draw gave no move.
    """
    if len(t.movable) == 0:
        return 0
    number = draw_uniform(state)
    group = t.movable[_below(state, len(t.movable))]
    if number < NEIGHBOR:
        return _neighbor(t, state, group, devices, groups, targets)
    if number < SINGLE:
        groups[0], targets[0] = group, _other(t, state, group, devices)
        return 1
    if number < SWAP:
        return _swap(t, state, group, devices, groups, targets)
    if number < SEGMENT:
        return _segment(t, state, group, devices, groups, targets)
    return _cluster(t, state, group, devices, groups, targets)


@entry
def draw(tables, state, devices, groups, targets):
    """Draws a move for callers in Python; `tables` is a plain tuple."""
    return draw_move(Tables(*tables), state, devices, groups, targets)
