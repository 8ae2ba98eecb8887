"""Building a layer graph layer by layer, as a network is written down.

A `Tensor` knows who makes it and how; adding a layer says how it reads its inputs, and the edges follow. An input of the
network has no producer and costs nothing to bring.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.papers.pase.layers import Configuration, Dim, Layer, LayerEdge, LayerGraph, Layout, Term


@dataclass(frozen=True)
class Tensor:
    """A tensor between layers.

    Attributes:
        sizes: Shape.
        producer: Index of the layer that makes it, or None for an input of the network.
        layout: How the producer holds it.
    """

    sizes: tuple[int, ...]
    producer: int | None = None
    layout: Layout = ()


@dataclass
class GraphBuilder:
    """Collects layers and edges.

    Attributes:
        name: Name of the graph.
        smallest_part: See `LayerGraph`.
    """

    name: str
    smallest_part: int = 1
    _layers: list[Layer] = field(default_factory=list)
    _edges: list[LayerEdge] = field(default_factory=list)

    def add(
        self,
        name: str,
        kind: str,
        dims: Sequence[Dim],
        terms: tuple[Term, ...],
        inputs: Sequence[tuple[Tensor, Layout]],
        output: Sequence[tuple[int, tuple[str, ...]]],
        *,
        allows: Callable[[tuple[int, ...], Configuration], bool] | None = None,
    ) -> Tensor:
        """Adds a layer.

        Args:
            name: Unique name.
            kind: Label.
            dims: Iteration space.
            terms: Costs.
            inputs: Tensors, each with the layout in which the layer reads it.
            output: Per axis of the output its size and the dimensions that cut it.
            allows: Which configurations are legal, see `Layer`; None: all.
        """
        index = len(self._layers)
        self._layers.append(Layer(name, kind, tuple(dims), terms, allows))
        for tensor, layout in inputs:
            if tensor.producer is not None:
                self._edges.append(LayerEdge(tensor.producer, index, tensor.sizes, tensor.layout, layout))
        return Tensor(tuple(size for size, _ in output), index, tuple(axis for _, axis in output))

    def build(self) -> LayerGraph:
        """The graph so far."""
        return LayerGraph(self.name, tuple(self._layers), tuple(self._edges), self.smallest_part)
