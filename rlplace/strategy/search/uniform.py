"""Uniform strategies: every place has the same axes, every block the same choices; stages are balanced by their time.

For each set of devices (all, those of some kinds, the first few of them), number of places and stages, degrees, level,
micro-batch and schedule there is one draft, the division of most configuration files; `rlplace.strategy.search.fit` finds its
recomputation. Each has a bound, which no draft of it can beat, and an estimate of its step with the recomputation that memory
asks for. Those that may fit come first, the lowest estimate before others; a bound above the best so far excludes a strategy.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from rlplace.cluster.tiers import common_depth
from rlplace.plan.strategy import CONTEXT_METHODS
from rlplace.strategy.costs import RECOMPUTE, Floats
from rlplace.strategy.drafts import Devices, Draft, Mesh, array_of, kind_named, plain_draft
from rlplace.strategy.executor.meshes import Border
from rlplace.strategy.executor.rules import SLOWDOWN
from rlplace.strategy.search.chains import Chains, all_in_flight, chains_on, runs
from rlplace.strategy.search.cuts import Balance
from rlplace.strategy.search.shapes import Degrees, Forms, Shape, device_sets, divisions, equal_shares, unlike_shares
from rlplace.strategy.search.space import Space
from rlplace.strategy.search.tries import SearchProblem

MOST_UNEVEN = 8
"""Like replicas among which a batch that does not divide is shared all the same."""


class Option(NamedTuple):
    """A uniform strategy.

    Attributes:
        shape: Everything but its micro-batches.
        sizes: Samples of a micro-batch, as in drafts; so is `counts`.
        counts: Micro-batches of a replica.
        bound_s: Seconds of compute that it cannot beat.
        expected_s: Estimate of its seconds.
        short_bytes: Estimate of bytes missing on a device where blocks recompute as much as they may and nothing is offloaded;
            below 0 where there is room.
    """

    shape: Shape
    sizes: tuple[int, ...]
    counts: tuple[int, ...]
    bound_s: float
    expected_s: float
    short_bytes: float

    def key(self) -> tuple[float, float]:
        """Returns its place in the order of tries."""
        return max(self.short_bytes, 0.0), self.expected_s

    def draft(self, balance: Balance) -> Draft:
        """Returns it with places and balanced stages, without recomputation."""
        return _draft(self.shape, self.sizes, self.counts, balance)


class _Spread(NamedTuple):
    """A batch spread over replicas and micro-batches, as in drafts.

    Attributes:
        sizes: As in drafts; so is `counts`.
        counts: Micro-batches.
        bounds: int64 [G, S + 1], first blocks of the stages of each order.
        taken_s: float64 [G, S], ops of a micro-batch on each stage.
        bound_s: float64 [O], see `Option.bound_s`.
    """

    sizes: tuple[int, ...]
    counts: tuple[int, ...]
    bounds: NDArray[np.int64]
    taken_s: Floats
    bound_s: Floats


class Division(NamedTuple):
    """A way to divide devices.

    Attributes:
        devices: In the order in which places take them.
        places: Number of places.
        axes: Mesh of every place, without its devices.
    """

    devices: tuple[int, ...]
    places: int
    axes: Mesh

    @property
    def kind(self) -> str:
        """Its kind, see `kind_of`."""
        return kind_named(self.places, [self.axes])


class UniformOptions:
    """The uniform strategies of one problem; what they have in common is computed once."""

    def __init__(self, problem: SearchProblem) -> None:
        self._problem, self._balance = dataclasses.replace(problem, space=_runnable(problem)), problem.balance
        self._spreads: dict[object, list[_Spread]] = {}
        self._sums: dict[object, tuple[Floats, float]] = {}
        self._ways: dict[object, Floats] = {}
        self._rooms: dict[object, tuple[Floats, Floats]] = {}

    def every(self) -> Iterator[Option]:
        """Yields every one, whether it fits or not."""
        for devices in device_sets(self._problem):
            for degrees, forms in self.divisions(devices).items():
                for axes in itertools.chain.from_iterable(forms):
                    yield from self.of(Division(devices, degrees.places, axes))

    def divisions(self, devices: tuple[int, ...]) -> Mapping[Degrees, Forms]:
        """Returns the ways to divide a set of devices."""
        return divisions(self._problem, devices)

    def of(self, division: Division) -> Iterator[Option]:
        """Yields options for each way to spread the batch over replicas and micro-batches, and to run the chain."""
        devices, places, axes = division
        chain = chains_on(self._problem.space, places, len(self._problem.costs.names))
        if not chain.names:
            return
        key = (devices, places, axes.data_degree, axes.cut(1), axes.sharding > 1)
        if key not in self._spreads:
            known = self._spreads[key] = list(self._equal(devices, places, axes, chain))
            known += self._unlike(devices, places, axes, chain)
        shapes = [Shape(devices, places, chunks, axes, schedule) for chunks, schedule in chain.names]
        for spread in self._spreads[key]:
            ways = [way for way, (chunks, name) in enumerate(chain.names) if runs(name, places, chunks, min(spread.counts))]
            if not ways:
                continue
            found = spread.bound_s, *self._estimate(devices, places, axes, chain, spread)
            bound_s, expected_s, short = (values.tolist() for values in found)
            for way in ways:
                yield Option(shapes[way], spread.sizes, spread.counts, bound_s[way], expected_s[way], short[way])

    def _estimate(
        self, devices: tuple[int, ...], places: int, axes: Mesh, chain: Chains, spread: _Spread
    ) -> tuple[Floats, Floats]:
        """Returns `Option.expected_s` and `Option.short_bytes`, float64 [O] each.

        A step is all micro-batches on the slowest place, what it waits for others at the beginning and the end, stage
        transfers, the update, and what is exchanged: hidden behind the passes of a single stage, exposed in a pipeline.
        """
        size, count = max(spread.sizes), max(spread.counts)
        kinds, width = self._balance.kinds(devices, places), len(devices) // places
        unlike = list(dict.fromkeys(kinds))
        kind = np.array([unlike.index(own) for own in kinds])
        first = [width * kinds.index(own) for own in unlike]
        found = [
            [
                self._running(devices[start : start + width], places > 1, axes, size, count, bool(splits))
                for splits in range(1 + chain.splits.max())
            ]
            for start in first
        ]
        sums = np.array([[rows for rows, _ in own] for own in found])[..., spread.bounds]
        parts = sums[..., 1:] - sums[..., :-1]  # [kinds, splits, 7, G, S]
        of_stage, stages = kind[chain.holds.argmax(axis=2)], np.arange(parts.shape[-1])
        parts = parts[of_stage, chain.splits[:, None], :, chain.order[:, None], stages].swapaxes(1, 2)  # [O, 7, S]
        parts[:, 1:3] *= all_in_flight(chain.names, places, count)[:, None]
        held, kept, spare, again_s, inside_s, exchanged_s, update_s = np.moveaxis(parts @ chain.holds, 1, 0)  # [O, P] each
        room = self._room(devices, places)[len(spread.sizes) > 1]
        working = np.array([[size_bytes for _, size_bytes in own] for own in found])
        short = held + kept + working[kind, chain.splits[:, None]] - room
        again_s = again_s * np.clip(short / np.maximum(spare, 1.0), 0.0, 1.0)
        pass_s = (spread.taken_s[chain.order][:, None] @ chain.holds)[:, 0] + again_s + inside_s
        slowest_s, exchanged_s = pass_s.max(axis=1), exchanged_s.max(axis=1)
        passes_s = count * slowest_s + chain.unfilled * (pass_s.sum(axis=1) - slowest_s)
        if places > 1:
            sent_s = self._handed_over_s(devices, places, axes, size, spread.bounds)[chain.order]  # [O, S - 1]
            into_s = np.zeros(spread.taken_s[chain.order].shape)  # values and gradients of a stage
            into_s[:, 1:] += sent_s
            into_s[:, :-1] += sent_s
            busy_s = (into_s[:, None] @ chain.holds).max(axis=(1, 2))  # by the links of one place
            passes_s = np.maximum(passes_s + chain.waits * count * sent_s.max(axis=1), count * busy_s) + 2 * sent_s.sum(axis=1)
            step_s = passes_s + exchanged_s
        else:
            exchanged_s = exchanged_s * {2: (1 + count) / 2, 3: 1.5 * count}.get(axes.sharding, 1)
            step_s = np.maximum(passes_s, exchanged_s) + SLOWDOWN * np.minimum(passes_s, exchanged_s)
        return np.maximum(step_s + update_s.max(axis=1), spread.bound_s), (short - spare).max(axis=1)

    def _handed_over_s(self, devices: tuple[int, ...], places: int, axes: Mesh, size: int, bounds: NDArray[np.int64]) -> Floats:
        """Returns float64 [G, S - 1], seconds in which a micro-batch crosses each border; from place to place around the loop.

        Borders between like kinds, that cross the same tiers, are as fast as the first of them, back to the first place as the
        slowest.
        """
        key = devices, places
        if key not in self._ways:
            parts = array_of(devices).reshape(places, -1)
            seats, kinds = self._problem.cluster.seats[parts[:, [0, -1]]], self._balance.kind[parts[:, 0]]
            together = common_depth(seats[:-1], seats[1:]).min(axis=1)
            looks = np.stack([together, kinds[:-1], kinds[1:]], axis=1)
            _, firsts, look = np.unique(looks, axis=0, return_index=True, return_inverse=True)
            ends = {at: Devices(parts[at].tolist()) for first in firsts.tolist() for at in (first, first + 1)}
            pairs = {(at, at + 1): Border(ends[at], ends[at + 1], 1.0) for at in firsts.tolist()}
            ways = self._problem.scores.traffic.ways(pairs).values()
            found = np.array([(way.latency_s, way.s_per_byte) for way in ways])
            self._ways[key] = np.concatenate([found[look.ravel()], found.max(axis=0, keepdims=True)]).T
        latency_s, s_per_byte = self._ways[key][:, np.arange(bounds.shape[1] - 2) % places]
        kind = min(self._balance.kinds(devices, 1)[0])
        sent = self._problem.costs.passes(kind, axes.cut(size)).sent_bytes
        inner = bounds[:, 1:-1]
        crossing = (inner > 0) & (inner < bounds[:, -1:])  # further stages are empty
        return np.where(crossing, latency_s + s_per_byte * sent[np.maximum(inner, 1) - 1], 0.0)

    def _running(
        self, devices: tuple[int, ...], pipeline: bool, axes: Mesh, size: int, count: int, splits: bool
    ) -> tuple[Floats, float]:
        """Returns running sums over blocks, float64 [7, B + 1], and working bytes of a pass, on the devices of a place.

        Bytes held all step, kept of a micro-batch, of these saved by recomputation; seconds of a micro-batch for that, and for
        collectives inside blocks; seconds to exchange weights (of one stage) and gradients once, and to update.
        """
        key = axes, self._balance.kinds(devices, 1)[0], size, pipeline, count > 1, splits
        if key not in self._sums:
            mesh = dataclasses.replace(axes, devices=devices)
            words = [number for number, word in enumerate(RECOMPUTE) if self._problem.space.allows("recompute", word)] or [0]
            x = self._problem.scores.packer.all_blocks(mesh, size, 1 + pipeline, count, [(number, 0) for number in words])
            kept = x.kept_bytes
            if splits:  # a micro-batch is held until its gradients of weights are there
                kept = np.maximum(kept, x.halved_bytes.min(axis=0))
            least = kept.argmin(axis=0), np.arange(kept.shape[1])
            again_s = (x.again_s + x.weight_tensor_s) * (1 + splits)
            inside_s = x.forward_tensor_s + x.backward_tensor_s - x.weight_tensor_s
            rows = [
                x.static_bytes[0],
                kept[0],
                kept[0] - kept[least],
                again_s[least] - again_s[0],
                inside_s[0],
                x.reduce_s[0] + x.copies_s[0] + (0.0 if pipeline else x.gather_s[0]),  # else beside the first passes
                x.update_s[0],
            ]
            running = np.zeros((len(rows), len(rows[0]) + 1))
            np.cumsum(rows, axis=1, out=running[:, 1:])
            self._sums[key] = running, float(x.working_backward_bytes.min(axis=0).max())
        return self._sums[key]

    def _room(self, devices: tuple[int, ...], places: int) -> tuple[Floats, Floats]:
        """Returns float64 [P], bytes of the smallest device of every place, and of the largest."""
        key = devices, places
        if key not in self._rooms:
            rooms = self._problem.room_bytes[array_of(devices)].reshape(places, -1)
            self._rooms[key] = rooms.min(axis=1), rooms.max(axis=1)
        return self._rooms[key]

    def _equal(self, devices: tuple[int, ...], places: int, axes: Mesh, chain: Chains) -> Iterator[_Spread]:
        """Yields spreads with all replicas alike, up to the first whose passes no device has room for."""
        problem, balance = self._problem, self._balance
        kinds, too_large = balance.kinds(devices, places), False
        for sizes, counts in equal_shares(problem.batch, axes.data_degree, problem.space):
            if sizes[0] > 1 and axes.context > 1 and problem.space.context is None:
                continue  # more replicas of fewer samples exchange less
            if not balance.can_cut(axes.cut(sizes[0])):
                continue
            if too_large:
                return
            first = devices[: len(devices) // places]
            _, working_bytes = self._running(first, places > 1, axes, sizes[0], counts[0], splits=False)
            too_large = working_bytes > self._room(devices, places)[1].max()
            stages = [balance.stages(kinds, axes.cut(sizes[0]), order) for order in chain.orders]
            total_s, paced_s = np.array([(one.total_s, one.paced_s(counts[0])) for one in stages])[chain.order].T
            # In a chain the first micro-batch passes all stages, and the slowest place sets the pace; gradients of weights,
            # less than two thirds of a backward, may fill that time.
            first_s = np.where(chain.splits, 0.5, 1.0) * total_s
            paced_s = np.where(chain.alone & (chain.splits == 0), paced_s, counts[0] * total_s / places)
            bounds, taken_s = _padded([one.bounds for one in stages], [one.taken_s for one in stages])
            yield _Spread(sizes, counts, bounds, taken_s, np.maximum(first_s, paced_s))

    def _unlike(self, devices: tuple[int, ...], places: int, axes: Mesh, chain: Chains) -> Iterator[_Spread]:
        """Yields spreads for unlike devices, and for few replicas among which the batch does not divide."""
        problem, balance = self._problem, self._balance
        degree = axes.data_degree
        unlike = places == 1 and len(balance.kinds(devices, 1)[0]) > 1  # stages of mixed devices are seldom worth their prices
        uneven = problem.batch % degree and degree <= MOST_UNEVEN
        size = max(1, problem.batch // degree)
        if degree == 1 or axes.context > 1 or not (unlike or uneven) or not balance.can_cut(axes.cut(size)):
            return
        chunks, schedule = chain.names[0]
        plain = _draft(Shape(devices, places, chunks, axes, schedule), (size,), (1,), balance)
        kinds, pace_s = balance.kinds(devices, places), balance.replicas_s(plain)
        for sizes, counts in unlike_shares(problem.batch, pace_s, problem.space, axes.sharding > 1):
            if all(balance.can_cut(axes.cut(size)) for size in set(sizes)):
                stages = [balance.stages(kinds, axes.cut(min(sizes)), order) for order in chain.orders]
                bounds, taken_s = _padded([one.bounds for one in stages], [one.taken_s for one in stages])
                if unlike:  # every replica at its own pace
                    taken_s = np.full((1, 1), (pace_s / size * np.array(sizes) * np.array(counts)).max() / max(counts))
                else:
                    taken_s = taken_s * max(sizes) / min(sizes)
                bound_s = (self._least_s(devices, axes, sizes) * np.array(counts)).max() / places
                yield _Spread(sizes, counts, bounds, taken_s, np.full(len(chain.names), bound_s))

    def _least_s(self, devices: tuple[int, ...], axes: Mesh, sizes: tuple[int, ...]) -> Floats:
        """Returns float64 [D], seconds of a micro-batch of each replica, or [1], were its blocks where they are quickest."""
        kinds = frozenset().union(*self._balance.kinds(devices, 1))
        least = {size: [self._balance.pass_s(frozenset({kind}), axes.cut(size)) for kind in kinds] for size in set(sizes)}
        return np.array([np.min(least[size], axis=0).sum() for size in sizes])


def _padded(bounds: Sequence[tuple[int, ...]], taken_s: Sequence[tuple[float, ...]]) -> tuple[NDArray[np.int64], Floats]:
    """Returns bounds of unlike numbers of stages, int64 [G, S + 1], and their times, [G, S]: further stages are empty."""
    most = max(map(len, bounds))
    return (
        np.array([[*own, *[own[-1]] * (most - len(own))] for own in bounds], dtype=np.int64),
        np.array([[*own, *[0.0] * (most - 1 - len(own))] for own in taken_s]),
    )


def _draft(shape: Shape, sizes: tuple[int, ...], counts: tuple[int, ...], balance: Balance) -> Draft:
    width = len(shape.devices) // shape.places
    starts = range(0, len(shape.devices), width)
    places = [dataclasses.replace(shape.axes, devices=shape.devices[start : start + width]) for start in starts]
    order = shape.order
    bounds = balance.stages(balance.kinds(shape.devices, shape.places), shape.axes.cut(min(sizes)), order).bounds
    return plain_draft(bounds, places, order, microbatch=sizes, microbatches=counts, schedule=shape.schedule)


def _runnable(problem: SearchProblem) -> Space:
    """Returns the space, without axes that it leaves open and the engine refuses in any strategy."""
    meshes = {
        "none": Mesh((0, 1), replicate=2),
        "context": Mesh((0, 1), context=2),
        "expert": Mesh((0, 1), shard=2, expert=2, sharding=1),
        "tables": Mesh((0, 1), replicate=2, tables=2),
    }
    drafts = {axis: plain_draft((0, len(problem.costs.names)), [mesh]) for axis, mesh in meshes.items()}
    closed: dict[str, tuple[Any, ...]] = {}
    if problem.why_not is not None and problem.why_not(drafts.pop("none")) is None:
        refused = [axis for axis, draft in drafts.items() if problem.why_not(draft) is not None]
        closed = {axis: (1,) for axis in refused if getattr(problem.space, axis) is None}
        if "context" not in refused and problem.space.context_method is None:
            ways = {method: dataclasses.replace(meshes["context"], context_method=method) for method in CONTEXT_METHODS}
            made = {method: plain_draft((0, len(problem.costs.names)), [mesh]) for method, mesh in ways.items()}
            closed["context_method"] = tuple(way for way, draft in made.items() if problem.why_not(draft) is None)
    return msgspec.structs.replace(problem.space, **closed)
