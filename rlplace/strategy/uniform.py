"""Uniform strategies: every place has the same axes, every block the same choices; stages are balanced by their time.

They are what practice writes into configuration files, so searched through they are the floor for everything else. For each set
of devices (all, those of some kinds, the first few of them), number of places and stages, degrees, level, micro-batch and
schedule there is one draft; how much it recomputes is found by `rlplace.strategy.fit`. Shapes are taken in the order of a bound
that no draft of the shape can beat, and the rest is left out when that bound is above the best so far.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rlplace.cluster import Cluster
from rlplace.schedule import LOOP, ONE, PIPELINE_SCHEDULES, SCHEDULES, V
from rlplace.strategy.costs import Cut
from rlplace.strategy.cuts import Balance
from rlplace.strategy.drafts import Draft, Place
from rlplace.strategy.fit import fitted
from rlplace.strategy.shares import divisors, equal_shares, unlike_shares
from rlplace.strategy.space import Space
from rlplace.strategy.tries import Question, Tried, Tries

MOST_UNEVEN = 8
"""Like replicas among which a batch that does not divide is shared all the same."""

MOST_HOSTS = 4
"""Hosts of one kind of which every number is tried; of more, powers of two."""

MOST_DEVICES = 64
"""Of one kind, of which every power of two is tried; of more, one, and from an eighth of them on."""

MOST_KINDS = 4
"""Kinds of devices of which every subset is tried; of more, each alone and all together."""


@dataclass(frozen=True)
class Shape:
    """A uniform strategy without its micro-batch.

    Attributes:
        devices: In the order in which places take them.
        places: Number of places.
        chunks: Stages a place.
        replicate: Of every place; so are the next six.
        shard: See `replicate`.
        context: See `replicate`.
        tensor: See `replicate`.
        expert: See `replicate`.
        sharding: See `replicate`.
        sequence_parallel: See `replicate`.
        schedule: Of the chain; None for one stage.
    """

    devices: tuple[int, ...]
    places: int
    chunks: int
    replicate: int
    shard: int
    context: int
    tensor: int
    expert: int
    sharding: int
    sequence_parallel: bool
    schedule: str | None

    @property
    def replicas(self) -> int:
        """Data degree."""
        return self.replicate * self.shard

    @property
    def kind(self) -> str:
        """See `kind_of`."""
        return _kind(self.places * self.chunks, self.tensor, self.context, self.expert, self.shard, self.replicate)

    def cut(self, samples: int) -> Cut:
        """How a pass of so many samples of a replica is cut."""
        return Cut(samples, self.tensor, self.sequence_parallel, self.context, self.expert)


def device_sets(cluster: Cluster) -> list[tuple[int, ...]]:
    """Sets of devices worth using: every set of kinds, of one kind the first 1, 2, 4, ... and whole hosts; largest first."""
    kinds = list(dict.fromkeys(kind.name for kind in cluster.kinds))
    few = len(kinds) <= MOST_KINDS
    sizes = range(len(kinds), 0, -1) if few else (len(kinds), 1)
    sets: dict[tuple[int, ...], None] = {}
    for chosen in itertools.chain.from_iterable(itertools.combinations(kinds, size) for size in sizes):
        own = [device for device, kind in enumerate(cluster.kinds) if kind.name in chosen]
        own.sort(key=lambda device: (cluster.hosts[device], device))
        hosts = [cluster.hosts[device] for device in own]
        ends = {index for index in range(1, len(own)) if hosts[index] != hosts[index - 1] and len(set(hosts)) <= MOST_HOSTS}
        counts = {len(own)} | {1 << power for power in range(len(own).bit_length())} | ends
        if len(chosen) > 1:
            counts = {len(own)}
        for count in sorted(counts, reverse=True):
            if len(own) > MOST_DEVICES and 1 < count < len(own) // 8:
                continue
            sets[tuple(own[:count])] = None
    return list(sets)


def shapes(question: Question, devices: tuple[int, ...]) -> Iterator[Shape]:
    """All uniform ways to use a set of devices."""
    space, cluster = question.space, question.cluster
    hosts = [cluster.hosts[device] for device in devices]
    per_host = max(1, min(hosts.count(host) for host in set(hosts)))
    for places in space.only("pipeline", divisors(len(devices))):
        width = len(devices) // places
        for tensor in space.only("tensor", divisors(width)):
            # A tensor group exchanges activations in every block: it stays inside a host unless the space asks for more.
            if tensor > 1 and (tensor & (tensor - 1) or per_host % tensor) and space.tensor is None:
                continue
            for context in _context_degrees(question, width // tensor):
                yield from _data_shapes(question, devices, places, context, tensor, per_host)


def _data_shapes(
    question: Question, devices: tuple[int, ...], places: int, context: int, tensor: int, per_host: int
) -> Iterator[Shape]:
    """Shapes of these degrees, by how the rest of each place is shared and copied."""
    space, blocks = question.space, len(question.costs.names)
    data = len(devices) // places // tensor // context
    inside = max(1, min(data, per_host // (tensor * context)))
    for shard in sorted({1, data, inside if data % inside == 0 else 1} | set(space.shard or ())):
        if data % shard or not space.allows("shard", shard) or not space.allows("replicate", data // shard):
            continue
        levels = (0,) if shard == 1 else (1,) if places > 1 else (1, 2, 3)
        for sharding in levels if shard == 1 else space.only("sharding", levels):
            for expert in _expert_degrees(question, shard * context * tensor, sharding):
                for chunks, schedule in chains(space, places, blocks):
                    for sequence in (True, False) if tensor > 1 else (False,):
                        axes = data // shard, shard, context, tensor, expert, sharding, sequence
                        yield Shape(devices, places, chunks, *axes, schedule)


def _context_degrees(question: Question, width: int) -> list[int]:
    """Context degrees: powers of two unless the space asks for others."""
    degrees = question.space.only("context", divisors(width))
    return [degree for degree in degrees if degree & (degree - 1) == 0 or question.space.context is not None]


def _expert_degrees(question: Question, group: int, sharding: int) -> list[int]:
    """Expert degrees that experts can be spread over; without shares they are spread over the whole group or not at all."""
    degrees = divisors(math.gcd(group, question.costs.experts))
    return question.space.only("expert", [degree for degree in degrees if sharding or degree in (1, group)])


def chains(space: Space, places: int, blocks: int) -> Iterator[tuple[int, str | None]]:
    """Stages a place with the schedules that run them."""
    if places == 1:
        yield 1, None
        return
    for name in space.only("schedule", PIPELINE_SCHEDULES):
        counts = {ONE: (1,), LOOP: (1, 2, 3, 4), V: (2,)}[SCHEDULES[name].layout]
        for chunks in space.only("virtual", counts):
            if places * chunks <= blocks:
                yield chunks, name


@dataclass(frozen=True)
class Option:
    """A uniform strategy.

    Attributes:
        shape: All but its micro-batches.
        sizes: Samples of a micro-batch, as in drafts; so is `counts`.
        counts: Micro-batches of a replica.
        bound_s: Seconds of compute that it cannot beat.
    """

    shape: Shape
    sizes: tuple[int, ...]
    counts: tuple[int, ...]
    bound_s: float

    def draft(self, balance: Balance) -> Draft:
        """With places and balanced stages; nothing runs again."""
        return _draft(self.shape, self.sizes, self.counts, balance)


def _draft(shape: Shape, sizes: tuple[int, ...], counts: tuple[int, ...], balance: Balance) -> Draft:
    width = len(shape.devices) // shape.places
    places = tuple(
        Place(
            shape.devices[index * width : (index + 1) * width], shape.replicate, shape.shard, shape.context, shape.tensor,
            shape.expert, shape.sharding, shape.sequence_parallel,
        )
        for index in range(shape.places)
    )  # fmt: skip
    order = stage_order(shape.places, shape.schedule, shape.chunks)
    bounds = balance.stages(balance.kinds(shape.devices, shape.places), shape.cut(min(sizes)), order).bounds
    nothing = bytes(bounds[-1])
    return Draft(bounds, places, order, nothing, nothing, sizes, counts, shape.schedule)


Spread = tuple[tuple[int, ...], tuple[int, ...], float]
"""Samples of a micro-batch, micro-batches, and seconds of compute that these cannot beat."""


def options(question: Question, shape: Shape, balance: Balance, known: dict[object, list[Spread]]) -> Iterator[Option]:
    """One option for each way to spread the batch over a shape's replicas and micro-batches; `known` is filled."""
    order = stage_order(shape.places, shape.schedule, shape.chunks)
    split = shape.schedule is not None and SCHEDULES[shape.schedule].splits_backward
    key = (shape.devices, shape.places, shape.replicas, shape.cut(1), order, split, shape.sharding > 1)
    if key not in known:
        known[key] = [*_equal(question, shape, balance, order, split), *_unlike(question, shape, balance)]
    return (Option(shape, *spread) for spread in known[key])


def _equal(question: Question, shape: Shape, balance: Balance, order: tuple[int, ...], split: bool) -> Iterator[Spread]:
    kinds = balance.kinds(shape.devices, shape.places)
    for sizes, counts in equal_shares(question.batch, shape.replicas, question.space):
        if sizes[0] > 1 and shape.context > 1 and question.space.context is None:
            continue  # more replicas of fewer samples exchange less
        if not balance.can_cut(shape.cut(sizes[0])):
            continue
        stages = balance.stages(kinds, shape.cut(sizes[0]), order)
        # In a chain the first micro-batch passes all stages, and the slowest place sets the pace; gradients of weights, less
        # than two thirds of a backward, may fill that time.
        first_s = 0.5 * stages.total_s if split else stages.total_s
        paced_s = counts[0] * stages.total_s / shape.places
        if shape.chunks == 1 and not split:
            paced_s = stages.paced_s(counts[0])
        yield sizes, counts, max(first_s, paced_s)


def _unlike(question: Question, shape: Shape, balance: Balance) -> Iterator[Spread]:
    """For unlike devices, and for few replicas among which the batch does not divide."""
    unlike = any(len(own) > 1 for own in balance.kinds(shape.devices, shape.places))
    uneven = question.batch % shape.replicas and shape.replicas <= MOST_UNEVEN
    size = max(1, question.batch // shape.replicas)
    if shape.replicas == 1 or shape.context > 1 or not (unlike or uneven) or not balance.can_cut(shape.cut(size)):
        return
    pace_s = balance.replicas_s(_draft(shape, (size,), (1,), balance))
    for sizes, counts in unlike_shares(question.batch, pace_s, question.space, shape.sharding > 1):
        if all(balance.can_cut(shape.cut(size)) for size in set(sizes)):
            taken_s = balance.replicas_s(_draft(shape, sizes, counts, balance)) * np.array(counts)
            yield sizes, counts, float(taken_s.max()) / shape.places


def stage_order(places: int, schedule: str | None, chunks: int) -> tuple[int, ...]:
    """Place of every stage: a loop over the places, or a v where the schedule wants one."""
    loop = tuple(range(places))
    if schedule is not None and SCHEDULES[schedule].layout == V:
        return (*loop, *reversed(loop))
    return loop * chunks


RIVALS = 4
"""Drafts of every kind with one dimension that are evaluated before all others, so that an answer can name its rivals."""


def try_one(tries: Tries, balance: Balance) -> None:
    """Evaluates a strategy of the first device alone, if there is one: compiles the executor, and starts the clock."""
    known: dict[object, list[Spread]] = {}
    for shape in shapes(tries.question, (0,)):
        for option in options(tries.question, shape, balance, known):
            tries.score(option.draft(balance))
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
    """Uniform strategies as they fit; None for those that do not. What cannot beat the best is left out; raises likewise."""
    for option in options:
        best = tries.best
        below_s = best.step_s if best is not None and best.fits else math.inf
        if option.bound_s < below_s:
            yield fitted(tries, option.draft(balance), below_s)


def all_options(question: Question, balance: Balance) -> Iterator[Option]:
    """Every uniform strategy, be it too large for the memory."""
    known: dict[object, list[Spread]] = {}
    for devices in device_sets(question.cluster):
        if question.devices is not None and not set(devices) <= set(question.devices):
            continue
        for shape in shapes(question, devices):
            yield from options(question, shape, balance, known)


KINDS = ("one device", "data parallel", "fully sharded", "tensor parallel", "pipeline")
"""Kinds that have one dimension; others are named after all that they have."""

UNLIKE = "unlike pipelines"
"""Kind of several pipelines."""


def kind_of(draft: Draft) -> str:
    """What people call a strategy."""
    if draft.beside:
        return UNLIKE
    return _kind(draft.stages, *(max(getattr(place, axis) for place in draft.places) for axis in _WORDS))


_WORDS = {
    "tensor": "tensor parallel",
    "context": "context parallel",
    "expert": "expert parallel",
    "shard": "fully sharded",
    "replicate": "data parallel",
}


def _kind(stages: int, *degrees: int) -> str:
    """The name of a kind, from its stages and the degrees of the axes of `_WORDS`."""
    words = zip(("pipeline", *_WORDS.values()), (stages, *degrees), strict=True)
    return " x ".join(word for word, degree in words if degree > 1) or "one device"
