"""The best strategy, exactly, by eliminating one layer after the other.

All costs are tables over one or two layers' configurations. Eliminating layer v adds up all tables that mention v, takes the
minimum over v's configurations for every combination of the others (its dependent set), remembers the arg-min, and puts the
result back as one table. When no layer is left, the number that remains is the optimum, and the arg-mins are read backwards.
This is the paper's recurrence (its components are the tables that an earlier elimination left behind), for any order.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rlplace.planners.pase.costs import CostTables, FloatArray, cost_tables
from rlplace.planners.pase.layers import LayerGraph, Machine, SearchStatistics, Strategy, strategy_of
from rlplace.planners.pase.order import dependent_sets, min_degree

CHUNK_ELEMENTS = 1 << 22
"""Combinations that are added up at a time; bounds the memory beside the tables themselves."""

Table = tuple[tuple[int, ...], FloatArray]
"""Layers, ascending, and a cost for every combination of their configurations."""


def solve(graph: LayerGraph, devices: int, *, machine: Machine | None = None, order: Sequence[int] | None = None) -> Strategy:
    """The strategy of least cost for `devices` devices.

    Args:
        graph: Layers and tensors.
        devices: p, most devices a layer may use.
        machine: Rates that turn words into FLOP; default: the paper's.
        order: Elimination order as layer indices; default: minimum degree. Any order gives the same cost.
    """
    start_s = time.perf_counter()
    tables = cost_tables(graph, devices, machine or Machine())
    order = min_degree(graph) if order is None else tuple(order)
    chosen, statistics = eliminate(graph, tables, order, start_s)
    found = tables.strategy(graph, devices, chosen)
    return strategy_of(graph, devices, found.configurations, found.cost_flop, statistics)


def eliminate(
    graph: LayerGraph, tables: CostTables, order: Sequence[int], start_s: float
) -> tuple[NDArray[np.int64], SearchStatistics]:
    """The best configuration of every layer, by index, and what finding it took."""
    sets = dependent_sets(graph, order)
    counts = [len(rows) for rows in tables.configurations]
    live = [((vertex,), cost) for vertex, cost in enumerate(tables.layer_flop)]
    for edge, cost in zip(graph.edges, tables.edge_flop, strict=True):
        live.append(((edge.source, edge.target), cost) if edge.source < edge.target else ((edge.target, edge.source), cost.T))
    arg_mins: dict[int, NDArray[np.integer]] = {}
    combinations = [0] * len(counts)
    most_bytes = held_bytes = 0
    for vertex, later in zip(order, sets, strict=True):
        mine = [table for table in live if vertex in table[0]]
        live = [table for table in live if vertex not in table[0]]
        best, arg_mins[vertex] = _minimise(mine, vertex, later, counts)
        live.append((later, best))
        combinations[vertex] = counts[vertex] * best.size
        held_bytes += arg_mins[vertex].nbytes
        most_bytes = max(most_bytes, held_bytes + sum(table.nbytes for scope, table in live if len(scope) > 2))
    chosen = np.zeros(len(counts), dtype=np.int64)
    for vertex, later in zip(reversed(order), reversed(sets), strict=True):
        chosen[vertex] = arg_mins[vertex][tuple(chosen[other] for other in later)]
    statistics = SearchStatistics(
        max(counts),
        max(len(later) for later in sets),
        max(combinations),
        tuple(combinations),
        tuple(order),
        most_bytes,
        time.perf_counter() - start_s,
    )
    return chosen, statistics


def _minimise(
    tables: list[Table], vertex: int, later: tuple[int, ...], counts: list[int]
) -> tuple[FloatArray, NDArray[np.integer]]:
    """Minimum and arg-min over one layer's configurations of a sum of tables, indexed by the dependent set."""
    axes = (*later, vertex)
    parts = [_aligned(table, axes) for table in tables]
    shape = tuple(counts[other] for other in later)
    best = np.empty(shape)
    arg = np.empty(shape, dtype=np.uint16 if counts[vertex] <= 1 << 16 else np.int64)
    if not later:
        total = sum(parts[1:], parts[0])
        arg[()] = total.argmin()
        best[()] = total.min()
        return best, arg
    rows = max(1, CHUNK_ELEMENTS * shape[0] // (counts[vertex] * max(1, best.size)))
    for first in range(0, shape[0], rows):
        piece = slice(first, min(first + rows, shape[0]))
        total = _sum([part[piece] if part.shape[0] > 1 else part for part in parts], (piece.stop - first, *shape[1:]))
        arg[piece] = total.argmin(axis=-1)
        best[piece] = total.min(axis=-1)
    return best, arg


def _aligned(table: Table, axes: tuple[int, ...]) -> FloatArray:
    """A table with one axis for each of `axes`, of length one where it does not depend on it."""
    scope, cost = table
    cost = cost.transpose([scope.index(axis) for axis in axes if axis in scope])
    return cost.reshape([cost.shape[[a for a in axes if a in scope].index(axis)] if axis in scope else 1 for axis in axes])


def _sum(parts: list[FloatArray], shape: tuple[int, ...]) -> FloatArray:
    """Sum of broadcast arrays, small ones first so that big ones are touched once."""
    parts = sorted(parts, key=lambda part: part.size)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return np.broadcast_to(total, (*shape, total.shape[-1]))
