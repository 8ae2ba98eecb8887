"""What the configurations of a layer cost, term by term.

A configuration says into how many equal parts each dimension of a layer's iteration space is cut. A device's share of a
dimension is size / parts, a fraction where the parts do not fit. Costs are a sum of terms over the dimensions; one term holds
for a layer of any kind, published or captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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
