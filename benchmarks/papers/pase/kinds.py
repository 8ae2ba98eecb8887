"""The paper's layer costs as terms, by kind of layer.

All cover one forward and one backward pass. Constants are those of the paper's public code: a GEMM is three GEMMs in training,
a point-wise operation three operations an element, an exponential three multiply-adds, a normalisation eight operations an
element each way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from benchmarks.papers.pase.layers import AllReduce, Configuration, Exchange, FloatArray, Layout, Space, Term, Work, missing

EXP_FLOP = 3.0
"""Multiply-adds of an exponential."""

Names = Sequence[str]
"""Names of dimensions."""


@dataclass(frozen=True)
class Halo(Term):
    """Borders along `dims` (batch, channels) that windows read from a neighbour's part.

    Attributes:
        windows: ``(dim, size, reach)`` of each windowed axis: dimension, size of the input along it, elements added to a
            device's part when that dimension is cut.
    """

    windows: tuple[tuple[str, int, int], ...]

    def amount(self, space: Space) -> FloatArray:
        """Words of a device."""
        inner = [size / space.parts[name] for name, size, _ in self.windows]
        reach = [np.where(space.parts[name] > 1, reach, 0) for name, _, reach in self.windows]
        border = space.product([part + extra for part, extra in zip(inner, reach, strict=True)]) - space.product(inner)
        return self.factor * border * space.elements(self.dims)


@dataclass(frozen=True)
class Relayout(Term):
    """Words that a device needs of a tensor of `sizes` laid out as `target` and does not hold of it as `source`."""

    sizes: tuple[int, ...]
    source: Layout
    target: Layout

    def amount(self, space: Space) -> FloatArray:
        """Words of a device."""
        return self.factor * missing(self.sizes, space.axes(self.source), space.axes(self.target))


def contiguous(sizes: tuple[int, ...], row: Configuration) -> bool:
    """Whether cutting a row-major space like this gives contiguous pieces: full cuts, then one partial cut, then none."""
    axis = 0
    while axis < len(sizes) and row[axis] == sizes[axis]:
        axis += 1
    return all(parts == 1 for parts in row[axis + 1 :])


def gemm(
    m: Names, n: Names, k: Names, *, batch: Names = (), pointwise: int = 0, times: tuple[int, int] = (1, 1)
) -> tuple[Term, ...]:
    """Matrix product ``[batch] m k, [batch] k n -> [batch] m n``; convolutions, embeddings and attention are products too.

    Args:
        m: Dimensions of the rows of the output.
        n: Dimensions of its columns.
        k: Dimensions summed over.
        batch: Dimensions that both operands and the output have.
        pointwise: Point-wise operations on the output.
        times: The product is this many times wider than `n`, and as many times deeper than `k`, than the dimensions say
            (an LSTM cell's four gates of two stacked inputs: 4 and 2).
    """
    batch, m, n, k = tuple(batch), tuple(m), tuple(n), tuple(k)
    wide, deep = times
    terms: tuple[Term, ...] = (
        Work(3.0 * wide * deep, (*batch, *m, *n, *k)),
        AllReduce(wide, (*batch, *m, *n), k),  # output
        AllReduce(deep, (*batch, *m, *k), n),  # gradient of the input
        AllReduce(wide * deep, (*batch, *n, *k), m),  # gradient of the weights
    )
    return (*terms, Work(3.0 * pointwise * wide, (*batch, *m, *n))) if pointwise else terms


def elementwise(dims: Names, operations: float = 1.0) -> tuple[Term, ...]:
    """So many operations an element."""
    return (Work(operations, tuple(dims)),)


def pooling(dims: Names, windows: tuple[tuple[str, int, int], ...]) -> tuple[Term, ...]:
    """Maximum or mean over a window: one operation an output element, and halos where a windowed axis is cut."""
    windowed = {name for name, _, _ in windows}
    return Work(1.0, tuple(dims)), Halo(1.0, tuple(name for name in dims if name not in windowed), windows)


def norm(dims: Names, axis: str) -> tuple[Term, ...]:
    """Normalisation along one axis: statistics are reduced over it, scale and bias over all others."""
    rest = tuple(name for name in dims if name != axis)
    return Work(16.0, tuple(dims)), AllReduce(4.0, rest, (axis,)), AllReduce(4.0, (axis,), rest)


def softmax(dims: Names, axis: str, size: int) -> tuple[Term, ...]:
    """Softmax along an axis of `size`; the backward pass multiplies each row with its Jacobian."""
    rest = tuple(name for name in dims if name != axis)
    return Work(EXP_FLOP + 1.0 + size, tuple(dims)), AllReduce(2.0 + size, rest, (axis,))


def softmax_cross_entropy(dims: Names, classes: str) -> tuple[Term, ...]:
    """Softmax over classes with its loss: two words a row travel where the classes are cut."""
    rest = tuple(name for name in dims if name != classes)
    return Work(EXP_FLOP + 1.0, tuple(dims)), Work(2.0, rest), Exchange(2.0, rest, (classes,))


def mean(dims: Names, over: Names) -> tuple[Term, ...]:
    """Mean over some dimensions: only the all-reduce counts, of a device's input elements."""
    return (AllReduce(1.0, tuple(dims), tuple(over)),)


def lstm(layers: str, steps: str, batch: str, out: str, inner: str, sizes: tuple[int, int, int, int]) -> tuple[Term, ...]:
    """Stacked LSTM as one layer: the gates' products of all steps, and the cell's output turned into its next input each step.

    Args:
        layers: Dimension of the stacked layers; cutting it is a wavefront pipeline.
        steps: Dimension of the sequence.
        batch: Dimension of the batch.
        out: Dimension of the hidden units of the output.
        inner: Dimension of the hidden units of the input.
        sizes: Sizes of layers, steps, batch and hidden units.
    """
    cells, hidden = prod(sizes[:2]), (sizes[2], sizes[3])
    produced: Layout = ((batch,), (out,))
    wanted: Layout = ((batch,), (inner,))
    gates = gemm((steps, batch), (out,), (inner,), batch=(layers,), pointwise=3, times=(4, 2))
    return (*gates, Relayout(float(cells), (), hidden, produced, wanted))
