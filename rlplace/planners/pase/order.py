"""Elimination orders of a layer graph, and what tables they need.

Min-degree: the vertex with fewest neighbours goes next (the lower index on ties), its neighbours become neighbours of each
other. A vertex's *dependent set*, which its table is indexed by, are its neighbours at that moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from rlplace.planners.pase.layers import LayerGraph


def neighbours(graph: LayerGraph) -> list[set[int]]:
    """Undirected neighbours of every layer."""
    near: list[set[int]] = [set() for _ in graph.layers]
    for edge in graph.edges:
        near[edge.source].add(edge.target)
        near[edge.target].add(edge.source)
    return near


def min_degree(graph: LayerGraph) -> tuple[int, ...]:
    """The minimum-degree elimination order."""
    near = neighbours(graph)
    heap = [(len(around), vertex) for vertex, around in enumerate(near)]
    heapify(heap)
    order: list[int] = []
    done = [False] * len(near)
    while heap:
        degree, vertex = heappop(heap)
        if done[vertex] or degree != len(near[vertex]):  # an entry from before the degree changed
            continue
        done[vertex] = True
        order.append(vertex)
        for other in _eliminate(near, vertex):
            heappush(heap, (len(near[other]), other))
    return tuple(order)


def dependent_sets(graph: LayerGraph, order: Sequence[int]) -> list[tuple[int, ...]]:
    """For each vertex of an order, in that order, its dependent set, ascending."""
    near = neighbours(graph)
    return [_eliminate(near, vertex) for vertex in order]


def _eliminate(near: list[set[int]], vertex: int) -> tuple[int, ...]:
    """Takes a vertex out, joins its neighbours and returns them."""
    around = near[vertex]
    for other in around:
        near[other] |= around
        near[other] -= {vertex, other}
    return tuple(sorted(around))
