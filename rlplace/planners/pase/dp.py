"""The best strategy, exactly, by eliminating one layer after the other.

All costs are tables over one or two layers' configurations. Eliminating layer v adds up all tables that mention v, takes the
minimum over v's configurations for every combination of the others (its dependent set), remembers the arg-min, and puts the
result back as one table. When no layer is left, the number that remains is the optimum, and the arg-mins are read backwards.
This is the paper's recurrence (its components are the tables that an earlier elimination left behind), for any order.

The sum itself is never stored: with one layer w of the dependent set picked out, it is ``P[rest, v] + Q[rest, v, w]``, P and Q
being small, and one compiled loop takes the minimum over v (a min-plus product).

Elimination orders of a layer graph, and what tables they need.

Min-degree: the vertex with fewest neighbours goes next (the lower index on ties), its neighbours become neighbours of each
other. A vertex's *dependent set*, which its table is indexed by, are its neighbours at that moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import prod

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InputError
from rlplace.planners.pase.costs import CostTables, cost_tables
from rlplace.planners.pase.layers import FloatArray, LayerGraph, Machine, Strategy

IntpArray = NDArray[np.intp]

MAX_TABLES_BYTES = 8 << 30
"""What tables and arg-mins may take together; a search that would need more is refused before it starts."""

MAX_SUM_BYTES = 1 << 28
"""What the sum of several tables may take while a layer is eliminated; beyond that it is done piece by piece."""

MAX_CONFIGURATIONS = 1 << 16
"""Configurations of a layer; arg-mins are stored in two bytes."""


@dataclass(frozen=True, eq=False)
class Table:
    """A cost for every combination of some layers' configurations.

    Attributes:
        scope: Layers, one an axis.
        values: Array with one axis a layer.
    """

    scope: tuple[int, ...]
    values: FloatArray


def least_cost_strategy(graph: LayerGraph, devices: int, *, machine: Machine | None = None) -> Strategy:
    """The strategy of least cost for `devices` devices.

    Args:
        graph: Layers and tensors.
        devices: p, most devices a layer may use.
        machine: Rates that turn words into FLOP; default: the paper's.

    Raises:
        InputError: Fewer than one device, tables beyond `MAX_TABLES_BYTES`, or a layer with more than `MAX_CONFIGURATIONS`
            configurations.
    """
    tables = cost_tables(graph, devices, machine or Machine())
    order = min_degree(graph)
    sets = dependent_sets(graph, order)
    counts = [len(rows) for rows in tables.configurations]
    most = tables_bytes(order, sets, counts)
    if most > MAX_TABLES_BYTES or max(counts) > MAX_CONFIGURATIONS:
        raise InputError(
            f"layer graph {graph.name!r}: the search needs {most:.3g} bytes of tables (limit {MAX_TABLES_BYTES:.3g}) and "
            f"{max(counts)} configurations a layer (limit {MAX_CONFIGURATIONS}); use fewer devices or raise smallest_part"
        )
    return tables.strategy(graph, devices, eliminate(graph, tables, order, sets))


def eliminate(graph: LayerGraph, tables: CostTables, order: Sequence[int], sets: Sequence[tuple[int, ...]]) -> IntpArray:
    """The best configuration of every layer, by index.

    Args:
        graph: Layers and tensors.
        tables: Costs.
        order: Elimination order.
        sets: The dependent set of each vertex of the order.
    """
    waiting: list[list[Table]] = [[Table((vertex,), cost)] for vertex, cost in enumerate(tables.layer_flop)]
    position = {vertex: i for i, vertex in enumerate(order)}

    def hand_on(table: Table) -> None:
        """Leaves a table with the layer of its scope that goes first."""
        if table.scope:
            waiting[min(table.scope, key=position.__getitem__)].append(table)

    for edge, cost in zip(graph.edges, tables.edge_flop, strict=True):
        hand_on(Table((edge.source, edge.target), cost))
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


def tables_bytes(order: Sequence[int], sets: Sequence[tuple[int, ...]], counts: list[int]) -> int:
    """Most bytes of tables and arg-mins at any time; known before a table is filled.

    Args:
        order: Elimination order.
        sets: The dependent set of each vertex of the order.
        counts: Configurations of each layer.
    """
    position = {vertex: i for i, vertex in enumerate(order)}
    freed = [0] * (len(order) + 1)
    tables = arg_mins = most = 0
    for i, later in enumerate(sets):
        size = prod(counts[other] for other in later)
        arg_mins += 2 * size
        tables += 8 * size
        most = max(most, tables + arg_mins)
        freed[min((position[other] for other in later), default=len(order))] += 8 * size
        tables -= freed[i]
    return most


def _minimise(tables: list[Table], vertex: int, later: tuple[int, ...]) -> tuple[Table, NDArray[np.uint16]]:
    """Minimum over one layer's configurations of a sum of tables, for every combination of its dependent set."""
    from rlplace.planners.pase.kernel import min_plus

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
    # A side that does not depend on the layer itself still has to be as long as it.
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
    """The same for each configuration of one layer of the dependent set in turn, so that sums of tables stay small."""
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
    """Size of the sum of the tables that mention a layer."""
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
