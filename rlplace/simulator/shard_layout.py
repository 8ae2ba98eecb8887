"""Where the parts of sharded ops run, and which piece of a tensor each device needs or has.

An op that is cut into P parts runs on the device of its group and the P - 1 devices after it. Its parts are numbered row-major
over the dimensions that are cut; of the possible orders of these dimensions the one is taken with which most bytes of the op's
inputs are already where they are needed (the greedy assignment of PaSE; the op's own order when nothing is gained).

A *box* is a piece of a tensor: an interval on every axis. Tensors travel in *cells*: the pieces that the borders of all boxes
cut a tensor into.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

from rlplace.problem.sharding import Names

Box = tuple[tuple[int, int], ...]
Boxes = Mapping[int, Box]
"""Device to the piece of a tensor there."""


@dataclass(frozen=True)
class Split:
    """How an op is cut.

    Attributes:
        parts: Dimension to parts, those above 1 only, in the order in which the parts are numbered.
        first: Device of the first part; the others follow.
    """

    parts: tuple[tuple[str, int], ...]
    first: int

    @cached_property
    def count(self) -> int:
        """Parts in all."""
        return prod(parts for _, parts in self.parts)

    @property
    def devices(self) -> range:
        """Where the parts run."""
        return range(self.first, self.first + self.count)

    def boxes(self, names: Names, axes: Sequence[int]) -> Boxes:
        """The piece of a tensor that each part runs along."""
        return _boxes(self.parts, self.first, names, tuple(axes))

    def sums(self, names: Names, axes: Sequence[int], among: Container[str] | None = None) -> list[tuple[int, ...]]:
        """Devices whose parts of an output with these names are summands of one sum; empty where nothing is to be summed.

        Args:
            names: The output's dimensions.
            axes: Their sizes.
            among: Dimensions that are summed over where they are not in `names`; along others all parts compute the same.
                Default: all.
        """
        if all(name in names or (among is not None and name not in among) for name, _ in self.parts):
            return []
        alike = [(name, parts) for name, parts in self.parts if name not in names and among is not None and name not in among]
        boxes = self.boxes((*names, *(name for name, _ in alike)), (*axes, *(parts for _, parts in alike)))
        return peers(boxes)


@lru_cache(maxsize=1 << 14)  # layers repeat
def _boxes(cut: tuple[tuple[str, int], ...], first: int, names: Names, axes: tuple[int, ...]) -> Boxes:
    position = {name: index for index, (name, _) in enumerate(cut)}
    counts = [parts for _, parts in cut]
    box_of_device: dict[int, Box] = {}
    for device, coordinates in enumerate(itertools.product(*map(range, counts)), first):
        box = []
        for name, size in zip(names, axes, strict=True):
            if name in position:
                width = size // counts[position[name]]
                low = coordinates[position[name]] * width
                box.append((low, low + width))
            else:
                box.append((0, size))
        box_of_device[device] = tuple(box)
    return box_of_device


def volume(box: Box) -> int:
    """Elements of a box."""
    return prod(high - low for low, high in box)


def overlap(left: Box, right: Box) -> int:
    """Elements that two boxes share."""
    return prod(max(0, min(a[1], b[1]) - max(a[0], b[0])) for a, b in zip(left, right, strict=True))


def peers(boxes: Boxes) -> list[tuple[int, ...]]:
    """Devices with the same box, in order."""
    devices_of_box: dict[Box, list[int]] = {}
    for device, box in boxes.items():
        devices_of_box.setdefault(box, []).append(device)
    return [tuple(devices) for devices in devices_of_box.values()]


def ordered(
    dims: Sequence[str], parts: Mapping[str, int], first: int, inputs: Sequence[tuple[Names, Sequence[int], Boxes, float]]
) -> Split:
    """The split of an op, its cut dimensions in the order that keeps most of its inputs in place.

    Args:
        dims: The op's dimensions.
        parts: Parts by dimension.
        first: Device of the first part.
        inputs: Names, axes, present boxes and bytes of the tensors that it reads.
    """
    cut = [(name, parts[name]) for name in dims if parts.get(name, 1) > 1]
    best, most = Split(tuple(cut), first), -1.0
    if len(cut) < 2 or not inputs:
        return best
    for order in itertools.permutations(cut):
        split = Split(order, first)
        kept = 0.0
        for names, axes, present, size_bytes in inputs:
            needed = split.boxes(names, axes)
            shared = sum(overlap(box, present[device]) for device, box in needed.items() if device in present)
            kept += size_bytes * shared / prod(axes)
        if kept > most * (1 + 1e-12):
            best, most = split, kept
    return best


@dataclass(frozen=True)
class Piece:
    """Part of a tensor that one device has, for readers here and elsewhere.

    Attributes:
        holder: Device that has it.
        volume: Elements.
        readers: ``(reader, device)`` pairs; readers are numbered as they were given.
    """

    holder: int
    volume: int
    readers: tuple[tuple[int, int], ...]


def pieces(axes: Sequence[int], present: Boxes, needed: Sequence[Boxes], seconds: Callable[[int, int], float]) -> list[Piece]:
    """What each device keeps and sends so that all readers have what they need.

    A device that has a cell itself reads that; any other takes it from the device from which it arrives soonest, and from the
    one that has sent least so far where several are alike.

    Args:
        axes: Sizes of the tensor's axes.
        present: Boxes that producers leave.
        needed: Boxes of each reader.
        seconds: Time of a transfer of some size between two devices, for comparison.
    """
    if all(device in present and present[device] == box for boxes in needed for device, box in boxes.items()):
        return [
            Piece(holder, volume(box), tuple((reader, holder) for reader, boxes in enumerate(needed) if holder in boxes))
            for holder, box in present.items()
        ]
    borders = []
    for axis, size in enumerate(axes):
        at = {0, size}
        for boxes in (present, *needed):
            for box in boxes.values():
                at.update(box[axis])
        borders.append(sorted(at))
    bytes_of_piece: dict[tuple[int, tuple[tuple[int, int], ...]], int] = {}
    sent: dict[int, int] = dict.fromkeys(present, 0)
    for cell in itertools.product(*(list(itertools.pairwise(at)) for at in borders)):
        size = volume(cell)
        holders = [device for device, box in present.items() if _inside(cell, box)]
        takers: dict[int, list[int]] = {}
        for reader, boxes in enumerate(needed):
            for device, box in boxes.items():
                if _inside(cell, box):
                    takers.setdefault(device, []).append(reader)
        chosen: dict[int, list[tuple[int, int]]] = {holder: [] for holder in holders}
        for device in sorted(takers):
            source = device
            if device not in chosen:
                source = min(holders, key=lambda holder: (seconds(holder, device), sent[holder], holder))
                sent[source] += size
            chosen[source] += [(reader, device) for reader in takers[device]]
        for holder, readers in chosen.items():
            key = holder, tuple(sorted(readers))
            bytes_of_piece[key] = bytes_of_piece.get(key, 0) + size
    return [Piece(holder, size, readers) for (holder, readers), size in bytes_of_piece.items()]


def _inside(cell: Box, box: Box) -> bool:
    return all(low >= start and high <= end for (low, high), (start, end) in zip(cell, box, strict=True))
