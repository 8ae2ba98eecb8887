"""Layer graphs: what PaSE splits, and the strategy that it returns.

A layer has an iteration space: named dimensions with sizes. A *configuration* says into how many equal parts each dimension is
cut; the product of the parts is the number of devices that work on the layer. What a configuration costs is a sum of *terms*
over the dimensions (work of a device, all-reduces, halos, ...), so a layer of any kind, published or captured, is written in
the same few words: `gemm`, `norm` and the like in `benchmarks.papers.pase.kinds` build the terms of the paper's layers.

An edge carries one tensor. Each side says how it holds the tensor: for every axis of the tensor the layer's dimensions that cut
it (none: the axis is whole on every device; several: their parts multiply).

Costs are in FLOP units, one multiply-add being one, as in the paper; words that travel are turned into FLOP by `Machine`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, isfinite, prod

from rlplace.errors import InputError

Layout = tuple[tuple[str, ...], ...]
"""How a layer holds a tensor: for each axis the names of the dimensions whose parts cut it."""

Configuration = tuple[int, ...]
"""Parts of each dimension of a layer, in the order of `Layer.dims`."""


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


@dataclass(frozen=True)
class Work:
    """Arithmetic of a device: ``factor * elements``, elements being the device's part of `dims`."""

    factor: float
    dims: tuple[str, ...]


@dataclass(frozen=True)
class AllReduce:
    """Ring all-reduce of ``factor * elements`` words a device over the devices that share `over`: ``words / P * 2 (P - 1)``."""

    factor: float
    dims: tuple[str, ...]
    over: tuple[str, ...]


@dataclass(frozen=True)
class Exchange:
    """``factor * elements`` words a device, sent only when one of `when` is cut."""

    factor: float
    dims: tuple[str, ...]
    when: tuple[str, ...]


@dataclass(frozen=True)
class Halo:
    """Borders that windows read from a neighbour's part.

    Attributes:
        factor: Words per border element.
        dims: Dimensions that the borders run along (batch, channels).
        windows: ``(dim, size, reach)`` of each windowed axis: dimension, size of the input along it, elements added to a
            device's part when that dimension is cut.
    """

    factor: float
    dims: tuple[str, ...]
    windows: tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class Relayout:
    """``factor`` times the words that a device needs of a tensor laid out as `target` and does not hold of it as `source`.

    The overlap counts for nothing when the target uses more devices than the source. Devices are counted over the dimensions
    that the two layouts name.
    """

    factor: float
    sizes: tuple[int, ...]
    source: Layout
    target: Layout


Term = Work | AllReduce | Exchange | Halo | Relayout
"""One summand of a layer's cost; all but `Work` are communication."""


@dataclass(frozen=True)
class Layer:
    """A vertex of the layer graph.

    Attributes:
        name: Unique within its graph.
        kind: ``conv``, ``gemm``, ``norm``, ...: a label for people, baselines and lowering; the search does not read it.
        dims: Iteration space.
        terms: Cost of a configuration is the sum of these.
        contiguous: Only configurations that cut the flattened iteration space into contiguous pieces are legal (reshapes).
        ops: Names of the captured ops that the layer stands for.
    """

    name: str
    kind: str
    dims: tuple[Dim, ...]
    terms: tuple[Term, ...] = ()
    contiguous: bool = False
    ops: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Checks that terms name the layer's dimensions and that every number is usable."""
        names = [dim.name for dim in self.dims]
        if not names or len(set(names)) != len(names):
            raise InputError(f"layer {self.name!r}: dimensions {names} must be distinct and at least one; rename them")
        for dim in self.dims:
            if dim.size < 1:
                raise InputError(f"layer {self.name!r}: dimension {dim.name!r} has size {dim.size}; give it at least 1")
        for term in self.terms:
            if not isfinite(term.factor) or term.factor < 0:
                raise InputError(f"layer {self.name!r}: factor {term.factor} of a term must be finite and not negative")
            _known(f"layer {self.name!r}", _term_dims(term), names)

    def sizes(self) -> tuple[int, ...]:
        """Sizes of the dimensions."""
        return tuple(dim.size for dim in self.dims)

    def position(self, name: str) -> int:
        """Index of a dimension."""
        return [dim.name for dim in self.dims].index(name)


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

    def __post_init__(self) -> None:
        """Checks names, indices and layouts."""
        names = [layer.name for layer in self.layers]
        if not names or len(set(names)) != len(names):
            raise InputError(f"layer graph {self.name!r}: layer names must be distinct and at least one; rename them")
        for edge in self.edges:
            where = f"layer graph {self.name!r}: edge {edge.source} -> {edge.target}"
            if not (0 <= edge.source < len(names) and 0 <= edge.target < len(names)) or edge.source == edge.target:
                raise InputError(f"{where} must join two different layers out of {len(names)}; correct its indices")
            if not len(edge.sizes) == len(edge.source_layout) == len(edge.target_layout):
                raise InputError(f"{where}: shape and layouts must have one entry an axis; correct them")
            if not (0 <= edge.factor < inf and 0 <= edge.startup < inf) or min(edge.sizes, default=1) < 1:
                raise InputError(f"{where}: sizes must be at least 1, factor and startup finite and not negative")
            for end, layout in ((edge.source, edge.source_layout), (edge.target, edge.target_layout)):
                _known(where, {name for axis in layout for name in axis}, [dim.name for dim in self.layers[end].dims])

    def index(self, name: str) -> int:
        """Index of a layer by name."""
        return [layer.name for layer in self.layers].index(name)


@dataclass(frozen=True)
class Machine:
    """The devices, all alike, and the links between them; the defaults are those of the paper's tables.

    Attributes:
        flop_per_s: Peak multiply-adds a second of a device.
        bandwidth_bytes_per_s: Of the slowest link.
        word_bytes: Bytes of a tensor element.
    """

    flop_per_s: float = 10e12
    bandwidth_bytes_per_s: float = 16e9
    word_bytes: int = 8

    def __post_init__(self) -> None:
        """Checks that all rates are positive."""
        for name, value in vars(self).items():
            if not (isfinite(value) and value > 0):
                raise InputError(f"machine: {name} is {value}; give a positive number")

    @property
    def flop_per_word(self) -> float:
        """Multiply-adds that a device does while a word travels."""
        return self.flop_per_s / (self.bandwidth_bytes_per_s / self.word_bytes)


@dataclass(frozen=True)
class SearchStatistics:
    """What a search took.

    Attributes:
        largest_configurations: K, configurations of the layer that has most.
        largest_dependent_set: M, later layers that a table is indexed by, at most.
        largest_product: Most combinations that a vertex's table was filled from.
        combinations: The same for each vertex, in order of layers.
        order: Elimination order, as layer indices.
        tables_bytes: Most bytes that tables and their arg-mins took together.
        seconds: Wall-clock time, costs included.
    """

    largest_configurations: int
    largest_dependent_set: int
    largest_product: int
    combinations: tuple[int, ...]
    order: tuple[int, ...]
    tables_bytes: int
    seconds: float


@dataclass(frozen=True)
class Strategy:
    """A configuration for every layer.

    Attributes:
        devices: p, how many devices were to be used.
        configurations: Parts per dimension, in order of layers.
        cost_flop: Sum of all layer and edge costs.
        parts: Layer name to dimension name to parts, dimensions that are not cut left out.
        statistics: What the search took; None for strategies that were not searched by dynamic programming.
    """

    devices: int
    configurations: tuple[Configuration, ...]
    cost_flop: float
    parts: Mapping[str, Mapping[str, int]] = field(repr=False)
    statistics: SearchStatistics | None = field(default=None, repr=False, compare=False)


def strategy_of(
    graph: LayerGraph,
    devices: int,
    configurations: tuple[Configuration, ...],
    cost_flop: float,
    statistics: SearchStatistics | None = None,
) -> Strategy:
    """A strategy with its table of parts by name."""
    parts = {
        layer.name: {dim.name: cut for dim, cut in zip(layer.dims, chosen, strict=True) if cut > 1}
        for layer, chosen in zip(graph.layers, configurations, strict=True)
    }
    return Strategy(devices, configurations, cost_flop, parts, statistics)


def devices_used(configuration: Configuration) -> int:
    """Devices that work on a layer."""
    return prod(configuration)


def _term_dims(term: Term) -> set[str]:
    """Names of the dimensions that a term reads."""
    match term:
        case Work():
            return set(term.dims)
        case AllReduce():
            return {*term.dims, *term.over}
        case Exchange():
            return {*term.dims, *term.when}
        case Halo():
            return {*term.dims, *(name for name, _, _ in term.windows)}
        case Relayout():
            return {name for layout in (term.source, term.target) for axis in layout for name in axis}


def _known(where: str, used: set[str], names: list[str]) -> None:
    """Refuses a name that is no dimension."""
    for name in sorted(used.difference(names)):
        raise InputError(f"{where} refers to dimension {name!r}, but the layer has {names}; correct the name")
