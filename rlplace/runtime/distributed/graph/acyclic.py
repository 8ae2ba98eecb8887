"""Acyclic graphs by their numbers: an order that runs, and nodes joined as long as no cycle comes of it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, TypeVar

import numpy as np

from rlplace.problem.order import topological_order

K = TypeVar("K", bound=Hashable)


def topological(inputs: Mapping[K, set[K]], position: Mapping[K, Any] | None = None) -> list[K]:
    """Keys in an order in which each comes after its inputs; self-references do not count.

    Args:
        inputs: By key the keys that it comes after.
        position: Decides between keys that could come next: the least does. None: the one that became free first does.
    """
    keys = list(inputs)
    number = {key: index for index, key in enumerate(keys)}
    pairs = [(number[other], number[key]) for key, before in inputs.items() for other in before - {key}]
    source, target = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    rank = None
    if position is not None:
        rank = np.empty(len(keys), dtype=np.int64)
        rank[sorted(range(len(keys)), key=lambda index: position[keys[index]])] = np.arange(len(keys))
    order, _ = topological_order(source, target, len(keys), key=rank)
    return [keys[index] for index in order]


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
