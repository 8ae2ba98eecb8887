"""From the part counts of a plan to a device mesh whose axes cut the ops.

A mesh of several axes numbers its devices row-major. An op that is cut into parts takes whole axes for each of its
dimensions, so the counts of a dimension must be products of axis sizes, and an op that takes fewer axes than there are is
computed alike along the others. Of the meshes that do for all ops the one with the fewest axes is taken, since a change of
layout is one collective an axis.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd, prod

from rlplace.errors import InputError

Shards = Mapping[str, Mapping[str, int]]
Cut = tuple[tuple[str, tuple[int, ...]], ...]
"""Which mesh axes cut which dimension of an op: ``(dimension, axes in mesh order)`` pairs."""


@dataclass(frozen=True)
class MeshFactors:
    """A mesh that all ops of a plan factor over.

    Attributes:
        shape: Axis sizes; their product is the number of devices.
        cuts: Per op that is cut one way to use the axes: in the op's own order of dimensions, on the last axes that do.
    """

    shape: tuple[int, ...]
    cuts: Mapping[str, Cut]


def factor_mesh(shards: Shards, world: int) -> MeshFactors:
    """The mesh with the fewest axes on which every op's part counts are products of axes of their own.

    Args:
        shards: Parts by op and dimension.
        world: Number of devices.

    Raises:
        InputError: Names an op that does not factor, and the nearest parts that do.
    """
    wanted = {tuple(n for n in dims.values() if n > 1) for dims in shards.values()}
    for shape in _meshes(world):
        if all(next(assignments(shape, counts), None) is not None for counts in wanted):
            return MeshFactors(shape, {op: _last(shape, dims) for op, dims in shards.items() if prod(dims.values()) > 1})
    name, dims = next((op, dims) for op, dims in shards.items() if world % prod(dims.values()))
    near = dict(nearest_shards({name: dims}, world)[name])
    raise InputError(
        f"distribute: {name!r} is cut into {_text(dims)}, which are no axes of a mesh of {world} devices; "
        f"the nearest parts that are: {_text(near)}"
    )


def nearest_shards(shards: Shards, world: int) -> dict[str, dict[str, int]]:
    """The largest divisors of the given parts, dimension by dimension, whose product divides the number of devices."""
    nearest: dict[str, dict[str, int]] = {}
    for op, dims in shards.items():
        left = world
        nearest[op] = {}
        for dim, parts in dims.items():
            nearest[op][dim] = gcd(parts, left)
            left //= nearest[op][dim]
    return nearest


def assignments(shape: Sequence[int], counts: Sequence[int]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Every way to give each count axes of its own, in mesh order, whose sizes multiply to it.

    The first is row-major in the order of the counts; where they leave axes unused, the unused ones come first, so that part p
    runs on device p.
    """
    return iter(_assignments(tuple(shape), tuple(counts)))


@lru_cache(maxsize=1 << 12)
def _assignments(shape: tuple[int, ...], counts: tuple[int, ...]) -> tuple[tuple[tuple[int, ...], ...], ...]:
    ways = []
    for owner in itertools.product(range(-1, len(counts)), repeat=len(shape)):
        axes = tuple(tuple(axis for axis, own in enumerate(owner) if own == index) for index in range(len(counts)))
        if all(prod(shape[axis] for axis in own) == count for own, count in zip(axes, counts, strict=True)):
            ways.append((owner, axes))
    return tuple(axes for _, axes in sorted(ways))


def _meshes(world: int) -> list[tuple[int, ...]]:
    """Every shape of a mesh with axes above 1, larger axes first; fewer axes first."""
    shapes = set(_products(world, world))
    return sorted(shapes, key=lambda shape: (len(shape), [-size for size in shape]))


def _products(number: int, most: int) -> Iterator[tuple[int, ...]]:
    if number == 1:
        yield ()
    for first in range(min(number, most), 1, -1):
        if number % first == 0:
            for rest in _products(number // first, first):
                yield (first, *rest)


def _last(shape: tuple[int, ...], dims: Mapping[str, int]) -> Cut:
    cut = [(dim, parts) for dim, parts in dims.items() if parts > 1]
    axes = next(iter(assignments(shape, [parts for _, parts in cut])))
    return tuple((dim, own) for (dim, _), own in zip(cut, axes, strict=True))


def _text(dims: Mapping[str, int]) -> str:
    return " x ".join(f"{parts} {dim}" for dim, parts in dims.items())
