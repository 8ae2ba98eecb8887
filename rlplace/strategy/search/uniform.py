"""Uniform strategies: every place has the same axes, every block the same choices; stages are balanced by their time.

For each set of devices (all, those of some kinds, the first few of them), number of places and stages, degrees, level,
micro-batch and schedule there is one draft, the form of most configuration files; `rlplace.strategy.search.fit` finds its
recomputation. Each has a bound, which no draft of it can beat, and an estimate of its step with the recomputation that memory
asks for. Those that may fit come first, the lowest estimate before others; a bound above the best so far excludes a strategy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
import numpy as np

from rlplace.plan.strategy import CONTEXT_METHODS
from rlplace.strategy.costs import RECOMPUTE, Floats
from rlplace.strategy.drafts import KINDS, Draft, Mesh, plain_draft
from rlplace.strategy.search.cuts import Balance
from rlplace.strategy.search.fit import fitted, in_flight
from rlplace.strategy.search.shapes import Shape, device_sets, equal_shares, shapes, unlike_shares
from rlplace.strategy.search.space import Space
from rlplace.strategy.search.tries import SearchProblem, Tried, Tries

MOST_UNEVEN = 8
"""Like replicas among which a batch that does not divide is shared all the same."""

FEW = 32
"""Devices of a cluster of which all sets are tried from the beginning."""

TURN = 3
"""Options by their estimates for each one by its family."""

RIVALS = 4
"""Drafts of every kind with one dimension that are evaluated before all others, so that a plan can name its rivals."""


@dataclass(frozen=True)
class Option:
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
    """A batch spread over replicas and micro-batches, as in drafts; first blocks of stages; see `Option.bound_s`."""

    sizes: tuple[int, ...]
    counts: tuple[int, ...]
    bounds: tuple[int, ...]
    bound_s: float


class UniformOptions:
    """The uniform strategies of one problem; what they have in common is computed once."""

    def __init__(self, problem: SearchProblem) -> None:
        self._problem, self._balance = dataclasses.replace(problem, space=_runnable(problem)), problem.balance
        self._spreads: dict[object, list[_Spread]] = {}
        self._sums: dict[object, tuple[Floats, float]] = {}
        self._rooms: dict[object, tuple[Floats, Floats]] = {}

    def every(self, sets: Iterable[tuple[int, ...]] | None = None, kinds: Collection[str] | None = None) -> Iterator[Option]:
        """Yields every one on these sets of devices and of these kinds (None: all), whether it fits or not."""
        problem = self._problem
        for devices in device_sets(problem.cluster) if sets is None else sets:
            if problem.devices is not None and not set(devices) <= set(problem.devices):
                continue
            for shape in shapes(problem, devices):
                if kinds is None or shape.kind in kinds:
                    yield from self._of(shape)

    def _of(self, shape: Shape) -> Iterator[Option]:
        """Yields one option for each way to spread the batch over a shape's replicas and micro-batches."""
        axes, order = shape.axes, shape.order
        key = (shape.devices, shape.places, axes.data_degree, axes.cut(1), order, shape.splits, axes.sharding > 1)
        if key not in self._spreads:
            self._spreads[key] = [*self._equal(shape, order), *self._unlike(shape)]
        for spread in self._spreads[key]:
            yield Option(shape, spread.sizes, spread.counts, spread.bound_s, *self._estimate(shape, spread, order))

    def _estimate(self, shape: Shape, spread: _Spread, order: tuple[int, ...]) -> tuple[float, float]:
        """Returns `Option.expected_s` and `Option.short_bytes`."""
        count = max(spread.counts)
        running, working = self._running(shape, spread)
        at = running[:, spread.bounds]
        parts = at[:, 1:] - at[:, :-1]
        parts[1:3] *= in_flight(shape.schedule, len(order), shape.places, count)
        if shape.chunks > 1:
            parts = parts @ _holds(order)
        held, kept, spare, again_s, inside_s, exchanged_s = parts
        short = held + kept + working - self._room(shape)[len(spread.sizes) > 1]
        again_s = again_s * np.minimum(np.maximum(short / np.maximum(spare, 1.0), 0.0), 1.0)
        passes_s = spread.bound_s + count * float((again_s + inside_s).max())
        times = {2: (1 + count) / 2, 3: 1.5 * count}.get(shape.axes.sharding, 1)
        return max(passes_s, times * float(exchanged_s.max())), float((short - spare).max())

    def _running(self, shape: Shape, spread: _Spread) -> tuple[Floats, float]:
        """Returns running sums over blocks, float64 [6, B + 1], and working bytes of a pass.

        Bytes held all step, kept of a micro-batch, of these saved by recomputation; seconds of a micro-batch for that, and for
        collectives inside blocks; seconds to exchange weights and gradients once.
        """
        size, count = max(spread.sizes), max(spread.counts)
        key = shape.axes, self._balance.kinds(shape.devices, shape.places)[0], size, shape.places > 1, count > 1, shape.splits
        if key not in self._sums:
            mesh = dataclasses.replace(shape.axes, devices=shape.devices[: len(shape.devices) // shape.places])
            words = [number for number, word in enumerate(RECOMPUTE) if self._problem.space.allows("recompute", word)] or [0]
            x = self._problem.scores.packer.all_blocks(mesh, size, shape.places, count, [(number, 0) for number in words])
            kept = x.kept_bytes
            if shape.splits:  # a micro-batch is held until its gradients of weights are there
                kept = np.maximum(kept, x.halved_bytes.min(axis=0))
            least = kept.argmin(axis=0), np.arange(kept.shape[1])
            again_s = (x.again_s + x.weight_tensor_s) * (1 + shape.splits)
            inside_s = x.forward_tensor_s + x.backward_tensor_s - x.weight_tensor_s
            rows = [
                x.static_bytes[0],
                kept[0],
                kept[0] - kept[least],
                again_s[least] - again_s[0],
                inside_s[0],
                x.exchange_s[0],
            ]
            running = np.cumsum(np.pad(rows, ((0, 0), (1, 0))), axis=1)
            self._sums[key] = running, float(x.working_backward_bytes.min(axis=0).max())
        return self._sums[key]

    def _room(self, shape: Shape) -> tuple[Floats, Floats]:
        """Returns float64 [P], bytes of the smallest device of every place, and of the largest."""
        key = shape.devices, shape.places
        if key not in self._rooms:
            rooms = np.array([self._problem.room_bytes[device] for device in shape.devices]).reshape(shape.places, -1)
            self._rooms[key] = rooms.min(axis=1), rooms.max(axis=1)
        return self._rooms[key]

    def _equal(self, shape: Shape, order: tuple[int, ...]) -> Iterator[_Spread]:
        """Yields spreads with all replicas alike."""
        problem, balance, axes = self._problem, self._balance, shape.axes
        kinds = balance.kinds(shape.devices, shape.places)
        for sizes, counts in equal_shares(problem.batch, axes.data_degree, problem.space):
            if sizes[0] > 1 and axes.context > 1 and problem.space.context is None:
                continue  # more replicas of fewer samples exchange less
            if not balance.can_cut(axes.cut(sizes[0])):
                continue
            stages = balance.stages(kinds, axes.cut(sizes[0]), order)
            # In a chain the first micro-batch passes all stages, and the slowest place sets the pace; gradients of weights,
            # less than two thirds of a backward, may fill that time.
            first_s = 0.5 * stages.total_s if shape.splits else stages.total_s
            paced_s = counts[0] * stages.total_s / shape.places
            if shape.chunks == 1 and not shape.splits:
                paced_s = stages.paced_s(counts[0])
            yield _Spread(sizes, counts, stages.bounds, max(first_s, paced_s))

    def _unlike(self, shape: Shape) -> Iterator[_Spread]:
        """Yields spreads for unlike devices, and for few replicas among which the batch does not divide."""
        problem, balance, axes = self._problem, self._balance, shape.axes
        degree = axes.data_degree
        unlike = any(len(own) > 1 for own in balance.kinds(shape.devices, shape.places))
        uneven = problem.batch % degree and degree <= MOST_UNEVEN
        size = max(1, problem.batch // degree)
        if degree == 1 or axes.context > 1 or not (unlike or uneven) or not balance.can_cut(axes.cut(size)):
            return
        pace_s = balance.replicas_s(_draft(shape, (size,), (1,), balance))
        for sizes, counts in unlike_shares(problem.batch, pace_s, problem.space, axes.sharding > 1):
            if all(balance.can_cut(axes.cut(size)) for size in set(sizes)):
                draft = _draft(shape, sizes, counts, balance)
                taken_s = balance.replicas_s(draft) * np.array(counts)
                yield _Spread(sizes, counts, draft.bounds, float(taken_s.max()) / shape.places)


@lru_cache
def _holds(order: tuple[int, ...]) -> Floats:
    """Returns float64 [S, P], 1 where a stage is on a place."""
    return np.eye(max(order) + 1)[list(order)]


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


def try_rivals(tries: Tries, options: Sequence[Option]) -> Iterator[Tried | None]:
    """Yields the first `RIVALS` of every kind with one dimension, as they fit; None for those that do not.

    Raises:
        OutOfBudgetError: The budget ended before.
    """
    rivals = dict.fromkeys(KINDS, 0)
    for option in options:
        if rivals.get(option.shape.kind, RIVALS) < RIVALS:
            rivals[option.shape.kind] += 1
            yield fitted(tries, option.draft(tries.problem.balance))


def try_uniform(tries: Tries, options: Sequence[Option]) -> Iterator[Tried | None]:
    """Yields uniform strategies as they fit, None for those that do not, if they may beat the best; raises likewise.

    The lowest estimates come first, and every `TURN`-th time the first of the next family, a family being of one kind, tensor
    and pipeline degree and micro-batch size.
    """
    families: dict[tuple[object, ...], Option] = {}
    for option in options:
        shape = option.shape
        families.setdefault((shape.kind, shape.axes.tensor, shape.places, max(option.sizes)), option)
    firsts, seen = list(families.values()), set[int]()
    for number, option in enumerate(options):
        for one in [option, *firsts[number // TURN :][: number % TURN == 0]]:
            if id(one) not in seen:
                seen.add(id(one))
                if one.bound_s < tries.best_s:
                    yield fitted(tries, one.draft(tries.problem.balance), tries.best_s)


def by_sets(problem: SearchProblem) -> tuple[list[Option], list[Option], Callable[[], list[Option]]]:
    """Returns options in the order of `Option.key`: the first, those of kinds with one dimension, and a maker of the rest.

    In large clusters the first leave no device of a kind out unless they leave out all: the rest takes longer, mostly.
    """
    cluster, sets, every = problem.cluster, device_sets(problem.cluster), UniformOptions(problem).every
    kind = [one.name for one in cluster.kinds]
    whole = [own for own in sets if len(own) == sum(map(kind.count, {kind[device] for device in own}))]
    if cluster.num_devices <= FEW:
        whole = sets
    first, rest = sorted(every(whole), key=Option.key), [own for own in sets if own not in whole]
    return first, sorted(every(sets, KINDS), key=Option.key) if rest else first, lambda: sorted(every(rest), key=Option.key)
