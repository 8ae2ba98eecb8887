"""Moves of a local search over strategies: from a draft to its neighbours, those that relieve its bottleneck first.

The moves are those of Aceso (Liu et al., EuroSys 2024) and more: blocks over a cut, micro-batch, schedule, degrees and level of
one place or of all, devices between places, shares of unlike replicas. How much is recomputed is no move: every neighbour gets
the least that fits (`rlplace.strategy.fit`), so neighbours come without any.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from rlplace.schedule import PIPELINE_SCHEDULES
from rlplace.strategy.cuts import Balance
from rlplace.strategy.drafts import Draft, Place
from rlplace.strategy.evaluation import Evaluation
from rlplace.strategy.meshes import spreads

_SHIFTS = (1, 2, 4)


def neighbours(draft: Draft, seen: Evaluation, balance: Balance) -> Iterator[Draft]:
    """Drafts that differ by one move, without recomputation and offload; some may contradict themselves.

    Args:
        draft: Where the search is.
        seen: What the executor says about it: its bottleneck comes first.
        balance: Cuts stages anew where places change.
    """
    blank = bytes(draft.bounds[-1])
    draft = dataclasses.replace(draft, recompute=blank, offload=blank)
    yield from _shift_blocks(draft, seen.bottleneck)
    yield from _other_microbatches(draft)
    yield from _other_schedules(draft)
    worst = draft.place_of_stage[seen.bottleneck]
    for number in sorted(range(len(draft.places)), key=lambda place: abs(place - worst)):
        for place in _other_axes(draft.places[number]):
            yield from _with_places(draft, balance, {number: place})
    for changed in zip(*(_other_axes(place) for place in draft.places), strict=False):
        yield from _with_places(draft, balance, dict(enumerate(changed)))
    yield from _moved_devices(draft, balance)
    yield from _shares(draft, balance)


def _shift_blocks(draft: Draft, bottleneck: int) -> Iterator[Draft]:
    """Blocks over one cut, away from the bottleneck first, then over cuts ever farther away."""
    cuts = range(1, draft.stages)
    for cut in sorted(cuts, key=lambda cut: min(abs(cut - bottleneck), abs(cut - bottleneck - 1))):
        away = 1 if cut == bottleneck else -1
        for step in _SHIFTS:
            for way in (away, -away):
                place = draft.bounds[cut] + way * step
                if draft.bounds[cut - 1] < place < draft.bounds[cut + 1]:
                    yield dataclasses.replace(draft, bounds=(*draft.bounds[:cut], place, *draft.bounds[cut + 1 :]))


def _other_microbatches(draft: Draft) -> Iterator[Draft]:
    """Twice or half as many micro-batches of half or twice the size."""
    if all(size % 2 == 0 for size in draft.microbatch):
        sizes, counts = tuple(n // 2 for n in draft.microbatch), tuple(2 * n for n in draft.microbatches)
        yield dataclasses.replace(draft, microbatch=sizes, microbatches=counts)
    if all(count % 2 == 0 for count in draft.microbatches):
        sizes, counts = tuple(2 * n for n in draft.microbatch), tuple(n // 2 for n in draft.microbatches)
        yield dataclasses.replace(draft, microbatch=sizes, microbatches=counts)


def _other_schedules(draft: Draft) -> Iterator[Draft]:
    """The same stages under another schedule."""
    if draft.stages > 1:
        for name in PIPELINE_SCHEDULES:
            if name != draft.schedule:
                yield dataclasses.replace(draft, schedule=name)


def _other_axes(place: Place) -> list[Place]:
    """The same devices with one degree twice as large and another half, another expert degree, or another level."""
    changed: list[Place] = []
    axes = ("replicate", "shard", "context", "tensor")
    for more in axes:
        for less in axes:
            if more != less and getattr(place, less) % 2 == 0:
                sizes = {more: 2 * getattr(place, more), less: getattr(place, less) // 2}
                other = dataclasses.replace(place, **sizes)
                level = 0 if other.shard == 1 else max(place.sharding, 1)
                changed.append(dataclasses.replace(other, sharding=level, sequence_parallel=other.tensor > 1))
    changed += [dataclasses.replace(place, expert=degree) for degree in (2 * place.expert, place.expert // 2) if degree]
    if place.shard > 1:
        changed += [dataclasses.replace(place, sharding=level) for level in (1, 2, 3) if level != place.sharding]
    return [place for place in changed if spreads(place)]


def _with_places(draft: Draft, balance: Balance, changed: dict[int, Place]) -> Iterator[Draft]:
    """The draft with other places, its micro-batch size kept where their number of replicas allows, its stages cut anew.

    Nothing where a pass cannot be cut like that.
    """
    places = tuple(changed.get(number, place) for number, place in enumerate(draft.places))
    degree = max(place.data_degree for place in places)
    share, size = draft.batch // degree, min(draft.microbatch)
    size = next((n for n in range(size, 0, -1) if share % n == 0), 1)
    count = max(share // size, 1)
    if all(balance.can_cut(place.cut(size)) for place in places):
        bounds = balance.stages_on(places, draft.place_of_stage, size).bounds
        yield dataclasses.replace(draft, places=places, bounds=bounds, microbatch=(size,), microbatches=(count,))


def _moved_devices(draft: Draft, balance: Balance) -> Iterator[Draft]:
    """Two places exchange their devices; a place is left out, or all devices of its replicas but one half."""
    count = len(draft.places)
    for one in range(count):
        for other in range(one + 1, count):
            a, b = draft.places[one], draft.places[other]
            if len(a.devices) == len(b.devices):
                swapped = {one: dataclasses.replace(a, devices=b.devices), other: dataclasses.replace(b, devices=a.devices)}
                yield from _with_places(draft, balance, swapped)
    if count > 1 and draft.stages == count:
        for gone in range(count):
            places = tuple(place for number, place in enumerate(draft.places) if number != gone)
            order = tuple(range(count - 1))
            bounds = balance.stages_on(places, order, min(draft.microbatch)).bounds
            schedule = draft.schedule if count > 2 else None
            yield dataclasses.replace(draft, places=places, place_of_stage=order, bounds=bounds, schedule=schedule)
    for number, place in enumerate(draft.places):
        if place.replicate % 2 == 0:
            half = dataclasses.replace(place, devices=place.devices[: len(place.devices) // 2], replicate=place.replicate // 2)
            yield from _with_places(draft, balance, {number: half})


def _shares(draft: Draft, balance: Balance) -> Iterator[Draft]:
    """Replicas of unlike speed get samples in proportion to it: larger micro-batches, or more of them."""
    degree = draft.data_degree
    if degree == 1 or any(place.data_degree != degree for place in draft.places):
        return
    pace = np.array([balance.replica_s(draft, replica) for replica in range(degree)])
    if np.ptp(pace) < 1e-9 * pace.max():
        return
    count, sizes = min(draft.microbatches), _proportional(1 / pace, draft.batch // min(draft.microbatches))
    if sizes is not None and draft.batch % count == 0:
        yield dataclasses.replace(draft, microbatch=sizes, microbatches=(count,))
    size = min(draft.microbatch)
    if draft.batch % size == 0 and all(place.sharding < 2 for place in draft.places):
        counts = _proportional(1 / pace, draft.batch // size)
        if counts is not None:
            yield dataclasses.replace(draft, microbatch=(size,), microbatches=counts)


def _proportional(weights: np.ndarray, total: int) -> tuple[int, ...] | None:
    """Whole numbers from 1 up in proportion to weights, that add up to `total`; None where there are too few."""
    if total < len(weights):
        return None
    exact = weights / weights.sum() * total
    parts = np.maximum(np.floor(exact), 1).astype(np.int64)
    while (rest := total - int(parts.sum())) != 0:
        gain = exact - parts
        at = int(np.argmax(gain)) if rest > 0 else int(np.argmin(np.where(parts > 1, gain, np.inf)))
        parts[at] += 1 if rest > 0 else -1
    return tuple(parts.tolist())
