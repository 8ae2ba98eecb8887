"""Shapes of uniform strategies: sets of devices, and how they are used alike everywhere."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from rlplace.cluster import Cluster
from rlplace.plan.schedule import LOOP, ONE, SCHEDULES, V
from rlplace.strategy.drafts import Mesh, kind_named
from rlplace.strategy.search.space import Space
from rlplace.strategy.search.tries import SearchProblem

Shares = tuple[tuple[int, ...], tuple[int, ...]]
"""Samples of a micro-batch, and micro-batches: one entry, or one a replica."""

MOST_MICROBATCHES = 1 << 12

EVERYTHING = Space()


def divisors(number: int) -> list[int]:
    """Returns the divisors of a number, in increasing order."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


@lru_cache(maxsize=4096)
def equal_shares(batch: int, degree: int, space: Space, *, every: bool = False) -> tuple[Shares, ...]:
    """Returns all replicas alike, for micro-batch sizes that divide the share.

    Args:
        batch: Samples a step.
        degree: Replicas.
        space: What may be chosen.
        every: Whether all sizes, not just powers of two, the whole and what the space names.
    """
    if batch % degree:
        return ()
    share = batch // degree
    sizes = space.only("microbatch", divisors(share)) if every else _parts(share, space)
    return tuple(((size,), (share // size,)) for size in sizes if _allows(space, (size,), (share // size,)))


def unlike_shares(batch: int, pace_s: NDArray[np.float64], space: Space, lockstep: bool) -> Iterator[Shares]:
    """Yields micro-batches of unlike size, or unlike numbers of them; nothing where replicas are alike and the batch divides.

    Args:
        batch: Samples a step.
        pace_s: float64 [D], seconds a sample of every replica.
        space: What may be chosen.
        lockstep: Whether replicas gather for every pass, which needs equal numbers of micro-batches.
    """
    degree = len(pace_s)
    if degree == 1 or (batch % degree == 0 and np.ptp(pace_s) < 1e-9 * pace_s.max()):
        return
    for part in _parts(batch, EVERYTHING):
        parts = proportional(1 / pace_s, batch // part)
        if parts is not None and len(set(parts)) > 1:
            forms = [(parts, (part,))] if lockstep else [(parts, (part,)), ((part,), parts)]
            yield from (form for form in forms if _allows(space, *form))


def _allows(space: Space, sizes: tuple[int, ...], counts: tuple[int, ...]) -> bool:
    some = all(space.allows("microbatch", size) for size in sizes) and all(space.allows("microbatches", n) for n in counts)
    return some and max(counts) <= MOST_MICROBATCHES


def _parts(share: int, space: Space) -> list[int]:
    some = space.only("microbatch", divisors(share))
    return [n for n in some if not n & (n - 1) or n == share or space.microbatch is not None]


def proportional(weights: NDArray[np.float64], total: int) -> tuple[int, ...] | None:
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
        axes: Of every place, without its devices.
        schedule: Of the chain; None for one stage.
    """

    devices: tuple[int, ...]
    places: int
    chunks: int
    axes: Mesh
    schedule: str | None

    @property
    def kind(self) -> str:
        """See `kind_of`."""
        return kind_named(self.places * self.chunks, [self.axes])


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


def shapes(question: SearchProblem, devices: tuple[int, ...]) -> Iterator[Shape]:
    """Yields all uniform ways to use a set of devices."""
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
    question: SearchProblem, devices: tuple[int, ...], places: int, context: int, tensor: int, per_host: int
) -> Iterator[Shape]:
    """Yields shapes of these degrees, by how the rest of each place is shared and copied."""
    space, blocks = question.space, len(question.costs.names)
    data = len(devices) // places // tensor // context
    inside = max(1, min(data, per_host // (tensor * context)))
    for shard in sorted({data, *divisors(math.gcd(data, inside))} | set(space.shard or ())):
        if data % shard or not space.allows("shard", shard) or not space.allows("replicate", data // shard):
            continue
        levels = (0,) if shard == 1 else (1,) if places > 1 else (1, 2, 3)
        for sharding in levels if shard == 1 else space.only("sharding", levels):
            for expert in _expert_degrees(question, shard * context * tensor, sharding):
                for chunks, schedule in chains(space, places, blocks):
                    for sequence in (True, False) if tensor > 1 else (False,):
                        axes = Mesh((), data // shard, shard, context, tensor, expert, sharding, sequence)
                        yield Shape(devices, places, chunks, axes, schedule)


def _context_degrees(question: SearchProblem, width: int) -> list[int]:
    """Context degrees: powers of two unless the space asks for others."""
    degrees = question.space.only("context", divisors(width))
    return [degree for degree in degrees if degree & (degree - 1) == 0 or question.space.context is not None]


def _expert_degrees(question: SearchProblem, group: int, sharding: int) -> list[int]:
    """Expert degrees that experts can be spread over; without shares they are spread over the whole group or not at all."""
    degrees = divisors(math.gcd(group, question.costs.experts))
    return question.space.only("expert", [degree for degree in degrees if sharding or degree in (1, group)])


def chains(space: Space, places: int, blocks: int) -> Iterator[tuple[int, str | None]]:
    """Yields stages a place with the schedules that run them."""
    if places == 1:
        yield 1, None
        return
    for name in space.only("schedule", SCHEDULES):
        counts = {ONE: (1,), LOOP: (1, 2, 3, 4), V: (2,)}[SCHEDULES[name].layout]
        for chunks in space.only("virtual", counts):
            if places * chunks <= blocks:
                yield chunks, name


def stage_order(places: int, schedule: str | None, chunks: int) -> tuple[int, ...]:
    """Place of every stage: a loop over the places, or a v where the schedule wants one."""
    loop = tuple(range(places))
    if schedule is not None and SCHEDULES[schedule].layout == V:
        return (*loop, *reversed(loop))
    return loop * chunks
