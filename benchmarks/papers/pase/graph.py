"""Layer graphs that PaSE splits, and what a configuration of a layer costs.

A layer has an iteration space: dimensions, a letter each, with sizes. A *configuration* says into how many equal parts each
dimension is cut; the product of the parts is the number of devices that work on the layer. It costs a sum of *terms* over the
dimensions. An edge carries one tensor, and moves what the consumer needs of it and does not hold, forward and backward; each
side says which of its dimensions cut every axis of the tensor. Nothing overlaps: all is summed.

Costs are in FLOP units, one multiply-add being one, as in the paper; words that travel are turned into FLOP by `Machine`.
Formulas and constants are those of the paper's public code and cover one forward and one backward pass: a GEMM is three GEMMs
in training, a point-wise operation three operations an element, an exponential three multiply-adds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InputError

IntArray, FloatArray = NDArray[np.int64], NDArray[np.float64]
Configuration = tuple[int, ...]
Layout = tuple[str, ...]
"""How a layer holds a tensor: for every axis the letters of the dimensions that cut it, none where it is whole."""

WORK, ALL_REDUCE, EXCHANGE, HALO, RELAYOUT = range(5)
EXP_FLOP = 3.0
"""Multiply-adds of an exponential."""


class Dim(NamedTuple):
    """A dimension; one that is not `splittable` is never cut."""

    name: str
    size: int
    splittable: bool = True


class Term(NamedTuple):
    """One summand of a layer's cost, `factor` for each element of a device's part of `dims`.

    Attributes:
        kind: `WORK` multiply-adds; `ALL_REDUCE` words over the devices that share `over`, a ring; `EXCHANGE` words where `over`
            is cut; `HALO` words that windows read of a neighbour's part; `RELAYOUT` words that a device needs of a tensor of
            `sizes` laid out as the second of `layouts` and does not hold of it as the first.
        windows: Of `HALO`: dimension, size of the input along it, elements added to a part when the dimension is cut.
    """

    kind: int
    factor: float
    dims: str
    over: str = ""
    windows: tuple[tuple[str, int, int], ...] = ()
    sizes: tuple[int, ...] = ()
    layouts: tuple[Layout, Layout] = ((), ())


class Layer(NamedTuple):
    """A vertex; `contiguous` layers are cut into contiguous pieces of their row-major space alone."""

    name: str
    kind: str
    dims: tuple[Dim, ...]
    terms: tuple[Term, ...] = ()
    contiguous: bool = False


class LayerEdge(NamedTuple):
    """A tensor of a shape from one layer, by index, to another, and how either holds it."""

    source: int
    target: int
    sizes: tuple[int, ...]
    source_layout: Layout
    target_layout: Layout


class LayerGraph(NamedTuple):
    """Layers and tensors; parallel edges count. Dimensions are cut into parts of `smallest_part` or more (4 for CNNs)."""

    name: str
    layers: tuple[Layer, ...]
    edges: tuple[LayerEdge, ...] = ()
    smallest_part: int = 1

    @property
    def ends(self) -> list[tuple[int, int]]:
        """The layers of every edge."""
        return [edge[:2] for edge in self.edges]


class Machine(NamedTuple):
    """Like devices, and what the slowest link carries; the defaults are those of the paper's tables."""

    flop_per_s: float = 10e12
    bandwidth_bytes_per_s: float = 16e9
    word_bytes: int = 8

    @property
    def flop_per_word(self) -> float:
        """Multiply-adds that a device does while a word travels."""
        return self.flop_per_s / (self.bandwidth_bytes_per_s / self.word_bytes)


class Strategy(NamedTuple):
    """A configuration for every layer, its cost, and by layer and dimension the parts of what is cut."""

    configurations: tuple[Configuration, ...]
    cost_flop: float
    parts: Mapping[str, Mapping[str, int]]


def strategy_of(graph: LayerGraph, rows: Sequence[Sequence[int]], cost_flop: float) -> Strategy:
    """Makes a strategy of a row of parts for every layer."""
    chosen = tuple(tuple(int(parts) for parts in row) for row in rows)
    parts = {
        layer.name: {dim.name: cut for dim, cut in zip(layer.dims, row, strict=True) if cut > 1}
        for layer, row in zip(graph.layers, chosen, strict=True)
    }
    return Strategy(chosen, cost_flop, parts)


def gemm(m: str, n: str, k: str, batch: str = "", pointwise: int = 0, times: tuple[int, int] = (1, 1)) -> tuple[Term, ...]:
    """Makes the terms of a matrix product ``[batch] m k, [batch] k n -> [batch] m n``, as convolutions and attention are, too.

    Args:
        m: Dimensions of the rows of the output.
        n: Dimensions of its columns.
        k: Dimensions summed over.
        batch: Dimensions that both operands and the output have.
        pointwise: Point-wise operations on the output.
        times: The product is this many times wider than `n`, and as many times deeper than `k` (an LSTM cell's four gates of
            two stacked inputs: 4 and 2).
    """
    wide, deep = times
    terms = (
        Term(WORK, 3.0 * wide * deep, batch + m + n + k),
        Term(ALL_REDUCE, wide, batch + m + n, k),  # output
        Term(ALL_REDUCE, deep, batch + m + k, n),  # gradient of the input
        Term(ALL_REDUCE, wide * deep, batch + n + k, m),  # gradient of the weights
    )
    return (*terms, Term(WORK, 3.0 * pointwise * wide, batch + m + n)) if pointwise else terms


def norm(dims: str, axis: str) -> tuple[Term, ...]:
    """Makes the terms of a normalisation: statistics are reduced along an axis, scale and bias over all others."""
    rest = dims.replace(axis, "")
    return Term(WORK, 16.0, dims), Term(ALL_REDUCE, 4.0, rest, axis), Term(ALL_REDUCE, 4.0, axis, rest)


def softmax(dims: str, axis: str, size: int) -> tuple[Term, ...]:
    """Makes the terms of a softmax along an axis of `size`; the backward multiplies each row with its Jacobian."""
    return Term(WORK, EXP_FLOP + 1.0 + size, dims), Term(ALL_REDUCE, 2.0 + size, dims.replace(axis, ""), axis)


def cross_entropy(dims: str, classes: str) -> tuple[Term, ...]:
    """Makes the terms of softmax and loss: two words a row travel where the classes are cut."""
    rest = dims.replace(classes, "")
    return Term(WORK, EXP_FLOP + 1.0, dims), Term(WORK, 2.0, rest), Term(EXCHANGE, 2.0, rest, classes)


class Space:
    """The configurations of one layer by dimension: `parts`, and the share of a device, a fraction where parts do not fit."""

    def __init__(self, dims: Sequence[Dim], configurations: IntArray) -> None:
        self.parts = {dim.name: configurations[:, i].astype(np.float64) for i, dim in enumerate(dims)}
        self.share = {dim.name: dim.size / self.parts[dim.name] for dim in dims}
        self.one = np.ones(len(configurations))

    def product(self, factors: Sequence[FloatArray]) -> FloatArray:
        """Multiplies arrays over the configurations."""
        return prod(factors, start=self.one)

    def split(self, dims: str) -> FloatArray:
        """Counts the parts that some dimensions are cut into together."""
        return self.product([self.parts[name] for name in dims])

    def axes(self, layout: Layout) -> FloatArray:
        """Counts the parts of every axis of a tensor, shape (configurations, axes)."""
        return np.stack([self.split(axis) for axis in layout], axis=1)

    def amount(self, term: Term) -> FloatArray:
        """Counts the words or multiply-adds of a device."""
        if term.kind == RELAYOUT:
            return term.factor * missing(term.sizes, *(self.axes(layout) for layout in term.layouts))
        elements = self.product([self.share[name] for name in term.dims])
        if term.kind == HALO:
            inner = [size / self.parts[name] for name, size, _ in term.windows]
            reach = [np.where(self.parts[name] > 1, reach, 0) for name, _, reach in term.windows]
            border = self.product([part + extra for part, extra in zip(inner, reach, strict=True)]) - self.product(inner)
            return term.factor * border * elements
        shared = self.split(term.over)
        if term.kind == EXCHANGE:
            return np.where(shared > 1, term.factor * elements, 0.0)
        whole = term.factor * elements
        return whole / shared * (2.0 * (shared - 1.0)) if term.kind == ALL_REDUCE else whole


def missing(sizes: tuple[int, ...], source_parts: FloatArray, target_parts: FloatArray) -> FloatArray:
    """Counts the elements of a tensor that a device needs as a target and does not hold as a source.

    The overlap counts for nothing where the target uses more devices than the source.

    Args:
        sizes: Shape of the tensor.
        source_parts: Parts of each axis at the source; the last axis of the array is that of the tensor's axes.
        target_parts: Parts of each axis at the target.
    """
    shape = np.array(sizes, dtype=np.float64)
    held, needed = shape / source_parts, shape / target_parts
    overlap = np.minimum(held, needed).prod(axis=-1)
    more_devices = target_parts.prod(axis=-1) > source_parts.prod(axis=-1)
    return np.maximum(needed.prod(axis=-1) - np.where(more_devices, 0.0, overlap), 0.0)


def cuts(dim: Dim, devices: int, smallest_part: int) -> tuple[int, ...]:
    """Lists the numbers of parts that a dimension may be cut into, ascending from 1; they divide it."""
    most = min(devices, dim.size // max(1, smallest_part)) if dim.splittable else 1
    return (1, *(parts for parts in range(2, most + 1) if dim.size % parts == 0))


@lru_cache(maxsize=4096)  # layers repeat
def _configurations(dims: tuple[Dim, ...], contiguous: bool, devices: int, smallest_part: int) -> IntArray:
    rows: list[tuple[Configuration, int]] = [((), 1)]
    for dim in dims:
        options = cuts(dim, devices, smallest_part)
        rows = [((*row, parts), used * parts) for row, used in rows for parts in options if used * parts <= devices]
    legal = [row for row, _ in rows if not contiguous or in_pieces(tuple(dim.size for dim in dims), row)]
    return np.array(legal, dtype=np.int64).reshape(len(legal), len(dims))


def configurations(layer: Layer, devices: int, smallest_part: int = 1) -> IntArray:
    """Lists the legal configurations of a layer, an array (configurations, dimensions), the first dimension slowest.

    Raises:
        InputError: Fewer than one device.
    """
    if devices < 1:
        raise InputError(f"cannot split layers over {devices} devices; give at least 1")
    return _configurations(layer.dims, layer.contiguous, devices, smallest_part)


def in_pieces(sizes: tuple[int, ...], row: Configuration) -> bool:
    """Says whether a row-major space is cut into contiguous pieces: full cuts, then one partial cut, then none."""
    first = next((axis for axis, size in enumerate(sizes) if row[axis] != size), len(sizes))
    return all(parts == 1 for parts in row[first + 1 :])


class CostTables(NamedTuple):
    """The input of the search: configurations of every layer, their costs, and those of every edge (source's by target's)."""

    configurations: list[IntArray]
    layer_flop: list[FloatArray]
    edge_flop: list[FloatArray]

    def total(self, graph: LayerGraph, chosen: Sequence[int] | NDArray[np.int64]) -> float:
        """Adds up the cost of a choice of one configuration a layer, by index."""
        layers = sum(float(cost[index]) for cost, index in zip(self.layer_flop, chosen, strict=True))
        edges = zip(graph.edges, self.edge_flop, strict=True)
        return layers + sum(float(cost[chosen[edge.source], chosen[edge.target]]) for edge, cost in edges)

    def strategy(self, graph: LayerGraph, chosen: Sequence[int] | NDArray[np.int64]) -> Strategy:
        """Makes a strategy of a choice by index."""
        rows = [rows[index] for rows, index in zip(self.configurations, chosen, strict=True)]
        return strategy_of(graph, rows, self.total(graph, chosen))


def cost_tables(graph: LayerGraph, devices: int, machine: Machine) -> CostTables:
    """Makes the costs of all configurations of all layers and edges; equal ones share an array."""
    rows = [configurations(layer, devices, graph.smallest_part) for layer in graph.layers]
    layers: dict[object, FloatArray] = {}
    edges: dict[object, FloatArray] = {}
    for layer, own in zip(graph.layers, rows, strict=True):
        if layer[2:] not in layers:
            layers[layer[2:]] = layer_costs(layer, own, machine)
    keys = []
    for edge in graph.edges:
        source, target = graph.layers[edge.source], graph.layers[edge.target]
        keys.append((source.dims, source.contiguous, target.dims, target.contiguous, edge[2:]))
        if keys[-1] not in edges:
            edges[keys[-1]] = edge_costs(edge, source, target, rows[edge.source], rows[edge.target], machine)
    return CostTables(rows, [layers[layer[2:]] for layer in graph.layers], [edges[key] for key in keys])


def layer_costs(layer: Layer, rows: IntArray, machine: Machine) -> FloatArray:
    """Prices a layer's configurations, shape (configurations)."""
    space, total = Space(layer.dims, rows), np.zeros(len(rows))
    for term in layer.terms:
        total += (1.0 if term.kind == WORK else machine.flop_per_word) * space.amount(term)
    return total


def edge_costs(
    edge: LayerEdge, source: Layer, target: Layer, source_rows: IntArray, target_rows: IntArray, machine: Machine
) -> FloatArray:
    """Prices an edge, shape (configurations of the source, configurations of the target)."""
    produced = Space(source.dims, source_rows).axes(edge.source_layout)
    wanted = Space(target.dims, target_rows).axes(edge.target_layout)
    return 2.0 * machine.flop_per_word * missing(edge.sizes, produced[:, None, :], wanted[None, :, :])


def strategy_cost(graph: LayerGraph, chosen: Sequence[Configuration], machine: Machine) -> float:
    """Prices any strategy in FLOP units, whether its configurations are legal or not."""
    rows = [np.array([row], dtype=np.int64) for row in chosen]
    total = sum(float(layer_costs(layer, row, machine)[0]) for layer, row in zip(graph.layers, rows, strict=True))
    for edge in graph.edges:
        ends = graph.layers[edge.source], graph.layers[edge.target], rows[edge.source], rows[edge.target]
        total += float(edge_costs(edge, *ends, machine)[0, 0])
    return total
