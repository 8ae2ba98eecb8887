"""The paper's search: the strategy of least cost for a layer graph."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from benchmarks.papers.pase.costs import cost_tables
from benchmarks.papers.pase.elimination import dependent_sets, eliminate, min_degree
from benchmarks.papers.pase.layers import LayerGraph, Machine, Strategy
from rlplace.errors import InputError

MAX_TABLES_BYTES = 8 << 30
"""What tables and arg-mins may take together; a search that would need more is refused before it starts."""

MAX_CONFIGURATIONS = 1 << 16
"""Configurations of a layer; arg-mins are stored in two bytes."""


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
    order = min_degree(len(graph.layers), graph.ends)
    sets = dependent_sets(graph.ends, order)
    counts = [len(rows) for rows in tables.configurations]
    most = tables_bytes(order, sets, counts)
    if most > MAX_TABLES_BYTES or max(counts) > MAX_CONFIGURATIONS:
        raise InputError(
            f"layer graph {graph.name!r}: the search needs {most:.3g} bytes of tables (limit {MAX_TABLES_BYTES:.3g}) and "
            f"{max(counts)} configurations a layer (limit {MAX_CONFIGURATIONS}); use fewer devices or raise smallest_part"
        )
    return tables.strategy(graph, devices, eliminate(tables.layer_flop, graph.ends, tables.edge_flop, order))


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
