"""What configurations cost, in FLOP units, for all configurations of a layer or an edge at once.

The formulas are those of the paper's public code: a layer costs the sum of its terms, and an edge moves what the consumer needs
of a tensor and does not hold, once forward and once backward. Nothing overlaps: all is summed.

Configurations of a layer: every way to cut its dimensions over at most p devices.

A dimension of size n may be cut into e equal parts when e divides n and a part has at least `smallest_part` iterations; parts
are not only powers of two. Order: lexicographic, the first dimension slowest, the uncut configuration first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from benchmarks.papers.pase.layers import (
    Dim,
    FloatArray,
    IntArray,
    Layer,
    LayerEdge,
    LayerGraph,
    Machine,
    Space,
    Strategy,
    Work,
    missing,
    strategy_of,
)
from rlplace.errors import InputError


def configurations(layer: Layer, devices: int, smallest_part: int = 1) -> IntArray:
    """Legal configurations of a layer.

    Returns:
        Array of shape (configurations, dimensions).

    Raises:
        InputError: Fewer than one device.
    """
    if devices < 1:
        raise InputError(f"cannot split layers over {devices} devices; give at least 1")
    rows = _rows(tuple(cuts(dim, devices, smallest_part) for dim in layer.dims), devices)
    if layer.allows is not None:
        rows = tuple(row for row in rows if layer.allows(layer.sizes(), row))
    return np.array(rows, dtype=np.int64).reshape(len(rows), len(layer.dims))


def all_configurations(graph: LayerGraph, devices: int) -> list[IntArray]:
    """Legal configurations of every layer of a graph."""
    return [configurations(layer, devices, graph.smallest_part) for layer in graph.layers]


def cuts(dim: Dim, devices: int, smallest_part: int) -> tuple[int, ...]:
    """Numbers of parts that a dimension may be cut into, ascending; 1 is always one of them."""
    if not dim.splittable:
        return (1,)
    most = min(devices, dim.size // max(1, smallest_part))
    return (1, *(parts for parts in range(2, most + 1) if dim.size % parts == 0))


@lru_cache(maxsize=4096)
def _rows(cuts: tuple[tuple[int, ...], ...], devices: int) -> tuple[tuple[int, ...], ...]:
    """Products of cuts that need no more than `devices`; cached because layers repeat."""
    rows: list[tuple[tuple[int, ...], int]] = [((), 1)]
    for options in cuts:
        rows = [((*row, parts), used * parts) for row, used in rows for parts in options if used * parts <= devices]
    return tuple(row for row, _ in rows)


@dataclass(frozen=True, eq=False)
class CostTables:
    """Everything that the search reads.

    Attributes:
        configurations: Per layer an array (configurations, dimensions).
        layer_flop: Per layer an array (configurations).
        edge_flop: Per edge an array (configurations of its source, configurations of its target).
    """

    configurations: list[IntArray]
    layer_flop: list[FloatArray]
    edge_flop: list[FloatArray]

    def total(self, graph: LayerGraph, chosen: NDArray[np.int64]) -> float:
        """Cost of a choice of one configuration a layer, by index."""
        layers = sum(float(cost[index]) for cost, index in zip(self.layer_flop, chosen, strict=True))
        edges = zip(graph.edges, self.edge_flop, strict=True)
        return layers + sum(float(cost[chosen[edge.source], chosen[edge.target]]) for edge, cost in edges)

    def strategy(self, graph: LayerGraph, devices: int, chosen: NDArray[np.int64]) -> Strategy:
        """A choice by index as a strategy with its cost."""
        rows = tuple(
            tuple(int(parts) for parts in rows[index]) for rows, index in zip(self.configurations, chosen, strict=True)
        )
        return strategy_of(graph, devices, rows, self.total(graph, chosen))


def cost_tables(graph: LayerGraph, devices: int, machine: Machine) -> CostTables:
    """Costs of all configurations of all layers and edges; equal layers and edges share one array."""
    rows = all_configurations(graph, devices)
    layers: dict[object, FloatArray] = {}
    for layer, configurations in zip(graph.layers, rows, strict=True):
        key = _layer_key(layer)
        if key not in layers:
            layers[key] = layer_costs(layer, configurations, machine)
    edges: dict[object, FloatArray] = {}
    edge_flop = []
    for edge in graph.edges:
        source, target = graph.layers[edge.source], graph.layers[edge.target]
        key = _space_key(source), _space_key(target), replace(edge, source=0, target=0)
        if key not in edges:
            edges[key] = edge_costs(edge, source, target, rows[edge.source], rows[edge.target], machine)
        edge_flop.append(edges[key])
    return CostTables(rows, [layers[_layer_key(layer)] for layer in graph.layers], edge_flop)


def layer_costs(layer: Layer, configurations: IntArray, machine: Machine) -> FloatArray:
    """Costs of a layer's configurations, shape (configurations)."""
    space = Space(layer.dims, configurations)
    total = np.zeros(len(configurations))
    for term in layer.terms:
        scale = 1.0 if isinstance(term, Work) else machine.flop_per_word
        total += scale * term.amount(space)
    return total


def edge_costs(
    edge: LayerEdge, source: Layer, target: Layer, source_rows: IntArray, target_rows: IntArray, machine: Machine
) -> FloatArray:
    """Costs of an edge, shape (configurations of the source, configurations of the target)."""
    produced = Space(source.dims, source_rows).axes(edge.source_layout)
    wanted = Space(target.dims, target_rows).axes(edge.target_layout)
    elements = missing(edge.sizes, produced[:, None, :], wanted[None, :, :])
    cost = edge.factor * machine.flop_per_word * elements
    return cost + machine.flop_per_word * edge.startup * (elements > 0) if edge.startup else cost


def _space_key(layer: Layer) -> object:
    """What the configurations of a layer depend on."""
    return layer.dims, layer.allows


def _layer_key(layer: Layer) -> object:
    """What the costs of a layer depend on."""
    return layer.dims, layer.allows, layer.terms
