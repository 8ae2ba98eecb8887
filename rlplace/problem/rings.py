"""Rings over the links of a problem: a good order of the devices, and what its busiest channel takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import permutations

import numpy as np
from numpy.typing import NDArray

from rlplace.problem import Links

_EXACT_DEVICES = 8  # all orders of so many are tried


def ring_order(links: Links, devices: Sequence[int]) -> tuple[int, ...]:
    """Order in which a ring visits the devices: the slowest hop as fast as possible, then the least time over all hops.

    Exact up to eight devices; beyond, the best of the given order and of following the fastest link from each of a few starts.
    """
    group = tuple(devices)
    if len(group) < 3:
        return group
    with np.errstate(divide="ignore"):
        cost = 1.0 / links.bandwidth_bytes_per_s[np.ix_(group, group)]
    if len(group) <= _EXACT_DEVICES:
        orders = np.array([(0, *rest) for rest in permutations(range(1, len(group)))])
    else:
        starts = range(0, len(group), max(1, len(group) // _EXACT_DEVICES))
        orders = np.array([list(range(len(group))), *(_follow(cost, start) for start in starts)])
    hops = cost[orders, np.roll(orders, -1, axis=1)]
    best = orders[np.lexsort((hops.sum(axis=1), hops.max(axis=1)))[0]]
    return tuple(group[i] for i in best.tolist())


def _follow(cost: NDArray[np.float64], start: int) -> list[int]:
    """From `start` always on to the nearest device that is left."""
    left = np.ones(len(cost), dtype=bool)
    order = [start]
    left[start] = False
    while left.any():
        order.append(int(np.argmin(np.where(left, cost[order[-1]], np.inf)) if np.isfinite(cost[order[-1]][left]).any()
                         else np.flatnonzero(left)[0]))  # fmt: skip
        left[order[-1]] = False
    return order


def hops_of(ring: Sequence[int]) -> list[tuple[int, int]]:
    """The (sender, receiver) pairs of a ring."""
    return [(a, b) for a, b in zip(ring, [*ring[1:], ring[0]], strict=True) if a != b]


def rounds_of(kind: str) -> int:
    """How often a ring passes the whole tensor on: twice for an all-reduce (reduce-scatter, then all-gather)."""
    return 2 if kind == "all_reduce" else 1


def busiest_channel_s_per_byte(links: Links, pairs: Sequence[tuple[int, int]]) -> float:
    """Seconds per byte when every pair sends at once: what the channel that is held longest takes; inf without a link."""
    busy: dict[int, float] = {}
    slowest = 0.0
    channels = links.effective_channels
    for i, j in pairs:
        rate = float(links.bandwidth_bytes_per_s[i, j])
        if rate == 0.0:
            return math.inf
        slowest = max(slowest, 1.0 / rate)
        for channel in channels[i][j]:
            busy[channel] = busy.get(channel, 0.0) + 1.0 / rate
    return max(slowest, *busy.values()) if busy else slowest
