"""Moves of devices: between places, in and out of use, places merged and split."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from math import gcd

from rlplace.strategy.drafts import Place

Look = tuple[str, int]
"""Kind and host of a device: devices that have one are as good as each other."""

Places = tuple[Place, ...]


def moved_devices(places: Places, near: Sequence[int], looks: Sequence[Look], usable: Sequence[int]) -> Iterator[Places]:
    """Places that exchange or hand over devices, merge, split, leave devices out or take unused ones.

    Args:
        places: Of a draft.
        near: Their indices, those near the bottleneck first.
        looks: Of every device of the cluster.
        usable: Devices that may be used.
    """
    for one in near:
        here = places[one]
        for axes in _split(here):
            yield replaced(places, {one: axes})
        for other in (one - 1, one + 1):
            if 0 <= other < len(places):
                first, second = sorted((one, other))
                for merged in _resized(places[first], places[first].devices + places[second].devices):
                    yield (*places[:first], merged, *places[second + 1 :])
        yield from _reordered(places, one, looks)
    for one in near:
        for other in range(len(places)):
            yield from _exchanged(places, one, other, looks)
    used = {device for place in places for device in place.devices}
    unused = [device for device in usable if device not in used]
    for look in dict.fromkeys(looks[device] for device in unused):
        extra = tuple(device for device in unused if looks[device] == look)
        for count in sorted({1, len(extra)}):
            for one in near:
                for grown in _resized(places[one], places[one].devices + extra[:count]):
                    yield replaced(places, {one: (grown,)})
            for at in range(len(places) + 1):
                yield (*places[:at], *_resized(places[min(at, len(places) - 1)], extra[:count])[:1], *places[at:])
    for one in near:
        if len(places) > 1:
            yield (*places[:one], *places[one + 1 :])
        devices = places[one].devices
        leaving = {looks[device]: device for device in devices}.values()
        kept = [tuple(d for d in devices if d != gone) for gone in leaving] + [devices[: len(devices) // 2]]
        for fewer in dict.fromkeys(kept):
            if fewer:
                yield from (replaced(places, {one: (small,)}) for small in _resized(places[one], fewer))


def _exchanged(places: Places, one: int, other: int, looks: Sequence[Look]) -> Iterator[Places]:
    """Two places exchange their devices or one of each look, or one hands a device over."""
    if one == other:
        return
    a, b = places[one], places[other]
    if one < other and len(a.devices) == len(b.devices):
        yield replaced(places, {one: (_on(a, b.devices),), other: (_on(b, a.devices),)})
    of_a = {looks[device]: device for device in a.devices}
    of_b = {looks[device]: device for device in b.devices}
    if one < other and len(a.devices) * len(b.devices) > 1:
        for look, mine in of_a.items():
            for its, theirs in of_b.items():
                if look != its:
                    yield replaced(
                        places,
                        {
                            one: (_on(a, tuple(theirs if d == mine else d for d in a.devices)),),
                            other: (_on(b, tuple(mine if d == theirs else d for d in b.devices)),),
                        },
                    )
    if len(a.devices) > 1:
        for mine in of_a.values():
            for less in _resized(a, tuple(d for d in a.devices if d != mine)):
                for more in _resized(b, (*b.devices, mine)):
                    yield replaced(places, {one: (less,), other: (more,)})


def _reordered(places: Places, one: int, looks: Sequence[Look]) -> Iterator[Places]:
    """Devices of a place by host and kind, or dealt out over the groups, where they are unlike."""
    place = places[one]
    if len({looks[device] for device in place.devices}) > 1:
        ordered = tuple(sorted(place.devices, key=lambda device: (looks[device], device)))
        half = len(ordered) // 2
        dealt = tuple(d for pair in zip(ordered[:half], ordered[half:], strict=False) for d in pair) + ordered[2 * half :]
        for devices in (ordered, dealt):
            if devices != place.devices:
                yield replaced(places, {one: (_on(place, devices),)})


def _resized(place: Place, devices: tuple[int, ...]) -> list[Place]:
    """The place on more or fewer devices: tensor groups as they were where that divides, the rest shared or copied.

    Or tensor groups wider by as much as the place is.
    """
    tensor, (times, rest) = gcd(place.tensor, len(devices)), divmod(len(devices), len(place.devices))
    context = gcd(place.context, len(devices) // tensor)
    data = len(devices) // (tensor * context)
    grown = [(data // place.shard, place.shard)] if data % place.shard == 0 else []
    ways = dict.fromkeys([*grown, *([(1, data), (data, 1)] if place.sharding else [(data, 1), (1, data)])])
    found = [dataclasses.replace(place, devices=devices, replicate=r, shard=s, context=context, tensor=tensor) for r, s in ways]
    if times > 1 and not rest:
        found.append(dataclasses.replace(place, devices=devices, tensor=times * place.tensor, sequence_parallel=True))
    return [at_level(one, max(place.sharding, 1)) for one in found]


def _split(place: Place) -> Iterator[tuple[Place, Place]]:
    """A place as two of half the devices, with half of one degree."""
    half = len(place.devices) // 2
    for axis in ("replicate", "shard", "context", "tensor"):
        if getattr(place, axis) % 2 == 0:
            part = dataclasses.replace(place, devices=place.devices[:half], **{axis: getattr(place, axis) // 2})
            yield at_level(part, 1), at_level(_on(part, place.devices[half:]), 1)


def _on(place: Place, devices: tuple[int, ...]) -> Place:
    return dataclasses.replace(place, devices=devices)


def replaced(places: Places, changed: dict[int, Places]) -> Places:
    """The places with some of them replaced, each by one or more."""
    return tuple(new for number, old in enumerate(places) for new in changed.get(number, (old,)))


def at_level(place: Place, level: int) -> Place:
    """The place with a sharding level if it shards, sequence parallelism and spread experts only where their groups exist."""
    sharding, group = max(level, 1) if place.shard > 1 else 0, place.shard * place.context * place.tensor
    expert = gcd(place.expert, group) if sharding or place.expert == group else 1
    sequence = place.sequence_parallel and place.tensor > 1
    if (sharding, expert, sequence) == (place.sharding, place.expert, place.sequence_parallel):
        return place
    return dataclasses.replace(place, sharding=sharding, expert=expert, sequence_parallel=sequence)
