"""Where the pieces of a tensor lie on a mesh, and how to get from one such layout to another.

Every dimension of a tensor is seen as row-major *factors*; a factor is whole on every device or spread over one mesh axis of
its own size. So the middle heads of a fused projection ``[3, heads, width]`` can be spread although the projection is one
dimension, and a view only groups factors anew. Seen by its factors, a tensor is a plain DTensor with a `Shard` on a
dimension of its own for every axis that spreads it: that is how tensors are redistributed. Along other axes it is
replicated, or partial: the sum over the axis is the tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from math import prod

WHOLE = -1
Factor = tuple[int, int]
"""Size, and the mesh axis that spreads it or `WHOLE`."""


@dataclass(frozen=True)
class Spec:
    """Layout of a tensor on a mesh.

    Attributes:
        dims: Per dimension its factors, outermost first, without whole ones of size 1 or side by side.
        partial: Mesh axes over which the tensor is still to be summed.
    """

    dims: tuple[tuple[Factor, ...], ...]
    partial: frozenset[int] = frozenset()

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the whole tensor."""
        return tuple(prod(size for size, _ in factors) for factors in self.dims)

    @cached_property
    def local_shape(self) -> tuple[int, ...]:
        """Sizes on each device."""
        return tuple(prod(size for size, axis in factors if axis == WHOLE) for factors in self.dims)

    @cached_property
    def axes(self) -> frozenset[int]:
        """Mesh axes that spread the tensor."""
        return frozenset(axis for factors in self.dims for _, axis in factors if axis != WHOLE)

    def gathered(self, axes: Iterable[int] | None = None) -> Spec:
        """Not spread over the given axes (default: over none at all); still partial where it is."""
        gone = self.axes if axes is None else frozenset(axes)
        return Spec(
            tuple(normal((size, WHOLE if axis in gone else axis) for size, axis in factors) for factors in self.dims),
            self.partial,
        )

    def with_partial(self, axes: Iterable[int]) -> Spec:
        """The same pieces, to be summed over these axes."""
        return replace(self, partial=frozenset(axes))


def whole(shape: Sequence[int]) -> Spec:
    """The layout of a tensor that every device has."""
    return Spec(tuple(normal([(int(size), WHOLE)]) for size in shape))


def normal(factors: Iterable[Factor]) -> tuple[Factor, ...]:
    """Without whole factors of size 1, whole neighbours joined."""
    joined: list[Factor] = []
    for size, axis in factors:
        if axis == WHOLE and size == 1:
            continue
        if axis == WHOLE and joined and joined[-1][1] == WHOLE:
            joined[-1] = (joined[-1][0] * size, WHOLE)
        else:
            joined.append((size, axis))
    return tuple(joined)


@dataclass(frozen=True)
class Move:
    """One redistribution.

    Attributes:
        shape: The tensor's factors as dimensions.
        source: Per mesh axis the dimension that it spreads, `WHOLE`, or `PARTIAL`.
        target: Likewise, afterwards.
    """

    shape: tuple[int, ...]
    source: tuple[int, ...]
    target: tuple[int, ...]

    @cached_property
    def local_shape(self) -> tuple[int, ...]:
        """Sizes on each device before."""
        return tuple(1 if dim in self.source else size for dim, size in enumerate(self.shape))


PARTIAL = -2


@lru_cache(maxsize=1 << 14)
def coarsened(move: Move, mesh: tuple[int, ...]) -> tuple[Move, tuple[int, ...]]:
    """The same redistribution on a mesh whose neighbouring axes are one wherever both do the same.

    One collective over four devices is less than two over two, and gives every device the same sum.

    Args:
        move: A redistribution.
        mesh: Axis sizes.

    Returns:
        It and the axis sizes that it is for now.
    """
    for axis in range(len(mesh) - 1):
        joined = _joined(move, mesh, axis)
        if joined is not None:
            return coarsened(joined, (*mesh[:axis], mesh[axis] * mesh[axis + 1], *mesh[axis + 2 :]))
    return move, tuple(mesh)


def _joined(move: Move, mesh: Sequence[int], axis: int) -> Move | None:
    ends = [(side[axis], side[axis + 1]) for side in (move.source, move.target)]
    joins = {pair[0] for pair in ends if pair[0] >= 0}
    if any(second != (first + 1 if first >= 0 else first) for first, second in ends):
        return None
    others = {dim for side in (move.source, move.target) for a, dim in enumerate(side) if a not in (axis, axis + 1)}
    if any(first in others or first + 1 in others or first + 1 in joins for first in joins):
        return None
    for first in sorted(joins, reverse=True):
        shape = (*move.shape[:first], move.shape[first] * move.shape[first + 1], *move.shape[first + 2 :])
        sides = [tuple(dim - (dim > first) for dim in side) for side in (move.source, move.target)]
        move = Move(shape, *sides)
    return Move(move.shape, *(tuple(d for a, d in enumerate(side) if a != axis + 1) for side in (move.source, move.target)))


@lru_cache(maxsize=1 << 14)  # layers repeat
def moves(source: Spec, target: Spec, axes: int) -> tuple[Move, ...]:
    """The redistributions that lead from one layout of a tensor to another.

    One, where both can be seen in the same factors; else axes whose factors cross are gathered first.

    Args:
        source: Layout that there is.
        target: Layout of the same shape that is wanted.
        axes: Number of mesh axes.
    """
    if source == target:
        return ()
    crossing: set[int] = set()
    common: list[list[int]] = []
    for have, want in zip(source.dims, target.dims, strict=True):
        sizes = _common(have, want)
        if sizes is None:
            crossing |= {axis for _, axis in have if axis != WHOLE}
            sizes = _common((), want, prod(size for size, _ in have))
            assert sizes is not None
        common.append(sizes)
    if crossing:
        between = source.gathered(crossing)
        return (*moves(source, between, axes), *moves(between, target, axes))
    shape = tuple(size for sizes in common for size in sizes)
    move = Move(shape, _spread(source, common, axes), _spread(target, common, axes))
    return () if move.source == move.target else (move,)


def _borders(factors: Sequence[Factor]) -> tuple[set[int], list[tuple[int, int]]]:
    """Strides at which spread factors begin and end, and these intervals."""
    inner, intervals = 1, []
    for size, axis in reversed(factors):
        if axis != WHOLE:
            intervals.append((inner, inner * size))
        inner *= size
    return {border for interval in intervals for border in interval}, intervals


def _common(have: Sequence[Factor], want: Sequence[Factor], size: int | None = None) -> list[int] | None:
    """Sizes of the factors of a dimension, outermost first, in which both layouts are plain; None when they cross."""
    total = prod(s for s, _ in (have or want)) if size is None else size
    left, left_intervals = _borders(have)
    right, right_intervals = _borders(want)
    borders = sorted(left | right | {1, total})
    if any(high % low for low, high in pairwise(borders)):
        return None
    if any(low < border < high for low, high in (*left_intervals, *right_intervals) for border in borders):
        return None
    return [high // low for low, high in pairwise(borders)][::-1]


def _spread(spec: Spec, common: Sequence[Sequence[int]], axes: int) -> tuple[int, ...]:
    """Per mesh axis the fine dimension that it spreads."""
    spread = [PARTIAL if axis in spec.partial else WHOLE for axis in range(axes)]
    position = 0
    for factors, sizes in zip(spec.dims, common, strict=True):
        inner = {}
        stride = 1
        for index in range(len(sizes) - 1, -1, -1):
            inner[stride] = position + index
            stride *= sizes[index]
        stride = prod(size for size, _ in factors)
        for size, axis in factors:
            stride //= size
            if axis != WHOLE:
                spread[axis] = inner[stride]
        position += len(sizes)
    return tuple(spread)


def moved_elements(source: Spec, target: Spec, mesh: Sequence[int]) -> float:
    """Elements that each device receives on the way from one layout to another, for comparison."""
    total = 0.0
    for move in moves(source, target, len(mesh)):
        size = float(prod(move.local_shape))
        for axis, (before, after) in enumerate(zip(move.source, move.target, strict=True)):
            count = mesh[axis]
            if before == after:
                continue
            if before == PARTIAL:
                total += size * (count - 1) / count * (1 if after >= 0 else 2)
            elif before >= 0 and after >= 0:
                total += size * (count - 1) / count
            elif before >= 0:
                total += size * (count - 1)
                size *= count
            if after >= 0 and before < 0:
                size /= count
    return total
