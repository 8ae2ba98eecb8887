"""Moves of a local search over strategies: from a draft to its neighbours, other schedules first, then at its bottleneck.

The moves are those of Aceso (Liu et al., EuroSys 2024) and more: blocks over a cut, stages merged and split, micro-batches,
schedule, degrees and level of one place or of all, devices between places and in and out of use, shares of unlike replicas.
Neighbours come without recomputation: each gets the least that fits (`rlplace.strategy.search.fit`), and `fit.other_choices`
improves that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from math import gcd
from typing import Any

from rlplace.plan.strategy import CONTEXT_METHODS, GATHER
from rlplace.strategy.drafts import Draft, Mesh, plain_draft
from rlplace.strategy.executor.evaluate import StepEvaluation
from rlplace.strategy.executor.meshes import spreads
from rlplace.strategy.search.chains import runs
from rlplace.strategy.search.shapes import Shares, chains, equal_shares, stage_order, unlike_shares
from rlplace.strategy.search.tries import SearchProblem

KINDS = ("schedule", "cut", "batch", "mesh", "devices")
"""Kinds of moves: another schedule or number of stages; blocks over a cut; another spread of the batch; other degrees or
levels; devices between places and in and out of use, places merged and split."""

Look = tuple[str, int]
"""Kind and host of a device: devices that have one are as good as each other."""

Places = tuple[Mesh, ...]

_SHIFTS = (1, 2, 4)
_PRIMES = (2, 3, 5, 7)


class Moves:
    """The moves of one problem."""

    def __init__(self, problem: SearchProblem) -> None:
        self._problem, self._balance = problem, problem.balance
        cluster = problem.cluster
        self._looks = [(cluster.kinds[device].name, cluster.hosts[device]) for device in range(cluster.num_devices)]

    def neighbours(self, draft: Draft, seen: StepEvaluation) -> Iterator[Draft]:
        """Yields drafts that differ by one move and process the same batch, without recomputation and offload.

        `seen` is the evaluation of the draft: moves at its bottleneck come first.
        """
        return (other for _, some in self.of_kinds(draft, seen) for other in some)

    def of_kinds(self, draft: Draft, seen: StepEvaluation) -> Iterator[tuple[str, Iterator[Draft]]]:
        """Yields `neighbours` in parts, each after the kind of its moves, one of `KINDS`; they are made on demand."""
        return ((kind, filter(_scheduled, some)) for kind, some in self._of_kinds(draft, seen))

    def _of_kinds(self, draft: Draft, seen: StepEvaluation) -> Iterator[tuple[str, Iterator[Draft]]]:
        blank = bytes(draft.bounds[-1])
        draft = dataclasses.replace(draft, recompute=blank, offload=blank)
        yield "schedule", self._other_schedules(draft)
        yield "cut", _shift_blocks(draft, seen.bottleneck)
        yield "batch", self._other_batches(draft)
        worst = draft.place_of_stage[seen.bottleneck]
        near = sorted(range(len(draft.places)), key=lambda place: abs(place - worst))
        for number in near:
            for place in _other_axes(draft.places[number]):
                yield "mesh", self._with_places(draft, replaced(draft.places, {number: (place,)}))
        for changed in zip(*(_other_axes(place) for place in draft.places), strict=False):
            yield "mesh", self._with_places(draft, changed)
        usable = range(len(self._looks)) if self._problem.devices is None else self._problem.devices
        for places in moved_devices(draft.places, near, self._looks, usable):
            yield "devices", self._with_places(draft, places)

    def _other_batches(self, draft: Draft) -> Iterator[Draft]:
        """Yields other micro-batches, with the stages as they are and cut anew."""
        for sizes, counts in self._shares(draft, near=True):
            spread = dataclasses.replace(draft, microbatch=sizes, microbatches=counts)
            yield spread
            if draft.stages > 1 and all(self._balance.can_cut(place.cut(min(sizes))) for place in draft.places):
                bounds = self._balance.stages_on(draft.places, draft.place_of_stage, min(sizes)).bounds
                if bounds != draft.bounds:
                    yield dataclasses.replace(spread, bounds=bounds)

    def _other_schedules(self, draft: Draft) -> Iterator[Draft]:
        """Yields the same places under another schedule, or with more or fewer stages each."""
        if draft.stages == 1:
            return
        now = draft.schedule, draft.stages // len(draft.places)
        for chunks, name in chains(self._problem.space, len(draft.places), draft.bounds[-1]):
            order = stage_order(len(draft.places), name, chunks)
            size, bounds = min(draft.microbatch), draft.bounds
            if (name, chunks) == now or not all(self._balance.can_cut(place.cut(size)) for place in draft.places):
                continue
            if order != draft.place_of_stage:
                bounds = self._balance.stages_on(draft.places, order, size).bounds
            yield dataclasses.replace(draft, place_of_stage=order, bounds=bounds, schedule=name)

    def _with_places(self, draft: Draft, places: Sequence[Mesh]) -> Iterator[Draft]:
        """Yields the draft with other places: micro-batches as large as they were where that divides, and stages cut anew."""
        degree, blocks = max(place.data_degree for place in places), draft.bounds[-1]
        if any(degree % place.data_degree for place in places) or len(places) > blocks:
            return
        level = max(places[0].sharding, draft.places[0].sharding) if len(places) == 1 else 1
        places, size = [at_level(place, level) for place in places], min(draft.microbatch)
        if not all(self._balance.can_cut(place.cut(size)) for place in places):
            return
        count = draft.batch // size // degree
        for chunks, schedule in self._chains(draft, len(places)):
            order = stage_order(len(places), schedule, chunks)
            cuts = {self._balance.stages_on(places, order, size).bounds: None}
            if order == draft.place_of_stage:
                cuts[draft.bounds] = None
            for bounds in cuts:
                made = plain_draft(bounds, places, order, microbatch=(size,), microbatches=(count,), schedule=schedule)
                for sizes, counts in self._shares(made, near=False):
                    yield dataclasses.replace(made, microbatch=sizes, microbatches=counts)

    def _chains(self, draft: Draft, places: int) -> list[tuple[int, str | None]]:
        """Returns stages a place, as many as before or as many in all, under the same schedule; else the first possible."""
        possible = list(chains(self._problem.space, places, draft.bounds[-1]))
        as_before = {draft.stages // len(draft.places), -(-draft.stages // places)}
        same = [one for one in possible if one[0] in as_before and one[1] == draft.schedule]
        return same or possible[:1]

    def _shares(self, draft: Draft, near: bool) -> Iterator[Shares]:
        """Yields shares of the batch within a factor of two of the micro-batch size, or the nearest of each form."""
        problem, degree = self._problem, draft.data_degree
        now = (draft.microbatch, draft.microbatches)
        size = sum(draft.microbatch) / len(draft.microbatch)
        forms = [list(equal_shares(problem.batch, degree, problem.space, every=True))]
        if all(place.data_degree == degree for place in draft.places):
            pace_s = self._balance.replicas_s(draft) * (size / draft.shares[0][0])
            lockstep = any(place.sharding > 1 for place in draft.places)
            unlike = list(unlike_shares(problem.batch, pace_s, problem.space, lockstep))
            forms += [[one for one in unlike if len(one[0]) > 1], [one for one in unlike if len(one[0]) == 1]]
        for form in forms:
            off = [max((q := sum(sizes) / len(sizes) / size), 1 / q) for sizes, _ in form]
            if near:
                yield from (one for one, far in zip(form, off, strict=True) if one != now and far <= 2.01)
            else:
                nearest = sorted(range(len(form)), key=lambda one: off[one])
                yield from (form[one] for one in nearest[: 2 if form is forms[0] else 1])
        if near and len(set(draft.microbatch)) > 1:
            yield from ((sizes, draft.microbatches) for sizes in _one_less(draft.microbatch))
        if near and len(set(draft.microbatches)) > 1:
            yield from ((draft.microbatch, counts) for counts in _one_less(draft.microbatches))


def _scheduled(draft: Draft) -> bool:
    """Returns whether the schedule runs so many micro-batches on so many stages."""
    return runs(draft.schedule, len(draft.places), draft.stages // len(draft.places), min(draft.microbatches))


def _shift_blocks(draft: Draft, bottleneck: int) -> Iterator[Draft]:
    """Yields drafts with blocks moved over one cut, away from the bottleneck first, then over cuts ever farther away."""
    cuts = range(1, draft.stages)
    for cut in sorted(cuts, key=lambda cut: min(abs(cut - bottleneck), abs(cut - bottleneck - 1))):
        away = 1 if cut == bottleneck else -1
        for step in _SHIFTS:
            for way in (away, -away):
                place = draft.bounds[cut] + way * step
                if draft.bounds[cut - 1] < place < draft.bounds[cut + 1]:
                    yield dataclasses.replace(draft, bounds=(*draft.bounds[:cut], place, *draft.bounds[cut + 1 :]))


def _one_less(parts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yields one moved from the largest to each of the others that differ, and back."""
    most = parts.index(max(parts))
    for other in {part: index for index, part in enumerate(parts) if index != most}.values():
        for way in (-1, 1):
            changed = list(parts)
            changed[most] += way
            changed[other] -= way
            if min(changed) > 0:
                yield tuple(changed)


def _other_axes(place: Mesh) -> list[Mesh]:
    """Returns the same devices with a prime factor moved between degrees, or another expert degree, level, or sequence."""
    changed: list[Mesh] = []
    axes = ("replicate", "shard", "context", "tensor")
    for more in axes:
        for less in axes:
            for prime in _PRIMES:
                if more != less and getattr(place, less) % prime == 0:
                    sizes = {more: prime * getattr(place, more), less: getattr(place, less) // prime}
                    other = dataclasses.replace(place, **sizes, sequence_parallel=place.sequence_parallel or place.tensor == 1)
                    changed.append(at_level(other, max(place.sharding, 1)))
    experts = (1, 2 * place.expert, place.expert // 2, place.shard * place.context * place.tensor)
    changed += [dataclasses.replace(place, expert=degree) for degree in experts if degree]
    changed += [at_level(place, level) for level in (0, 1, 2, 3) if place.shard * place.context > 1]
    if place.context > 1:
        changed += [dataclasses.replace(place, context_method=method) for method in CONTEXT_METHODS]
    if place.tensor > 1:
        changed.append(dataclasses.replace(place, sequence_parallel=not place.sequence_parallel))
    return list(dict.fromkeys(one for one in changed if one != place and spreads(one)))


def moved_devices(places: Places, near: Sequence[int], looks: Sequence[Look], usable: Sequence[int]) -> Iterator[Places]:
    """Yields places that exchange devices, merge, split, leave devices out or take unused ones.

    Args:
        places: Places of a draft.
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
    """Yields places of which two exchange all devices or one of each look, or one gives a device to the other."""
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
                    swapped = [tuple({mine: theirs, theirs: mine}.get(d, d) for d in place.devices) for place in (a, b)]
                    yield replaced(places, {one: (_on(a, swapped[0]),), other: (_on(b, swapped[1]),)})
    if len(a.devices) > 1:
        for mine in of_a.values():
            for less in _resized(a, tuple(d for d in a.devices if d != mine)):
                for more in _resized(b, (*b.devices, mine)):
                    yield replaced(places, {one: (less,), other: (more,)})


def _reordered(places: Places, one: int, looks: Sequence[Look]) -> Iterator[Places]:
    """Yields places with the devices of one by host and kind, or alternating between its groups, where they are unlike."""
    place = places[one]
    if len({looks[device] for device in place.devices}) > 1:
        ordered = tuple(sorted(place.devices, key=lambda device: (looks[device], device)))
        half = len(ordered) // 2
        dealt = tuple(d for pair in zip(ordered[:half], ordered[half:], strict=False) for d in pair) + ordered[2 * half :]
        for devices in (ordered, dealt):
            if devices != place.devices:
                yield replaced(places, {one: (_on(place, devices),)})


def _resized(place: Mesh, devices: tuple[int, ...]) -> list[Mesh]:
    """Returns the place on more or fewer devices: tensor groups as they were where that divides, or as much wider."""
    tensor, (times, rest) = gcd(place.tensor, len(devices)), divmod(len(devices), len(place.devices))
    context = gcd(place.context, len(devices) // tensor)
    data = len(devices) // (tensor * context)
    grown = [(data // place.shard, place.shard)] if data % place.shard == 0 else []
    ways = dict.fromkeys([*grown, *([(1, data), (data, 1)] if place.sharding else [(data, 1), (1, data)])])
    found = [dataclasses.replace(place, devices=devices, replicate=r, shard=s, context=context, tensor=tensor) for r, s in ways]
    if times > 1 and not rest:
        found.append(dataclasses.replace(place, devices=devices, tensor=times * place.tensor, sequence_parallel=True))
    return [at_level(one, max(place.sharding, 1)) for one in found]


def _split(place: Mesh) -> Iterator[tuple[Mesh, Mesh]]:
    """Yields a place as two of half the devices, with half of one degree."""
    half = len(place.devices) // 2
    for axis in ("replicate", "shard", "context", "tensor"):
        if getattr(place, axis) % 2 == 0:
            part = dataclasses.replace(place, devices=place.devices[:half], **{axis: getattr(place, axis) // 2})
            yield at_level(part, 1), at_level(_on(part, place.devices[half:]), 1)


def _on(place: Mesh, devices: tuple[int, ...]) -> Mesh:
    """Returns the place on other devices."""
    return dataclasses.replace(place, devices=devices)


def replaced(places: Places, changed: dict[int, Places]) -> Places:
    """Returns the places with some of them replaced, each by one or more."""
    return tuple(new for number, old in enumerate(places) for new in changed.get(number, (old,)))


def at_level(place: Mesh, level: int) -> Mesh:
    """Returns the place with a level, sequence parallelism, spread experts and divided tables where groups for them exist."""
    sharding, group = max(level, int(place.shard > 1)), place.shard * place.context * place.tensor
    sharding = sharding if place.shard * place.context > 1 else 0
    expert = gcd(place.expert, group) if sharding or place.expert == group else 1
    sequence = place.sequence_parallel and place.tensor > 1
    method = place.context_method if place.context > 1 else GATHER
    tables = place.data_degree if place.tables > 1 and place.context * place.tensor * expert == 1 else 1
    made: dict[str, Any] = {
        "sharding": sharding,
        "expert": expert,
        "sequence_parallel": sequence,
        "context_method": method,
        "tables": tables,
    }
    return place if all(getattr(place, key) == value for key, value in made.items()) else dataclasses.replace(place, **made)
