"""Acyclic graphs by their numbers: an order that runs, and nodes joined as long as no cycle comes of it."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Mapping
from itertools import count
from typing import Any, TypeVar

K = TypeVar("K", bound=Hashable)


def topological(inputs: Mapping[K, set[K]], position: Mapping[K, Any] | None = None) -> list[K]:
    """Keys in an order in which each comes after its inputs; self-references do not count.

    Args:
        inputs: By key the keys that it comes after.
        position: Decides between keys that could come next: the least does. None: the one that became free first does.
    """
    waiting = {key: len(before - {key}) for key, before in inputs.items()}
    after: dict[K, list[K]] = {}
    for key, before in inputs.items():
        for other in before - {key}:
            after.setdefault(other, []).append(key)
    arrival = count()
    ready: list[tuple[Any, K]] = []

    def push(key: K) -> None:
        heapq.heappush(ready, (next(arrival) if position is None else position[key], key))

    for key, left in waiting.items():
        if left == 0:
            push(key)
    order = []
    while ready:
        _, key = heapq.heappop(ready)
        order.append(key)
        for other in after.get(key, ()):
            waiting[other] -= 1
            if waiting[other] == 0:
                push(other)
    return order


def join_acyclic(edges: dict[int, set[int]], kinds: Mapping[int, Hashable]) -> dict[int, int]:
    """Joins nodes of one kind wherever the graph stays acyclic; changes `edges`.

    Args:
        edges: By node the nodes that it leads to.
        kinds: Kind of the nodes to join, those of lower levels first.

    Returns:
        The node that each of them went into.
    """
    into = {index: index for index in kinds}
    latest: dict[Hashable, int] = {}
    for index, kind in kinds.items():
        earlier = latest.get(kind)
        if earlier is None or detour(edges, earlier, index):
            latest[kind] = index
        else:
            into[index] = earlier
            contract(edges, earlier, index)
    return into


def contract(edges: dict[int, set[int]], kept: int, gone: int) -> None:
    """Makes one node part of another."""
    edges[kept] = (edges[kept] | edges.pop(gone)) - {kept, gone}
    for targets in edges.values():
        if gone in targets:
            targets.remove(gone)
            targets.add(kept)
    edges[kept].discard(kept)


def detour(edges: Mapping[int, set[int]], start: int, end: int) -> bool:
    """Whether a path leads from `start` to `end`, or back, through a third node."""
    return reaches(edges, start, end) or reaches(edges, end, start)


def reaches(edges: Mapping[int, set[int]], start: int, end: int) -> bool:
    """Whether a path leads from `start` to `end` through a third node."""
    waiting = [other for other in edges[start] if other != end]
    seen = set(waiting)
    while waiting:
        for other in edges[waiting.pop()]:
            if other == end:
                return True
            if other not in seen:
                seen.add(other)
                waiting.append(other)
    return False
