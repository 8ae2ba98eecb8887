"""PaSE's dynamic program: the option of every vertex that makes a sum of costs least, one vertex eliminated after the other.

Elango, "PaSE: Parallelization Strategies for Efficient DNN Training", IPDPS 2021 (arXiv 2407.04001). All costs are tables over
the options of one or two vertices. Eliminating vertex v adds up all tables that mention v, takes the minimum over v's options
for every combination of its neighbours, remembers the arg-min, and puts the result back as one table; the neighbours become
neighbours of each other. The vertex with fewest neighbours goes next (the lower index on ties). When no vertex is left, the
arg-mins are read backwards. Sums of the tables of a block are small; `benchmarks.papers.pase.elimination`, for the paper's
networks, never stores them.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Table(NamedTuple):
    """A cost for every combination of some vertices' options: an axis a vertex."""

    scope: tuple[int, ...]
    values: Floats


def eliminate(own: Sequence[Floats], ends: Sequence[tuple[int, int]], between: Sequence[Floats]) -> NDArray[np.intp]:
    """The best option of every vertex, by index.

    Args:
        own: Per vertex the costs of its options.
        ends: The two vertices of every edge; parallel edges are allowed and all count.
        between: Per edge its costs, options of its first vertex by those of its second.
    """
    near: list[set[int]] = [set() for _ in own]
    tables = [[Table((vertex,), cost)] for vertex, cost in enumerate(own)]  # those that mention each vertex
    for edge, cost in zip(ends, between, strict=True):
        for vertex, other in (edge, edge[::-1]):
            near[vertex].add(other)
            tables[vertex].append(Table(edge, cost))
    heap = [(len(around), vertex) for vertex, around in enumerate(near)]
    heapify(heap)
    arg_mins: dict[int, tuple[tuple[int, ...], NDArray[np.intp]]] = {}
    while heap:
        degree, vertex = heappop(heap)
        if vertex in arg_mins or degree != len(near[vertex]):  # an entry from before the degree changed
            continue
        around = sorted(near[vertex])
        table, arg_min = _minimum(tables[vertex], vertex, around)
        arg_mins[vertex] = table.scope, arg_min
        for other in around:
            near[other] = (near[other] | near[vertex]) - {vertex, other}
            tables[other] = [*(one for one in tables[other] if vertex not in one.scope), table]
            heappush(heap, (len(near[other]), other))
    chosen = np.zeros(len(own), dtype=np.intp)
    for vertex, (scope, arg_min) in reversed(arg_mins.items()):
        chosen[vertex] = arg_min[tuple(chosen[other] for other in scope)]
    return chosen


def _minimum(tables: list[Table], vertex: int, around: list[int]) -> tuple[Table, NDArray[np.intp]]:
    """Minimum over one vertex's options of a sum of tables, for every combination of its neighbours, and where it is."""
    if not around:
        total = _sum(tables, (vertex,))
        return Table((), np.array(total.min())), np.array(total.argmin())
    counts = {axis: size for table in tables for axis, size in zip(table.scope, table.values.shape, strict=True)}
    mentions = {axis: {other for table in tables if axis in table.scope for other in table.scope} for axis in around}
    # The neighbour whose tables are smallest together is added last.
    column = min(around, key=lambda axis: (prod(counts[other] for other in mentions[axis]), -counts[axis]))
    rest = tuple(axis for axis in around if axis != column)
    left = _sum([table for table in tables if column not in table.scope], (*rest, vertex))
    right = _sum([table for table in tables if column in table.scope], (*rest, vertex, column))
    total = left[..., None] + right
    return Table((*rest, column), total.min(axis=-2)), total.argmin(axis=-2)


def _sum(tables: list[Table], axes: tuple[int, ...]) -> Floats:
    """Sum of tables with one axis for each of `axes`, of length one where no table depends on it."""
    total = np.zeros((1,) * len(axes))
    for table in sorted(tables, key=lambda table: table.values.size):
        mine = [axis for axis in axes if axis in table.scope]
        values = table.values.transpose([table.scope.index(axis) for axis in mine])
        total = total + values.reshape([values.shape[mine.index(axis)] if axis in mine else 1 for axis in axes])
    return total
