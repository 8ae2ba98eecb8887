"""The paper's baseline: a breadth-first order whose tables depend on all later neighbours of the whole prefix."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from rlplace.planners.pase.layers import LayerGraph
from rlplace.planners.pase.order import neighbours


def breadth_first(graph: LayerGraph) -> tuple[int, ...]:
    """Breadth-first from the first layer, component by component."""
    near = neighbours(graph)
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
    near = neighbours(graph)
    done: set[int] = set()
    border: set[int] = set()
    sets = []
    for vertex in order:
        done.add(vertex)
        border = (border | near[vertex]) - done
        sets.append(tuple(sorted(border)))
    return sets
