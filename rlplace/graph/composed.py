"""One iteration space for an op that runs several ATen ops, such as a loss function.

The spaces of the ATen ops are joined through the storages that they hand on: dimensions that run along the same strides are
one. A sum inside the op, over a dimension that does not run along what it makes, is a statistic: devices that share the
dimension need it before they can go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from rlplace.graph.access import Access, Use
from rlplace.graph.indices import Layouts
from rlplace.problem.order import UnionFind
from rlplace.problem.sharding import Names


def composed(parts: Sequence[Access], inner: frozenset[int]) -> Access | None:
    """The access of an op from those of the ATen ops that it runs.

    Args:
        parts: In execution order.
        inner: Storages that the op makes.

    Returns:
        None when nothing can be cut.
    """
    layouts = Layouts(dict(enumerate(parts)))
    classes = _classes(layouts)
    dims = {name: layouts.dims[part][piece] for (part, piece), name in classes.items()}
    outer: dict[int, Use] = {}
    elements = {use.storage: use.elements for part in parts for use in part.uses}
    for storage, access in layouts.access.items():
        runs = []
        stride = prod(layouts.axes[storage])
        agreed = _agreed(classes, access)
        for size, name in zip(layouts.axes[storage], agreed, strict=True):
            stride //= size
            if name:
                runs.append((name, size, stride))
        outer[storage] = Use(storage, elements[storage], tuple(runs))
    statistics: list[tuple[Names, int]] = []
    for number, part in enumerate(parts):
        statistics += [
            (tuple(classes[number, name] for name in names), size) for names, size in layouts.statistics(number, part)
        ]
        created = [use.storage for use in part.uses if use.storage in inner and not _made_before(parts[:number], use.storage)]
        for storage in created:
            names = _agreed(classes, layouts.access[storage])
            own = {classes[number, piece] for piece in layouts.dims.get(number, {})}
            later = any(use.storage == storage for after in parts[number + 1 :] for use in after.uses)
            if later and not own <= set(names):
                statistics.append((tuple(name for name in names if name), 4 * elements[storage]))
    return Access(dims, tuple(outer.values()), tuple(statistics)) if dims else None


def _made_before(parts: Sequence[Access], storage: int) -> bool:
    return any(use.storage == storage for part in parts for use in part.uses)


def _agreed(classes: dict[tuple[int, str], str], access: dict[int, Names]) -> list[str]:
    """Per axis the class that all ATen ops see there, "" where they do not agree."""
    seen = [[classes[part, name] if name else "" for name in names] for part, names in access.items()]
    return [row[0] if len(set(row)) == 1 else "" for row in zip(*seen, strict=True)]


def _classes(layouts: Layouts) -> dict[tuple[int, str], str]:
    """A common name for the dimensions of different ATen ops that run along the same axes."""
    sets = UnionFind()
    for access in layouts.access.values():
        for axis in range(len(next(iter(access.values())))):
            keys = [(part, names[axis]) for part, names in access.items() if names[axis]]
            for key in keys[1:]:
                if sets.find(keys[0])[0] != sets.find(key)[0]:  # two dimensions of one ATen op stay two
                    sets.union(*sorted((sets.find(keys[0]), sets.find(key))))
    keys = [(part, piece) for part, pieces in layouts.dims.items() for piece in pieces]
    roots = sorted({sets.find(key) for key in keys})
    name_of = {root: f"d{index}" for index, root in enumerate(roots)}
    return {key: name_of[sets.find(key)] for key in keys}
