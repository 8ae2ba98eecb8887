"""Rings of devices: the order in which they are visited, their hops, and what transfers take that all run at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from itertools import permutations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlplace.cluster.links import Wires
from rlplace.memoized import memoized

Ints = NDArray[np.int64]

_EXACT_DEVICES = 8  # all orders of up to this many devices are tried
_MOST_LEVELS = 6  # unlike rates between devices of a group, of which the best order is looked for in closed form
FOLLOWED_DEVICES = 256  # the fastest links are followed among so many at most


def ring_order(links: Wires, devices: Sequence[int]) -> tuple[int, ...]:
    """Returns order in which a ring visits the devices: the slowest hop as fast as possible, then the least time over all hops.

    Exact up to eight devices; beyond, the best of the given order and of following the fastest link from each of a few starts;
    beyond 256 the given order.
    """
    group = tuple(devices)
    if not 3 <= len(group) <= FOLLOWED_DEVICES:
        return group
    with np.errstate(divide="ignore"):
        cost = 1.0 / links.rates(*np.meshgrid(group, group, indexing="ij"))[0]
    if _is_best(cost):
        return group
    if len(group) <= _EXACT_DEVICES:
        orders = _every_order(len(group))
    else:
        starts = range(0, len(group), max(1, len(group) // _EXACT_DEVICES))
        orders = np.array([list(range(len(group))), *(_follow(cost, start) for start in starts)])
    hops = cost[orders, np.roll(orders, -1, axis=1)]
    best = orders[np.lexsort((hops.sum(axis=1), hops.max(axis=1)))[0]]
    return tuple(group[i] for i in best.tolist())


def _is_best(cost: NDArray[np.float64]) -> bool:
    """Returns whether no ring is better than the given order; False also where that is not known.

    Where links up to some cost join devices to c > 1 parts, any ring has c dearer hops at least. The given order has no more of
    them at any cost: then neither its slowest hop nor the time over all hops can be less.
    """
    hops = np.append(np.diagonal(cost, 1), cost[-1, 0])
    levels = np.unique(cost[~np.eye(len(cost), dtype=bool)])
    if len(levels) > _MOST_LEVELS:
        return False
    for level in levels[:-1].tolist():
        parts = _parts(cost <= level)
        if (hops > level).sum() > (parts if parts > 1 else 0):
            return False
    return True


def _parts(joins: NDArray[np.bool_]) -> int:
    """Returns into how many parts links, [D, D], join devices."""
    first = np.arange(len(joins))  # the least number that is known to be joined with each
    near = joins | joins.T | np.eye(len(joins), dtype=bool)
    while True:
        nearer = np.where(near, first, len(joins)).min(axis=1)
        if (nearer == first).all():
            return len(np.unique(first))
        first = nearer


@memoized
def ring_of(links: Wires, group: tuple[int, ...], as_given: bool) -> tuple[int, ...]:
    """Returns `ring_order`, or the group as it is given."""
    return group if as_given else ring_order(links, group)


@cache
def _every_order(count: int) -> NDArray[np.int64]:
    """Returns all orders of that many devices that begin with 0."""
    return np.array([(0, *rest) for rest in permutations(range(1, count))])


def _follow(cost: NDArray[np.float64], start: int) -> list[int]:
    """Visits from `start` always the nearest device that is left, or the first one where there is no link."""
    left = np.ones(len(cost), dtype=bool)
    left[start] = False
    order = [start]
    for _ in range(len(cost) - 1):
        near = np.where(left, cost[order[-1]], np.inf)
        nearest = int(near.argmin())
        order.append(nearest if near[nearest] < np.inf else int(left.argmax()))
        left[order[-1]] = False
    return order


def hops_of(rings: Sequence[Sequence[int]]) -> Ints:
    """Returns the senders and receivers of all hops of rings of one size, int64 [2, H]; none in a ring of one device."""
    members = np.array(rings, dtype=np.int64)
    hops: Ints = np.stack([members, np.roll(members, -1, axis=1)]).reshape(2, -1)
    return hops[:, hops[0] != hops[1]]


class SentAtOnce(NamedTuple):
    """P pairs of devices that all send at once.

    Attributes:
        s_per_byte: Seconds per byte of the busiest channel; 0 without pairs, inf where a pair has no link.
        latency_s: float64 [P].
        held: int64 [P, K], channels of each pair, -1 past the last.
    """

    s_per_byte: float
    latency_s: NDArray[np.float64]
    held: NDArray[np.int64]


def sent_at_once(links: Wires, senders: NDArray[np.int64], receivers: NDArray[np.int64]) -> SentAtOnce:
    """Returns what pairs of devices, int64 [P] each, take when they all send at once."""
    (rate, latency), held = links.rates(senders, receivers), links.held(senders, receivers)
    if not rate.all():
        return SentAtOnce(math.inf, latency, held)
    each = np.broadcast_to((1.0 / rate)[:, None], held.shape)[held >= 0]
    channels, number = np.unique(held[held >= 0], return_inverse=True)
    busy = np.bincount(number.ravel(), each, len(channels))
    return SentAtOnce(float(max(busy.max(initial=0.0), (1.0 / rate).max(initial=0.0))), latency, held)


def exchange(links: Wires, groups: Ints) -> tuple[float, float]:
    """Returns what an all-to-all in all of the groups, int64 [G, n], takes at once.

    Returns:
        Seconds of the busiest channel per byte that a device sends to each other one of its group, inf without a link; and the
        longest latency.
    """
    known = links.exchange(groups)
    if known is not None:
        return known
    apart = np.argwhere(~np.eye(groups.shape[1], dtype=bool)).T
    sent = sent_at_once(links, *groups[:, apart].swapaxes(0, 1).reshape(2, -1))
    return sent.s_per_byte, float(sent.latency_s.max())
