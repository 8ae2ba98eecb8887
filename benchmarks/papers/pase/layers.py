"""Layer graphs: what PaSE splits, and the strategy that it returns.

A layer has an iteration space: named dimensions with sizes. A *configuration* says into how many equal parts each dimension is
cut; the product of the parts is the number of devices that work on the layer. What it costs is a sum of *terms*
(`benchmarks.papers.pase.layers`).

An edge carries one tensor. Each side says how it holds the tensor: for every axis of the tensor the layer's dimensions that cut
it (none: the axis is whole on every device; several: their parts multiply).

Costs are in FLOP units, one multiply-add being one, as in the paper; words that travel are turned into FLOP by `Machine`.

What the configurations of a layer cost, term by term.

A configuration says into how many equal parts each dimension of a layer's iteration space is cut. A device's share of a
dimension is size / parts, a fraction where the parts do not fit. Costs are a sum of terms over the dimensions; one term holds
for a layer of any kind, published or captured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Configuration = tuple[int, ...]
"""Parts of each dimension of a layer, in the order of `Layer.dims`."""


@dataclass(frozen=True)
class Layer:
    """A vertex of the layer graph.

    Attributes:
        name: Unique within its graph.
        kind: ``conv``, ``gemm``, ``norm``, ...: a label for people, baselines and lowering; the search does not read it.
        dims: Iteration space.
        terms: Cost of a configuration is the sum of these.
        allows: Says of the sizes and a configuration whether it is legal; None: all are.
        ops: Names of the captured ops that the layer stands for.
    """

    name: str
    kind: str
    dims: tuple[Dim, ...]
    terms: tuple[Term, ...] = ()
    allows: Callable[[tuple[int, ...], Configuration], bool] | None = None
    ops: tuple[str, ...] = ()

    def sizes(self) -> tuple[int, ...]:
        """Sizes of the dimensions."""
        return tuple(dim.size for dim in self.dims)


@dataclass(frozen=True)
class LayerEdge:
    """A tensor from one layer to another.

    Attributes:
        source: Index of the producing layer.
        target: Index of the consuming layer.
        sizes: Shape of the tensor.
        source_layout: The producer's dimensions that cut each axis.
        target_layout: The consumer's.
        factor: Words per element that has to move: 2 for one forward and one backward.
        startup: Words that a device could send while the messages start, when anything has to move; 0 in the paper.
    """

    source: int
    target: int
    sizes: tuple[int, ...]
    source_layout: Layout
    target_layout: Layout
    factor: float = 2.0
    startup: float = 0.0


@dataclass(frozen=True)
class LayerGraph:
    """Layers and the tensors between them; parallel edges are allowed and all count.

    Attributes:
        name: For people.
        layers: Vertices.
        edges: Tensors; from any layer to any other.
        smallest_part: A dimension is only cut into parts of at least this size (the paper: 4 for CNNs, else 1).
    """

    name: str
    layers: tuple[Layer, ...]
    edges: tuple[LayerEdge, ...] = ()
    smallest_part: int = 1

    @property
    def ends(self) -> list[tuple[int, int]]:
        """The layers of every edge."""
        return [(edge.source, edge.target) for edge in self.edges]


@dataclass(frozen=True)
class Machine:
    """The devices, all alike, and the links between them; the defaults are those of the paper's tables.

    Attributes:
        flop_per_s: Peak multiply-adds a second of a device.
        bandwidth_bytes_per_s: What the slowest link carries.
        word_bytes: Bytes of a tensor element.
    """

    flop_per_s: float = 10e12
    bandwidth_bytes_per_s: float = 16e9
    word_bytes: int = 8

    @property
    def flop_per_word(self) -> float:
        """Multiply-adds that a device does while a word travels."""
        return self.flop_per_s / (self.bandwidth_bytes_per_s / self.word_bytes)


@dataclass(frozen=True)
class Strategy:
    """A configuration for every layer.

    Attributes:
        devices: p, how many devices were to be used.
        configurations: Parts per dimension, in order of layers.
        cost_flop: Sum of all layer and edge costs.
        parts: Layer name to dimension name to parts, dimensions that are not cut left out.
    """

    devices: int
    configurations: tuple[Configuration, ...]
    cost_flop: float
    parts: Mapping[str, Mapping[str, int]] = field(repr=False)


def strategy_of(graph: LayerGraph, devices: int, configurations: tuple[Configuration, ...], cost_flop: float) -> Strategy:
    """A strategy with its table of parts by name."""
    parts = {
        layer.name: {dim.name: cut for dim, cut in zip(layer.dims, chosen, strict=True) if cut > 1}
        for layer, chosen in zip(graph.layers, configurations, strict=True)
    }
    return Strategy(devices, configurations, cost_flop, parts)


IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

Layout = tuple[tuple[str, ...], ...]
"""How a layer holds a tensor: for each axis the names of the dimensions whose parts cut it."""


@dataclass(frozen=True)
class Dim:
    """A dimension of an iteration space.

    Attributes:
        name: Unique within its layer.
        size: Iterations, at least one.
        splittable: Whether it may be cut at all.
    """

    name: str
    size: int
    splittable: bool = True


class Space:
    """The configurations of one layer, read by dimension name."""

    def __init__(self, dims: Sequence[Dim], configurations: IntArray) -> None:
        self.parts = {dim.name: configurations[:, i].astype(np.float64) for i, dim in enumerate(dims)}
        self.share = {dim.name: dim.size / self.parts[dim.name] for dim in dims}
        self.one = np.ones(len(configurations))

    def elements(self, dims: tuple[str, ...]) -> FloatArray:
        """Elements of a device over some dimensions."""
        return self.product([self.share[name] for name in dims])

    def split(self, dims: tuple[str, ...]) -> FloatArray:
        """Into how many parts some dimensions are cut together."""
        return self.product([self.parts[name] for name in dims])

    def axes(self, layout: Layout) -> FloatArray:
        """Parts of every axis of a tensor, shape (configurations, axes)."""
        return np.stack([self.split(axis) for axis in layout], axis=1) if layout else np.ones((len(self.one), 0))

    def product(self, factors: list[FloatArray]) -> FloatArray:
        """Product of arrays over the configurations, ones where there are none."""
        total = self.one
        for factor in factors:
            total = total * factor
        return total


@dataclass(frozen=True)
class Term:
    """One summand of a layer's cost: words that travel, but for `Work`.

    Attributes:
        factor: Words or multiply-adds for each element of a device's part of `dims`.
        dims: Names of dimensions.
    """

    factor: float
    dims: tuple[str, ...]

    def amount(self, space: Space) -> FloatArray:
        """Words or multiply-adds of a device, one number a configuration."""
        return self.factor * space.elements(self.dims)


@dataclass(frozen=True)
class Work(Term):
    """Arithmetic of a device, in multiply-adds."""


@dataclass(frozen=True)
class AllReduce(Term):
    """Ring all-reduce over the P devices that share `over`: a device moves ``words / P * 2 (P - 1)``."""

    over: tuple[str, ...]

    def amount(self, space: Space) -> FloatArray:
        """Words of a device."""
        shared = space.split(self.over)
        return super().amount(space) / shared * (2.0 * (shared - 1.0))


@dataclass(frozen=True)
class Exchange(Term):
    """Words that are sent only where one of `when` is cut."""

    when: tuple[str, ...]

    def amount(self, space: Space) -> FloatArray:
        """Words of a device."""
        return np.where(space.split(self.when) > 1, super().amount(space), 0.0)


def missing(sizes: tuple[int, ...], source_parts: FloatArray, target_parts: FloatArray) -> FloatArray:
    """Elements that a device needs of a tensor as a target and does not hold as a source.

    The overlap counts for nothing where the target uses more devices than the source.

    Args:
        sizes: Shape of the tensor.
        source_parts: Parts of each axis at the source; the last axis of the array is that of the tensor's axes.
        target_parts: Parts of each axis at the target.
    """
    shape = np.array(sizes, dtype=np.float64)
    held, needed = shape / source_parts, shape / target_parts
    volume = needed.prod(axis=-1)
    overlap = np.minimum(held, needed).prod(axis=-1)
    more_devices = target_parts.prod(axis=-1) > source_parts.prod(axis=-1)
    return np.maximum(volume - np.where(more_devices, 0.0, overlap), 0.0)
