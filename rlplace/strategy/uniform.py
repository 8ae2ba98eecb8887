"""Uniform strategies: every place has the same axes, every block the same choices; stages are balanced by their time.

They are what practice writes into configuration files, so searched through they are the floor for everything else. For each set
of devices (all, those of some kinds, the first few of them), number of places and stages, degrees, level, micro-batch and
schedule there is one draft; how much it recomputes is found by `rlplace.strategy.fit`. Shapes are taken in the order of a bound
that no draft of the shape can beat, and the rest is left out when that bound is above the best so far.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from rlplace.schedule import SCHEDULES
from rlplace.strategy.costs import BACKWARD_PASS, RECOMPUTE
from rlplace.strategy.cuts import Balance
from rlplace.strategy.drafts import Draft, Place, plain_draft
from rlplace.strategy.fit import fitted, least
from rlplace.strategy.kinds import KINDS
from rlplace.strategy.savings import estimates, most_in_flight
from rlplace.strategy.shapes import Shape, device_sets, shapes, stage_order
from rlplace.strategy.shares import equal_shares, unlike_shares
from rlplace.strategy.space import Space
from rlplace.strategy.tries import Question, Tried, Tries

MOST_UNEVEN = 8
"""Like replicas among which a batch that does not divide is shared all the same."""


@dataclass(frozen=True)
class Option:
    """A uniform strategy.

    Attributes:
        shape: All but its micro-batches.
        sizes: Samples of a micro-batch, as in drafts; so is `counts`.
        counts: Micro-batches of a replica.
        bound_s: Seconds of compute that it cannot beat.
        short_bytes: What is missing on a device where blocks recompute all that they may and nothing is offloaded, for stages
            of equal size; below 0 where there is room. An estimate.
    """

    shape: Shape
    sizes: tuple[int, ...]
    counts: tuple[int, ...]
    bound_s: float
    short_bytes: float

    @property
    def key(self) -> tuple[bool, float]:
        """What is tried first is smaller."""
        return self.short_bytes > 0.0, self.bound_s

    def draft(self, balance: Balance) -> Draft:
        """With places and balanced stages; nothing runs again."""
        return _draft(self.shape, self.sizes, self.counts, balance)


def _draft(shape: Shape, sizes: tuple[int, ...], counts: tuple[int, ...], balance: Balance) -> Draft:
    width = len(shape.devices) // shape.places
    places = [
        dataclasses.replace(shape.axes, devices=shape.devices[start : start + width])
        for start in range(0, len(shape.devices), width)
    ]
    order = stage_order(shape.places, shape.schedule, shape.chunks)
    bounds = balance.stages(balance.kinds(shape.devices, shape.places), shape.axes.cut(min(sizes)), order).bounds
    return plain_draft(bounds, places, order, microbatch=sizes, microbatches=counts, schedule=shape.schedule)


Spread = tuple[tuple[int, ...], tuple[int, ...], float]
"""Samples of a micro-batch, micro-batches, and seconds of compute that these cannot beat."""


def options(question: Question, shape: Shape, balance: Balance, known: dict[object, Any]) -> Iterator[Option]:
    """One option for each way to spread the batch over a shape's replicas and micro-batches; `known` is filled."""
    order = stage_order(shape.places, shape.schedule, shape.chunks)
    split = shape.schedule is not None and SCHEDULES[shape.schedule].splits_backward
    key = (shape.devices, shape.places, shape.axes.data_degree, shape.axes.cut(1), order, split, shape.axes.sharding > 1)
    if key not in known:
        known[key] = [*_equal(question, shape, balance, order, split), *_unlike(question, shape, balance)]
    for sizes, counts, bound_s in known[key]:
        yield Option(shape, sizes, counts, bound_s, _short_bytes(question, shape, sizes, counts, balance, known))


def _short_bytes(
    question: Question,
    shape: Shape,
    sizes: tuple[int, ...],
    counts: tuple[int, ...],
    balance: Balance,
    known: dict[object, Any],
) -> float:
    """See `Option`."""
    count = max(counts)
    splits = shape.schedule is not None and SCHEDULES[shape.schedule].splits_backward
    key = shape.axes, max(sizes), shape.places > 1, count > 1, splits
    if key not in known:
        allowed = [(number, 0) for number, word in enumerate(RECOMPUTE) if question.space.allows("recompute", word)]
        held = estimates(question, _draft(shape, sizes, counts, balance), 0, allowed or [(0, 0)])[1].min(axis=1)
        passes = question.costs.passes(0, shape.axes.cut(max(sizes)))
        if splits:  # a micro-batch is held until its gradients of weights are there
            held[1] = np.maximum(held[1], passes.halved_bytes.min(axis=0))
        working = passes.working_bytes[BACKWARD_PASS].min(axis=0).max()
        known[key] = (*held.sum(axis=1).tolist(), float(held.sum(axis=0).max()), float(working))
    static, kept, largest, working = known[key]
    kept *= most_in_flight(shape.schedule, shape.places * shape.chunks, shape.places, count)
    room = max(question.room_bytes[device] for device in shape.devices)
    return max((static + kept) / shape.places, largest) + working - room


def _equal(question: Question, shape: Shape, balance: Balance, order: tuple[int, ...], split: bool) -> Iterator[Spread]:
    kinds = balance.kinds(shape.devices, shape.places)
    for sizes, counts in equal_shares(question.batch, shape.axes.data_degree, question.space):
        if sizes[0] > 1 and shape.axes.context > 1 and question.space.context is None:
            continue  # more replicas of fewer samples exchange less
        if not balance.can_cut(shape.axes.cut(sizes[0])):
            continue
        stages = balance.stages(kinds, shape.axes.cut(sizes[0]), order)
        # In a chain the first micro-batch passes all stages, and the slowest place sets the pace; gradients of weights, less
        # than two thirds of a backward, may fill that time.
        first_s = 0.5 * stages.total_s if split else stages.total_s
        paced_s = counts[0] * stages.total_s / shape.places
        if shape.chunks == 1 and not split:
            paced_s = stages.paced_s(counts[0])
        yield sizes, counts, max(first_s, paced_s)


def _unlike(question: Question, shape: Shape, balance: Balance) -> Iterator[Spread]:
    """For unlike devices, and for few replicas among which the batch does not divide."""
    axes, degree = shape.axes, shape.axes.data_degree
    unlike = any(len(own) > 1 for own in balance.kinds(shape.devices, shape.places))
    uneven = question.batch % degree and degree <= MOST_UNEVEN
    size = max(1, question.batch // degree)
    if degree == 1 or axes.context > 1 or not (unlike or uneven) or not balance.can_cut(axes.cut(size)):
        return
    pace_s = balance.replicas_s(_draft(shape, (size,), (1,), balance))
    for sizes, counts in unlike_shares(question.batch, pace_s, question.space, axes.sharding > 1):
        if all(balance.can_cut(axes.cut(size)) for size in set(sizes)):
            taken_s = balance.replicas_s(_draft(shape, sizes, counts, balance)) * np.array(counts)
            yield sizes, counts, float(taken_s.max()) / shape.places


SMALLEST = 3
"""Drafts at most that are tried because they keep least."""

FEW = 32
"""Devices of a cluster of which all sets are looked at from the beginning."""

TURN = 3
"""Options by their bounds for each one by its family."""

RIVALS = 4
"""Drafts of every kind with one dimension that are evaluated before all others, so that an answer can name its rivals."""


def try_one(tries: Tries, balance: Balance) -> None:
    """Evaluates a strategy of the first device alone, if there is one."""
    known: dict[object, Any] = {}
    for shape in shapes(tries.question, (0,)):
        for option in options(tries.question, shape, balance, known):
            tries.score(option.draft(balance))
            return


def try_smallest(tries: Tries, options: Sequence[Option], balance: Balance) -> None:
    """Where one device does not fit: what keeps least on a device, so that few calls do not end without a plan.

    Raises:
        OutOfBudgetError: The budget ended before.
    """
    if tries.fitting():
        return

    for option in heapq.nsmallest(SMALLEST, options, key=lambda option: option.short_bytes):
        if least(tries, option.draft(balance)).fits:
            return


def try_rivals(tries: Tries, options: Sequence[Option], balance: Balance) -> Iterator[Tried | None]:
    """The first `RIVALS` of every kind with one dimension, as they fit; None for those that do not.

    Raises:
        OutOfBudgetError: The budget ended before all were looked at.
    """
    rivals = dict.fromkeys(KINDS, 0)
    for option in options:
        if rivals.get(option.shape.kind, RIVALS) < RIVALS:
            rivals[option.shape.kind] += 1
            yield fitted(tries, option.draft(balance))


def try_uniform(tries: Tries, options: Sequence[Option], balance: Balance) -> Iterator[Tried | None]:
    """Uniform strategies as they fit; None for those that do not. What cannot beat the best is left out; raises likewise.

    The lowest bounds come first, and every `TURN`-th time the first of the next family, a family being of one kind, tensor and
    pipeline degree and micro-batch size, and kinds taking turns.
    """
    families: dict[tuple[object, ...], Option] = {}
    for option in options:
        shape = option.shape
        families.setdefault((shape.kind, shape.axes.tensor, shape.places, max(option.sizes)), option)
    kinds = Counter[object]()
    turns = {}
    for family in families:
        turns[family] = kinds[family[0]]
        kinds[family[0]] += 1
    firsts, looked_at = [families[family] for family in sorted(families, key=turns.__getitem__)], set[int]()
    for number, option in enumerate(options):
        for one in [option, *firsts[number // TURN :][: number % TURN == 0]]:
            if id(one) not in looked_at:
                looked_at.add(id(one))
                yield from _try(tries, one, balance)


def _try(tries: Tries, option: Option, balance: Balance) -> Iterator[Tried | None]:
    """The option, if it can be quicker than the best."""
    below_s = tries.best.step_s if tries.best is not None and tries.fitting() else math.inf
    if option.bound_s < below_s:
        yield fitted(tries, option.draft(balance), below_s)


def by_sets(question: Question, balance: Balance) -> tuple[list[Option], list[Option], Callable[[], list[Option]]]:
    """Options, those that may fit first, by their bound; made when asked for: the last.

    To begin with, those of kinds with one dimension, and all others. In large clusters the first leave no device of a kind out
    unless it leaves out all: the rest has higher bounds, mostly.
    """
    cluster, sets = question.cluster, device_sets(question.cluster)
    kind = [one.name for one in cluster.kinds]
    whole = [own for own in sets if len(own) == sum(map(kind.count, {kind[device] for device in own}))]
    if cluster.num_devices <= FEW:
        whole = sets

    def sorted_(own: Iterable[tuple[int, ...]], kinds: Collection[str] | None = None) -> list[Option]:
        return sorted(all_options(question, balance, own, kinds), key=lambda option: option.key)

    first = sorted_(whole)
    rest = [own for own in sets if own not in whole]
    return first, sorted_(sets, KINDS) if rest else first, lambda: sorted_(rest)


def all_options(
    question: Question,
    balance: Balance,
    sets: Iterable[tuple[int, ...]] | None = None,
    kinds: Collection[str] | None = None,
) -> Iterator[Option]:
    """Every uniform strategy on these sets of devices and of these kinds (None: all), be it too large for the memory."""
    known: dict[object, Any] = {}
    question = dataclasses.replace(question, space=_runnable(question))
    for devices in device_sets(question.cluster) if sets is None else sets:
        if question.devices is not None and not set(devices) <= set(question.devices):
            continue
        for shape in shapes(question, devices):
            if kinds is None or shape.kind in kinds:
                yield from options(question, shape, balance, known)


def _runnable(question: Question) -> Space:
    """The space, without axes that it leaves open and the engine refuses in any strategy."""
    closed: dict[str, tuple[int, ...]] = {}
    drafts = {
        axis: plain_draft((0, len(question.costs.names)), [place])
        for axis, place in (
            ("none", Place((0, 1), replicate=2)),
            ("context", Place((0, 1), context=2)),
            ("expert", Place((0, 1), shard=2, expert=2, sharding=1)),
        )
    }
    if question.why_not is not None and question.why_not(drafts.pop("none")) is None:
        refused = [axis for axis, draft in drafts.items() if question.why_not(draft) is not None]
        closed = {axis: (1,) for axis in refused if getattr(question.space, axis) is None}
    return msgspec.structs.replace(question.space, **closed)
