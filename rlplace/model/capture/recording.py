"""One recorded step, and the references of its labels, events and parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from rlplace.model.capture.assemble import Leaf
from rlplace.model.capture.record import UPDATE_OF, Event, Label
from rlplace.model.graph.indices import Access, Use


@dataclass
class Recording:
    """One recorded step, complete or forward only.

    Attributes:
        labels: Forward ops, in execution order.
        events: ATen ops, in execution order.
        storages: Every storage met, by its number.
        leaves: Parameters and buffers; leaf i has storage i.
        num_external: Number of storages of leaves and inputs, which come first.
        nodes: Names of all nodes of the exported graph; empty without one.
    """

    labels: list[Label]
    events: list[Event]
    storages: list[Any]
    leaves: list[Leaf]
    num_external: int
    nodes: frozenset[str] = frozenset()


Reference = tuple[str, int]
"""Kind of the item that is referred to ("label", "leaf" or "storage") and its number."""


def parts_of(item: Any) -> tuple[Any, list[Reference]]:
    """Returns the fields that are equal in equal layers, and the references."""
    if isinstance(item, Event):
        owner = [("leaf" if item.phase == UPDATE_OF else "label", item.owner)] if item.owner >= 0 else []
        form = (
            item.phase, item.name, item.flops, item.bytes, item.dtype, item.is_view, item.same_shape, item.dims,
            len(item.reads), len(item.writes),
        )  # fmt: skip
        return form, owner + [("storage", s) for s in (*item.reads, *item.writes, *item.creates)]
    if isinstance(item, Leaf):
        record = msgspec.structs.replace(item.record, name="", aliases=())
        return (record, item.idle), [("storage", s) for s in (item.storage, item.gradient_storage) if s is not None]
    spaces = [space for space in (item.access, *(item.parts or ())) if space is not None]
    forms = [(space.dims, space.statistics, [(use.elements, use.runs) for use in space.uses]) for space in spaces]
    kept = [None if part is None else 0 for part in (item.access, *(item.parts or ()))], item.parts is None
    return (item.target, item.whole, item.dims, forms, kept), [("storage", use.storage) for s in spaces for use in s.uses]


def with_numbers(item: Any, numbers: Sequence[int]) -> Any:
    """Returns the item with these numbers in place of its references, in the order of `parts_of`."""
    rest = list(numbers)
    if isinstance(item, Event):
        owner = rest.pop(0) if item.owner >= 0 else -1
        reads, writes = len(item.reads), len(item.reads) + len(item.writes)
        return dataclasses.replace(
            item, owner=owner, reads=tuple(rest[:reads]), writes=tuple(rest[reads:writes]), creates=tuple(rest[writes:])
        )
    if isinstance(item, Leaf):
        return dataclasses.replace(item, storage=rest[0], gradient_storage=rest[1] if len(rest) > 1 else None)

    def moved(space: Access | None) -> Access | None:
        if space is None:
            return None
        return Access(space.dims, tuple(Use(rest.pop(0), u.elements, u.runs) for u in space.uses), space.statistics)

    access = moved(item.access)
    return dataclasses.replace(item, access=access, parts=None if item.parts is None else [moved(p) for p in item.parts])
