"""What configurations cost, in FLOP units, for all configurations of a layer or an edge at once.

The formulas are those of the paper's public code: a device's share of a dimension is size / parts (a fraction where the parts
do not fit a tensor), an all-reduce of w words over P devices moves ``w / P * 2 (P - 1)`` words a device, and an edge moves
what the consumer needs of a tensor and does not hold, once forward and once backward. Nothing overlaps: all is summed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.planners.pase.configs import IntArray, all_configurations
from rlplace.planners.pase.layers import (
    AllReduce,
    Configuration,
    Exchange,
    Halo,
    Layer,
    LayerEdge,
    LayerGraph,
    Layout,
    Machine,
    Relayout,
    Strategy,
    Term,
    Work,
    strategy_of,
)

FloatArray = NDArray[np.float64]


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
        key = (
            _space_key(source),
            _space_key(target),
            edge.sizes,
            edge.source_layout,
            edge.target_layout,
            edge.factor,
            edge.startup,
        )
        if key not in edges:
            edges[key] = edge_costs(edge, source, target, rows[edge.source], rows[edge.target], machine)
        edge_flop.append(edges[key])
    return CostTables(rows, [layers[_layer_key(layer)] for layer in graph.layers], edge_flop)


def strategy_cost(graph: LayerGraph, configurations: tuple[Configuration, ...], machine: Machine) -> float:
    """Cost of any strategy in FLOP units, whether its configurations are legal or not."""
    rows = [np.array([row], dtype=np.int64) for row in configurations]
    total = sum(float(layer_costs(layer, row, machine)[0]) for layer, row in zip(graph.layers, rows, strict=True))
    for edge in graph.edges:
        ends = graph.layers[edge.source], graph.layers[edge.target], rows[edge.source], rows[edge.target]
        total += float(edge_costs(edge, *ends, machine)[0, 0])
    return total


def layer_costs(layer: Layer, configurations: IntArray, machine: Machine) -> FloatArray:
    """Costs of a layer's configurations, shape (configurations)."""
    space = _Space(layer, configurations)
    total = np.zeros(len(configurations))
    for term in layer.terms:
        scale = 1.0 if isinstance(term, Work) else machine.flop_per_word
        total += scale * _words(term, space)
    return total


def edge_costs(
    edge: LayerEdge, source: Layer, target: Layer, source_rows: IntArray, target_rows: IntArray, machine: Machine
) -> FloatArray:
    """Costs of an edge, shape (configurations of the source, configurations of the target)."""
    produced = _Space(source, source_rows).axes(edge.source_layout)
    wanted = _Space(target, target_rows).axes(edge.target_layout)
    missing = _missing(edge.sizes, produced[:, None, :], wanted[None, :, :])
    cost = edge.factor * machine.flop_per_word * missing
    return cost + machine.flop_per_word * edge.startup * (missing > 0) if edge.startup else cost


class _Space:
    """The configurations of one layer, read by dimension name."""

    def __init__(self, layer: Layer, configurations: IntArray) -> None:
        self.parts = {dim.name: configurations[:, i].astype(np.float64) for i, dim in enumerate(layer.dims)}
        self.share = {dim.name: dim.size / self.parts[dim.name] for dim in layer.dims}
        self.one = np.ones(len(configurations))

    def elements(self, dims: tuple[str, ...]) -> FloatArray:
        """Elements of a device over some dimensions."""
        return _product([self.share[name] for name in dims], self.one)

    def split(self, dims: tuple[str, ...]) -> FloatArray:
        """Into how many parts some dimensions are cut together."""
        return _product([self.parts[name] for name in dims], self.one)

    def axes(self, layout: Layout) -> FloatArray:
        """Parts of every axis of a tensor, shape (configurations, axes)."""
        return np.stack([self.split(axis) for axis in layout], axis=1) if layout else np.ones((len(self.one), 0))


def _product(factors: list[FloatArray], one: FloatArray) -> FloatArray:
    """Product of arrays, ones where there are none."""
    out = one
    for factor in factors:
        out = out * factor
    return out


def _words(term: Term, space: _Space) -> FloatArray:
    """A term's multiply-adds (`Work`) or words a device."""
    match term:
        case Work():
            return term.factor * space.elements(term.dims)
        case AllReduce():
            shared = space.split(term.over)
            return term.factor * space.elements(term.dims) / shared * (2.0 * (shared - 1.0))
        case Exchange():
            return np.where(space.split(term.when) > 1, term.factor * space.elements(term.dims), 0.0)
        case Halo():
            inner = [size / space.parts[name] for name, size, _ in term.windows]
            reach = [np.where(space.parts[name] > 1, reach, 0) for name, _, reach in term.windows]
            outer = [part + extra for part, extra in zip(inner, reach, strict=True)]
            border = _product(outer, space.one) - _product(inner, space.one)
            return term.factor * border * space.elements(term.dims)
        case Relayout():
            return term.factor * _missing(term.sizes, space.axes(term.source), space.axes(term.target))


def _missing(sizes: tuple[int, ...], source_parts: FloatArray, target_parts: FloatArray) -> FloatArray:
    """Elements that a device needs as a target and does not hold as a source; last axis of the arguments: tensor axes."""
    shape = np.array(sizes, dtype=np.float64)
    held, needed = shape / source_parts, shape / target_parts
    volume = needed.prod(axis=-1)
    overlap = np.minimum(held, needed).prod(axis=-1)
    more_devices = target_parts.prod(axis=-1) > source_parts.prod(axis=-1)
    return np.maximum(volume - np.where(more_devices, 0.0, overlap), 0.0)


def _space_key(layer: Layer) -> object:
    """What the configurations of a layer depend on."""
    return layer.dims, layer.contiguous


def _layer_key(layer: Layer) -> object:
    """What the costs of a layer depend on."""
    return layer.dims, layer.contiguous, layer.terms
