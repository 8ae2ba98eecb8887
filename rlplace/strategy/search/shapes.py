"""Shapes of uniform strategies: sets of devices, degrees of their meshes, and shares of the batch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlplace.plan.schedule import GPIPE, LOOP, LOOPED_BFS, ONE, SCHEDULES, V
from rlplace.plan.strategy import CONTEXT_METHODS, GATHER
from rlplace.strategy.drafts import Devices, Mesh, array_of, kind_named
from rlplace.strategy.search.space import Space
from rlplace.strategy.search.tries import SearchProblem

Shares = tuple[tuple[int, ...], tuple[int, ...]]
"""Samples of a micro-batch, and micro-batches: one entry, or one a replica."""

MOST_MICROBATCHES = 1 << 12

USUAL_COUNT = 16
"""Micro-batches near which pipelines are looked for first."""

MOST_HOSTS = 4
"""Hosts of one kind of which every number is tried; of more, powers of two."""

MOST_DEVICES = 64
"""Devices of one kind of which every power of two is tried; of more, one, and from an eighth of them on."""

MOST_KINDS = 4
"""Kinds of devices of which every subset is tried; of more, each alone and all together."""


def divisors(number: int) -> list[int]:
    """Returns the divisors of a number, in increasing order."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


@lru_cache(maxsize=4096)
def equal_shares(batch: int, degree: int, space: Space, *, every: bool = False) -> tuple[Shares, ...]:
    """Returns shares of the batch with all replicas alike.

    Args:
        batch: Samples a step.
        degree: Replicas.
        space: Allowed values.
        every: Whether micro-batches have all sizes, not just powers of two, the whole and those that the space names.
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
        space: Allowed values.
        lockstep: Whether replicas gather for every pass, which needs equal numbers of micro-batches.
    """
    degree = len(pace_s)
    if degree == 1 or (batch % degree == 0 and np.ptp(pace_s) < 1e-9 * pace_s.max()):
        return
    for part in _parts(batch, Space()):
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
    """Returns whole numbers from 1 up in proportion to weights, whose sum is `total`; None where there are too few."""
    if total < len(weights):
        return None
    exact = weights / weights.sum() * total
    parts = np.maximum(np.floor(exact), 1).astype(np.int64)
    while (rest := total - int(parts.sum())) != 0:
        gain = exact - parts
        at = int(np.argmax(gain)) if rest > 0 else int(np.argmin(np.where(parts > 1, gain, np.inf)))
        parts[at] += 1 if rest > 0 else -1
    return tuple(parts.tolist())


@dataclass(frozen=True)
class Shape:
    """A uniform strategy without its micro-batch.

    Attributes:
        devices: In the order in which places take them.
        places: Number of places.
        chunks: Stages a place.
        axes: Mesh of every place, without its devices.
        schedule: Of the chain; None for one stage.
    """

    devices: tuple[int, ...]
    places: int
    chunks: int
    axes: Mesh
    schedule: str | None

    @property
    def kind(self) -> str:
        """Its kind, see `kind_of`."""
        return kind_named(self.places * self.chunks, [self.axes])

    @property
    def order(self) -> tuple[int, ...]:
        """The place of every stage."""
        return stage_order(self.places, self.schedule, self.chunks)


def devices_by_kind(problem: SearchProblem) -> dict[str, Devices]:
    """Returns the devices that may be used, by the name of their kind."""
    usable = np.arange(problem.cluster.num_devices) if problem.devices is None else np.array(problem.devices)
    kind = problem.balance.kind[usable]
    return {problem.costs.kinds[number]: Devices(usable[kind == number].tolist()) for number in dict.fromkeys(kind.tolist())}


def device_sets(problem: SearchProblem) -> dict[Devices, bool]:
    """Returns sets of usable devices: every set of kinds, of one kind the first 1, 2, 4, ... and whole hosts; largest first.

    To each belongs whether it leaves out no device of its kinds.
    """
    kind, host = problem.balance.kind, np.array(problem.cluster.hosts)
    kinds = list(dict.fromkeys(kind.tolist()))
    few = len(kinds) <= MOST_KINDS
    sizes = range(len(kinds), 0, -1) if few else (len(kinds), 1)
    usable = None if problem.devices is None else np.isin(np.arange(len(kind)), problem.devices)
    sets: dict[Devices, bool] = {}
    for chosen in itertools.chain.from_iterable(itertools.combinations(kinds, size) for size in sizes):
        own = np.flatnonzero(np.isin(kind, chosen))
        own = own[np.argsort(host[own], kind="stable")]
        counts = {len(own)}
        if len(chosen) == 1:
            counts |= {1 << power for power in range(len(own).bit_length())}
            begins = np.flatnonzero(np.diff(host[own])) + 1
            if len(begins) < MOST_HOSTS:
                counts |= set(begins.tolist())
        for count in sorted(counts, reverse=True):
            few_or_many = len(own) <= MOST_DEVICES or not 1 < count < len(own) // 8
            if few_or_many and (usable is None or usable[own[:count]].all()):
                sets.setdefault(Devices(own[:count].tolist()), count == len(own))
    return sets


class Degrees(NamedTuple):
    """Degrees that decide what a pass costs.

    Attributes:
        places: Number of places.
        tensor: Tensor-parallel degree.
        context: Context-parallel degree.
        expert: Expert-parallel degree.
        tables: Replicas that divide embedding tables.
    """

    places: int
    tensor: int
    context: int
    expert: int
    tables: int


Forms = tuple[tuple[Mesh, ...], ...]
"""Meshes without devices by the form of tensor and context parallelism, the usual ones first."""


def divisions(problem: SearchProblem, devices: tuple[int, ...]) -> Mapping[Degrees, Forms]:
    """Returns all uniform ways to divide a set of devices."""
    seats = problem.cluster.seats[array_of(devices)].T
    counts = (np.unique(own[own >= 0], return_counts=True)[1].tolist() for own in seats)
    inside = tuple(min(own, default=1) for own in counts)
    costs = problem.costs
    asks_tables = costs.tables or problem.space.tables is not None
    return _divisions(problem.space, len(costs.names), costs.experts, asks_tables, len(devices), inside)


@lru_cache(maxsize=256)
def _divisions(
    space: Space, blocks: int, experts: int, asks_tables: bool, count: int, inside: tuple[int, ...]
) -> Mapping[Degrees, Forms]:
    """Returns `divisions` of so many devices; `inside`: those of the smallest group of each tier, and of the smallest host."""
    found: dict[Degrees, dict[int, list[Mesh]]] = {}
    *per_group, per_host = inside
    for places in space.only("pipeline", divisors(count)):
        if places > blocks:
            continue
        width = count // places
        for tensor in space.only("tensor", divisors(width)):
            # A tensor group exchanges activations in every block: it stays inside a host unless the space asks for more.
            if tensor > 1 and (tensor & (tensor - 1) or per_host % tensor) and space.tensor is None:
                continue
            for context in space.only("context", divisors(width // tensor)):
                if context & (context - 1) and space.context is None:
                    continue
                left = [each // (tensor * context) for each in (per_host, *per_group)]
                methods = space.only("context_method", CONTEXT_METHODS[::-1]) if context > 1 else [GATHER]
                forms = list(itertools.product((True, False) if tensor > 1 else (False,), methods))
                for axes in _meshes(space, experts, width // tensor // context, context, tensor, left, places > 1):
                    for tables in _tables(space, axes, places) if asks_tables else (1,):
                        own = found.setdefault(Degrees(places, tensor, context, axes[4], tables), {})
                        for number, (sequence, method) in enumerate(forms):
                            own.setdefault(number, []).append(Mesh((), *axes, sequence, method, tables))
    return {degrees: tuple(map(tuple, forms.values())) for degrees, forms in found.items()}


def _meshes(
    space: Space, experts: int, data: int, context: int, tensor: int, inside: Sequence[int], chain: bool
) -> Iterator[tuple[int, int, int, int, int, int]]:
    """Yields degrees, replicate to expert, and level of meshes, by how the data axis is shared and copied.

    Parameters are shared over all of it, a part of a host (`inside` has its devices first), or a group of hosts (then theirs).

    Experts are spread over any group with shares; without shares over the whole group or not at all.
    """
    in_host, *in_groups = (math.gcd(data, max(1, min(data, each))) for each in inside)
    for shard in sorted({data, *divisors(in_host), *in_groups} | set(space.shard or ())):
        if data % shard or not space.allows("shard", shard) or not space.allows("replicate", data // shard):
            continue
        levels = (1,) if chain else (1, 2, 3)
        for sharding in (0,) if shard * context == 1 else space.only("sharding", levels if shard > 1 else (0, *levels)):
            group = shard * context * tensor
            for expert in space.only("expert", divisors(math.gcd(group, experts))):
                if sharding or expert in (1, group):
                    yield data // shard, shard, context, tensor, expert, sharding


def _tables(space: Space, axes: Sequence[int], places: int) -> list[int]:
    """Returns over how many replicas tables are divided: none, and all of one stage without other groups."""
    replicate, shard, context, tensor, expert, _ = axes
    alone = places * context * tensor * expert == 1
    return space.only("tables", sorted({1, replicate * shard if alone else 1}))


def chains(space: Space, places: int, blocks: int) -> Iterator[tuple[int, str | None]]:
    """Yields stages a place with the schedules that run them."""
    if places == 1:
        yield 1, None
        return
    for name in space.only("schedule", SCHEDULES):
        counts = {ONE: (1,), LOOP: (1, 2, 3, 4), V: (2,)}[SCHEDULES[name].layout]
        if name == LOOPED_BFS and space.allows("schedule", GPIPE):  # with one stage a place it is GPipe's
            counts = counts[1:]
        for chunks in space.only("virtual", counts):
            if places * chunks <= blocks:
                yield chunks, name


def stage_order(places: int, schedule: str | None, chunks: int) -> tuple[int, ...]:
    """Returns the place of every stage: a loop over the places, or a v where the schedule wants one."""
    loop = tuple(range(places))
    if schedule is not None and SCHEDULES[schedule].layout == V:
        return (*loop, *reversed(loop))
    return loop * chunks
