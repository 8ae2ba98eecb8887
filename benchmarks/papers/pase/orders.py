"""What a search takes, and the paper's baseline: a breadth-first order, its tables on all later neighbours of the prefix."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from benchmarks.papers.pase.costs import all_configurations
from benchmarks.papers.pase.elimination import dependent_sets, min_degree, neighbours
from benchmarks.papers.pase.layers import LayerGraph
from benchmarks.papers.pase.search import tables_bytes


@dataclass(frozen=True)
class SearchStatistics:
    """What the search of a graph takes.

    Attributes:
        largest_configurations: K, configurations of the layer that has most.
        largest_dependent_set: M, later layers that a table is indexed by, at most.
        largest_product: Most combinations that a layer's table is filled from.
        tables_bytes: Most bytes that tables and their arg-mins take together.
    """

    largest_configurations: int
    largest_dependent_set: int
    largest_product: int
    tables_bytes: int


def search_statistics(graph: LayerGraph, devices: int) -> SearchStatistics:
    """What the search for so many devices takes, without the search."""
    counts = [len(rows) for rows in all_configurations(graph, devices)]
    order = min_degree(len(graph.layers), graph.ends)
    sets = dependent_sets(graph.ends, order)
    products = [prod(counts[other] for other in (layer, *later)) for layer, later in zip(order, sets, strict=True)]
    return SearchStatistics(max(counts), max(map(len, sets)), max(products), tables_bytes(order, sets, counts))


def breadth_first(graph: LayerGraph) -> tuple[int, ...]:
    """Breadth-first from the first layer, component by component."""
    near = neighbours(len(graph.layers), graph.ends)
    seen: set[int] = set()
    order: list[int] = []
    for root in range(len(near)):
        queue = deque([root] if root not in seen else [])
        seen.add(root)
        while queue:
            vertex = queue.popleft()
            order.append(vertex)
            fresh = sorted(near[vertex] - seen)
            seen.update(fresh)
            queue.extend(fresh)
    return tuple(order)


def prefix_sets(graph: LayerGraph, order: Sequence[int]) -> list[tuple[int, ...]]:
    """The baseline's dependent sets: all later neighbours of the whole prefix."""
    near = neighbours(len(graph.layers), graph.ends)
    done: set[int] = set()
    border: set[int] = set()
    sets = []
    for vertex in order:
        done.add(vertex)
        border = (border | near[vertex]) - done
        sets.append(tuple(sorted(border)))
    return sets
