"""PaSE's dynamic program: the option of every vertex that makes a sum of costs least, one vertex eliminated after the other.

Elango, "PaSE: Parallelization Strategies for Efficient DNN Training", IPDPS 2021 (arXiv 2407.04001). All costs are tables over
the options of one or two vertices. Eliminating vertex v adds up all tables that mention v, takes the minimum over v's options
for every combination of the others (its dependent set), remembers the arg-min, and puts the result back as one table. When no
vertex is left, the number that remains is the optimum, and the arg-mins are read backwards. This is the paper's recurrence (its
components are the tables that an earlier elimination left behind), for any order.

The sum itself is never stored: with one vertex w of the dependent set picked out, it is ``P[rest, v] + Q[rest, v, w]``, P and Q
being small, and one compiled loop takes the minimum over v (a min-plus product).

Order: the vertex with fewest neighbours goes next (the lower index on ties), its neighbours become neighbours of each
other. A vertex's *dependent set*, which its table is indexed by, are its neighbours at that moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import prod

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntpArray = NDArray[np.intp]
Ends = Sequence[tuple[int, int]]
"""The two vertices of every edge."""

MAX_SUM_BYTES = 1 << 28
"""What the sum of several tables may take while a vertex is eliminated; beyond that it is done piece by piece."""


@dataclass(frozen=True, eq=False)
class Table:
    """A cost for every combination of some vertices' options.

    Attributes:
        scope: Vertices, one an axis.
        values: Array with one axis a vertex.
    """

    scope: tuple[int, ...]
    values: FloatArray


def eliminate(
    own: Sequence[FloatArray], ends: Ends, between: Sequence[FloatArray], order: Sequence[int] | None = None
) -> IntpArray:
    """The best option of every vertex, by index.

    Args:
        own: Per vertex the costs of its options.
        ends: Of every edge; parallel edges are allowed and all count.
        between: Per edge its costs, options of its first vertex by those of its second.
        order: Of elimination; default `min_degree`.
    """
    order = min_degree(len(own), ends) if order is None else order
    sets = dependent_sets(ends, order)
    waiting: list[list[Table]] = [[Table((vertex,), cost)] for vertex, cost in enumerate(own)]
    position = {vertex: i for i, vertex in enumerate(order)}

    def hand_on(table: Table) -> None:
        """Leaves a table with the vertex of its scope that goes first."""
        if table.scope:
            waiting[min(table.scope, key=position.__getitem__)].append(table)

    for edge, cost in zip(ends, between, strict=True):
        hand_on(Table(edge, cost))
    arg_mins: dict[int, tuple[tuple[int, ...], NDArray[np.uint16]]] = {}
    for vertex, later in zip(order, sets, strict=True):
        table, arg_min = _minimise(waiting[vertex], vertex, later)
        waiting[vertex] = []
        arg_mins[vertex] = table.scope, arg_min
        hand_on(table)
    chosen = np.zeros(len(order), dtype=np.intp)
    for vertex in reversed(order):
        scope, arg_min = arg_mins[vertex]
        chosen[vertex] = arg_min[tuple(chosen[other] for other in scope)]
    return chosen


def _minimise(tables: list[Table], vertex: int, later: tuple[int, ...]) -> tuple[Table, NDArray[np.uint16]]:
    """Minimum over one vertex's options of a sum of tables, for every combination of its dependent set."""
    from benchmarks.papers.pase.min_plus import min_plus

    counts = {axis: size for table in tables for axis, size in zip(table.scope, table.values.shape, strict=True)}
    if not later:
        total = _sum(tables, (vertex,))
        return Table((), np.array(total.min())), np.array(total.argmin(), dtype=np.uint16)
    column = min(later, key=lambda axis: (_union(tables, axis, counts), -counts[axis]))
    rest = tuple(axis for axis in later if axis != column)
    if rest and 8 * _union(tables, column, counts) > MAX_SUM_BYTES:
        return _piece_by_piece(tables, vertex, rest[0], (*rest[1:], column), counts[rest[0]])
    left = _sum([table for table in tables if column not in table.scope], (*rest, vertex))
    right = _sum([table for table in tables if column in table.scope], (*rest, vertex, column))
    shape = tuple(counts[axis] for axis in rest)
    # A side that does not depend on the vertex itself still has to be as long as it.
    left = np.broadcast_to(left, (*left.shape[:-1], counts[vertex]))
    right = np.broadcast_to(right, (*right.shape[:-2], counts[vertex], counts[column]))
    values, arg_min = min_plus(
        np.ascontiguousarray(left).reshape(-1, counts[vertex]),
        np.ascontiguousarray(right).reshape(-1, counts[vertex], counts[column]),
        _rows(left.shape[:-1], shape),
        _rows(right.shape[:-2], shape),
    )
    shape = (*shape, counts[column])
    return Table((*rest, column), values.reshape(shape)), arg_min.reshape(shape)


def _piece_by_piece(
    tables: list[Table], vertex: int, axis: int, later: tuple[int, ...], count: int
) -> tuple[Table, NDArray[np.uint16]]:
    """The same for each option of one vertex of the dependent set in turn, so that sums of tables stay small."""
    pieces = []
    for i in range(count):
        fixed = []
        for table in tables:
            if axis in table.scope:
                scope = tuple(other for other in table.scope if other != axis)
                fixed.append(Table(scope, np.take(table.values, i, axis=table.scope.index(axis))))
            else:
                fixed.append(table)
        pieces.append(_minimise(fixed, vertex, later))
    scope = (axis, *pieces[0][0].scope)
    return Table(scope, np.stack([table.values for table, _ in pieces])), np.stack([arg_min for _, arg_min in pieces])


def _union(tables: list[Table], axis: int, counts: dict[int, int]) -> int:
    """Size of the sum of the tables that mention a vertex."""
    return prod(counts[other] for other in {other for table in tables if axis in table.scope for other in table.scope})


def _sum(tables: list[Table], axes: tuple[int, ...]) -> FloatArray:
    """Sum of tables with one axis for each of `axes`, of length one where no table depends on it but for the last two."""
    total = np.zeros((1,) * len(axes))
    for table in sorted(tables, key=lambda table: table.values.size):
        mine = [axis for axis in axes if axis in table.scope]
        values = table.values.transpose([table.scope.index(axis) for axis in mine])
        shape = [values.shape[mine.index(axis)] if axis in mine else 1 for axis in axes]
        total = total + values.reshape(shape)
    return total


def _rows(shape: tuple[int, ...], full: tuple[int, ...]) -> IntpArray:
    """For every combination of the axes `full`, the flat index in an array of that many axes, some of length one."""
    return np.ascontiguousarray(np.broadcast_to(np.arange(prod(shape)).reshape(shape), full)).reshape(-1)


def neighbours(count: int, ends: Ends) -> list[set[int]]:
    """Undirected neighbours of every vertex."""
    near: list[set[int]] = [set() for _ in range(count)]
    for one, other in ends:
        near[one].add(other)
        near[other].add(one)
    return near


def min_degree(count: int, ends: Ends) -> tuple[int, ...]:
    """The minimum-degree elimination order."""
    near = neighbours(count, ends)
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


def dependent_sets(ends: Ends, order: Sequence[int]) -> list[tuple[int, ...]]:
    """For each vertex of an order, in that order, its dependent set, ascending."""
    near = neighbours(len(order), ends)
    return [_eliminate(near, vertex) for vertex in order]


def _eliminate(near: list[set[int]], vertex: int) -> tuple[int, ...]:
    """Takes a vertex out, joins its neighbours and returns them."""
    around = near[vertex]
    for other in around:
        near[other] |= around
        near[other] -= {vertex, other}
    return tuple(sorted(around))
