"""Draws moves: sets of groups and the device each of them goes to, compiled.

A move changes a group, a run of consecutive groups of the depth-first order, a connected cluster of groups on one device, two
groups that change places, or whole devices: one is emptied into another, or two are exchanged. Seeds are drawn where the view
of the current plan says that time is lost.
"""

# Compiled functions take their types from their arguments.
# mypy: disable-error-code="no-untyped-def, assignment, operator"
from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from rlplace.compiled import entry, inner, stamp_of
from rlplace.envs.guide import records
from rlplace.envs.guide.records import STEP, AnalysisTables, MoveSet, View
from rlplace.placement.common import movekernels
from rlplace.placement.common.movekernels import draw_uniform

SINGLE, RUN, CLUSTER, SWAP, EMPTY, EXCHANGE = range(6)
SHARES = np.cumsum([0.40, 0.25, 0.17, 0.10, 0.04, 0.04])
"""Upper ends of the shares of the kinds of moves, in the order above."""

_ON_CHAIN = 0.45  # share of seeds drawn by what a remedy on the critical chain would save
_TIGHT = 0.25  # share drawn by tightness; the others are uniform


@inner
def _below(state, count):
    return min(np.int64(draw_uniform(state) * count), count - 1)


@inner
def _pick(cumulative, state):
    """Draws an index by the increments of a non-decreasing array; -1 when it does not rise."""
    total = cumulative[len(cumulative) - 1]
    if not total > 0.0:
        return -1
    wanted, low, high = draw_uniform(state) * total, 0, len(cumulative) - 1
    while low < high:
        middle = (low + high) >> 1
        if cumulative[middle] > wanted:
            high = middle
        else:
            low = middle + 1
    return low


class _Drawing(NamedTuple):
    """Arrays that the kinds of moves read and fill: fields of `AnalysisTables`, `View` and `MoveSet`, and others."""

    group_s: Any
    mean_s: Any
    order: Any
    position: Any
    neighbor_ptr: Any
    neighbor: Any
    load: Any
    groups: Any
    targets: Any
    plan: Any  # int32 [G]
    random: Any  # uint64 [1], state of the random numbers
    mark: Any  # bool [G], False between calls


@inner
def _seed(w, on_chain, tight):
    """Draws a group and an allowed device for it; the device is -1 where there is none."""
    group_s, neighbor_ptr, neighbor, load, plan, state = w.group_s, w.neighbor_ptr, w.neighbor, w.load, w.plan, w.random
    groups, devices = group_s.shape
    number = draw_uniform(state)
    if number < _ON_CHAIN:
        at = _pick(on_chain, state)
        if at >= 0:
            g, d = at // devices, at % devices
            if d != plan[g] and group_s[g, d] < np.inf:
                return g, d
    g = -1
    if number < _ON_CHAIN + _TIGHT:
        g = _pick(tight, state)
    if g < 0:
        g = _below(state, groups)
    d = np.int64(-1)
    kind = draw_uniform(state)
    degree = neighbor_ptr[g + 1] - neighbor_ptr[g]
    if kind < 0.5 and degree > 0:
        d = np.int64(plan[neighbor[neighbor_ptr[g] + _below(state, degree)]])
    elif kind < 0.75:
        for other in range(devices):
            if other != plan[g] and group_s[g, other] < np.inf and (d < 0 or load[other] < load[d]):
                d = other
    if d < 0 or d == plan[g] or group_s[g, d] == np.inf:
        d = _below(state, devices)
        for _ in range(devices):
            if d != plan[g] and group_s[g, d] < np.inf:
                return g, d
            d = (d + 1) % devices
        return g, np.int64(-1)
    return g, d


@inner(forceinline=True)
def _put(w, g, d, count):
    """Adds a group to a move if it may go there and is not there already."""
    if w.plan[g] != d and w.group_s[g, d] < np.inf:
        w.groups[count], w.targets[count] = g, d
        return count + 1
    return count


@inner
def _run(w, g, d, at):
    """Moves consecutive groups on the seed's device: up to a number of them, or all up to the next group on the target."""
    order, position, plan, state = w.order, w.position, w.plan, w.random
    size, here = len(plan), plan[g]
    reach = np.int64(2.0 ** (draw_uniform(state) * np.log2(max(2.0, size / 2.0))))
    side = draw_uniform(state)
    low = high = position[g]
    if side < 0.67:
        while high + 1 < size and high - position[g] < reach and plan[order[high + 1]] == here:
            high += 1
    if side > 0.33:
        while low > 0 and position[g] - low < reach and plan[order[low - 1]] == here:
            low -= 1
    count = at
    for i in range(low, high + 1):
        count = _put(w, order[i], d, count)
    return count - at


@inner
def _cluster(w, g, d, at):
    """Moves connected groups on the seed's device, nearest first."""
    neighbor_ptr, neighbor, groups, plan, state, mark = w.neighbor_ptr, w.neighbor, w.groups, w.plan, w.random, w.mark
    here = plan[g]
    size = min(2 + np.int64(2.0 ** (draw_uniform(state) * np.log2(max(2.0, len(plan) / 4.0)))), len(plan))
    groups[at] = g
    mark[g] = True
    members, near = 1, 0
    while near < members and members < size:
        member = groups[at + near]
        near += 1
        for i in range(neighbor_ptr[member], neighbor_ptr[member + 1]):
            n = neighbor[i]
            if members < size and not mark[n] and plan[n] == here:
                mark[n] = True
                groups[at + members] = n
                members += 1
    count = at
    for i in range(at, at + members):
        mark[groups[i]] = False
        count = _put(w, groups[i], d, count)
    return count - at


@inner
def _swap(w, g, d, at):
    """Moves the seed to the device, and among several drawn groups there the one of the most similar work to the seed's."""
    group_s, mean_s, plan, state = w.group_s, w.mean_s, w.plan, w.random
    size, here, best = len(plan), plan[g], np.int64(-1)
    for _ in range(12):
        other = _below(state, size)
        if plan[other] == d and group_s[other, here] < np.inf:
            if best < 0 or abs(mean_s[other] - mean_s[g]) < abs(mean_s[best] - mean_s[g]):
                best = other
    if best < 0:
        return 0
    count = _put(w, g, d, at)
    return _put(w, best, here, count) - at


@inner
def _devices(w, d, e, exchange, at):
    """Empties device `d` into `e`, or exchanges the two."""
    plan, count = w.plan, at
    for g in range(len(plan)):
        if plan[g] == d:
            count = _put(w, g, e, count)
        elif exchange and plan[g] == e:
            count = _put(w, g, d, count)
    return count - at


def _compile(stamp):
    @entry
    def draw_moves(facts, view, plan, state, moves):
        """Fills up to K moves and returns their number; drawing ends early when the next move might not fit.

        Args:
            facts, view, moves: `AnalysisTables`, `View` and `MoveSet` as plain tuples; the moves are filled.
            plan: int32 [G].
            state: uint64 [1], state of the random numbers.
        """
        _ = stamp
        f, v, m = AnalysisTables(*facts), View(*view), MoveSet(*moves)
        # Fields of a tuple cost reference counts wherever they are read, so those that loops read are taken out once.
        ptr, kinds = m.ptr, m.kinds
        num_groups, devices = f.time_s.shape
        wanted = len(ptr) - 1
        ptr[0] = 0
        if devices < 2:
            return 0
        on_chain = np.cumsum(v.saved.ravel())
        tight = np.cumsum(v.tightness * v.tightness + v.wait / max(v.total[STEP], 1e-30) + 1e-3)
        w = _Drawing(
            f.time_s, f.mean_time_s, f.depth_first_order, f.position, f.neighbor_ptr, f.neighbor, v.load, m.groups, m.targets,
            plan, state, np.zeros(num_groups, dtype=np.bool_),
        )  # fmt: skip
        drawn, tries = 0, 0
        while drawn < wanted and tries < 3 * wanted:
            tries += 1
            at = ptr[drawn]
            if at + num_groups > len(m.groups):
                break
            g, d = _seed(w, on_chain, tight)
            if d < 0:
                continue
            kind = _pick(SHARES, state)
            if kind == SINGLE:
                count = _put(w, g, d, at) - at
            elif kind == RUN:
                count = _run(w, g, d, at)
            elif kind == CLUSTER:
                count = _cluster(w, g, d, at)
            elif kind == SWAP:
                count = _swap(w, g, d, at)
            else:
                count = _devices(w, plan[g], d, kind == EXCHANGE, at)
            if count > 0:
                kinds[drawn] = kind
                drawn += 1
                ptr[drawn] = at + count
        return drawn

    return draw_moves


draw_moves = _compile(stamp_of(records, movekernels))
