"""The strategy of least cost of a layer graph, by the dynamic program that splits blocks in the product; data parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import NamedTuple

from benchmarks.papers.pase.graph import (
    Configuration,
    Layer,
    LayerGraph,
    Machine,
    Strategy,
    configurations,
    cost_tables,
    cuts,
    strategy_cost,
    strategy_of,
)
from rlplace.errors import InputError
from rlplace.strategy.layouts.cut_moves import eliminate

MAX_BYTES = 8 << 30
"""Most bytes of the largest sum of tables; a search that would need more is refused before it starts."""


class Statistics(NamedTuple):
    """The size of a search: most configurations of a layer (K), most neighbours of a layer when it goes (M), largest sum."""

    configurations: int
    neighbours: int
    largest: int


def statistics(graph: LayerGraph, devices: int) -> Statistics:
    """Says what the search for so many devices takes, without the search: the layer with fewest neighbours goes next."""
    counts = [len(configurations(layer, devices, graph.smallest_part)) for layer in graph.layers]
    near: dict[int, set[int]] = {layer: set() for layer in range(len(counts))}
    for one, other in graph.ends:
        near[one].add(other)
        near[other].add(one)
    most = largest = 0
    while near:
        layer = min(near, key=lambda each: (len(near[each]), each))
        around = near.pop(layer)
        for other in around:
            near[other] = (near[other] | around) - {layer, other}
        most = max(most, len(around))
        largest = max(largest, prod(counts[other] for other in (layer, *around)))
    return Statistics(max(counts), most, largest)


def least_cost_strategy(graph: LayerGraph, devices: int, *, machine: Machine | None = None) -> Strategy:
    """Finds the strategy of least cost for `devices` devices.

    Args:
        graph: Layers and tensors.
        devices: p, most devices a layer may use.
        machine: Rates that turn words into FLOP; default: the paper's.

    Raises:
        InputError: Fewer than one device, or a sum of tables beyond `MAX_BYTES`.
    """
    if (needed := 8 * statistics(graph, devices).largest) > MAX_BYTES:
        raise InputError(
            f"layer graph {graph.name!r}: the search needs {needed:.3g} bytes of tables (limit {MAX_BYTES:.3g}); "
            "use fewer devices or raise smallest_part"
        )
    tables = cost_tables(graph, devices, machine or Machine())
    return tables.strategy(graph, eliminate(tables.layer_flop, graph.ends, tables.edge_flop))


def data_parallel(graph: LayerGraph, devices: int, *, machine: Machine | None = None) -> Strategy:
    """Cuts every layer's batch over all devices; layers without that dimension stay whole."""
    rows = [nearest(graph, layer, devices, {"b": devices}) for layer in graph.layers]
    return strategy_of(graph, rows, strategy_cost(graph, rows, machine or Machine()))


def nearest(graph: LayerGraph, layer: Layer, devices: int, wanted: Mapping[str, int]) -> Configuration:
    """Finds the legal configuration nearest to what is wanted, from below."""
    return tuple(max(cuts(dim, min(devices, wanted.get(dim.name, 1)), graph.smallest_part)) for dim in layer.dims)
