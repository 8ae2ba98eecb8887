"""Every strategy of a small problem: the oracle that the search is held against.

A *structure* is a draft without recomputation and offload; what those cost only adds to its step, so a structure that is slower
than the best known without them is done. Devices that kind and host make alike are taken in their order.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

import numpy as np

from rlplace.cluster import Cluster
from rlplace.errors import InputError
from rlplace.plan.schedule import LOOP, ONE, SCHEDULES, V
from rlplace.strategy.drafts import Draft, Mesh
from rlplace.strategy.executor.evaluate import DraftEvaluator
from rlplace.strategy.search.tries import SearchProblem
from tests.strategy.random_costs import random_costs

CLUSTERS = (
    "a100-80g:2", "a100-80g:3", "a100-80g:4", "rtx4090:4", "h100:2x2,ib=400g", "a100-80g:1+t4:1", "a100-80g:2+t4:2",
    "v100:2+t4:1",
)  # fmt: skip
DEGREES = (1, 2, 4, 8)
"""Tensor degrees."""

Shares = tuple[tuple[int, ...], tuple[int, ...]]
"""Samples of a micro-batch and micro-batches: one entry, or one a replica."""


def small_question(seed: int) -> SearchProblem:
    """A problem of 2 to 4 devices and 2 to 5 blocks whose best strategy has room, or lacks some."""
    rng = np.random.default_rng(seed)
    cluster = Cluster.preset(str(rng.choice(CLUSTERS)))
    blocks, batch = int(rng.integers(2, 6)), int(rng.choice([4, 6, 8]))
    costs = random_costs(rng, cluster, blocks, tied=rng.random() < 0.3, alike=rng.random() < 0.3)
    if rng.random() < 0.5:
        one = Draft((0, blocks), (Mesh((0,)),), (0,), bytes(blocks), bytes(blocks), (1,), (batch,))
        size = max(DraftEvaluator(costs, cluster).evaluate(one).peak_memory_bytes) * rng.uniform(0.15, 0.7)
        devices = tuple(dataclasses.replace(d, memory_bytes=int(size), reserved_bytes=0) for d in cluster.devices)
        cluster = dataclasses.replace(cluster, devices=devices)
    return SearchProblem(DraftEvaluator(costs, cluster), batch)


def quicker(asked: SearchProblem, than_s: float) -> tuple[float, Draft] | None:
    """The quickest draft that fits of all that take less than `than_s`; None where there is none."""
    best: tuple[float, Draft] | None = None
    for compute_s, structure in structures(asked):
        if compute_s >= than_s:
            continue
        try:
            bare_s, over = asked.scores.score(structure)
        except InputError:  # the schedule cannot run it
            continue
        if bare_s >= than_s:
            continue
        found = (bare_s, structure) if over == 0 else _remembering(asked, structure, than_s)
        if found is not None and _is_strategy(asked, found[1]):
            best, than_s = found, found[0]
    return best


def _remembering(asked: SearchProblem, structure: Draft, than_s: float) -> tuple[float, Draft] | None:
    """The quickest choice of recomputation and offload for every block that fits, by depth first and two bounds."""
    blocks, best = structure.bounds[-1], None
    choices = list(itertools.product(range(3), range(3)))

    def at(chosen: list[tuple[int, int]], rest: tuple[int, int]) -> Draft:
        every = chosen + [rest] * (blocks - len(chosen))
        return dataclasses.replace(structure, recompute=bytes(r for r, _ in every), offload=bytes(o for _, o in every))

    def visit(chosen: list[tuple[int, int]]) -> None:
        nonlocal best, than_s
        if asked.scores.score(at(chosen, (0, 0)))[0] >= than_s:
            return
        if all(asked.scores.score(at(chosen, (how, 2)))[1] > 0 for how in (2, 1, 0)):
            return
        if len(chosen) == blocks:
            than_s = asked.scores.score(at(chosen, (0, 0)))[0]
            best = than_s, at(chosen, (0, 0))
            return
        for choice in choices:
            visit([*chosen, choice])

    visit([])
    return best


def structures(asked: SearchProblem) -> Iterator[tuple[float, Draft]]:
    """All drafts without recomputation and offload, after seconds that they cannot beat."""
    cluster, costs = asked.cluster, asked.costs
    blocks, blank = len(costs.names), bytes(len(costs.names))
    kind = {name: number for number, name in enumerate(costs.kinds)}
    of_device = [kind[one.name] for one in cluster.kinds]
    for places in _all_places(cluster):
        degree = max(place.data_degree for place in places)
        if any(degree % place.data_degree for place in places):
            continue
        for schedule, chunks in _schedules(len(places), blocks):
            loop = tuple(range(len(places)))
            order = (*loop, *reversed(loop)) if schedule and SCHEDULES[schedule].layout == V else loop * chunks
            for inner in itertools.combinations(range(1, blocks), len(order) - 1):
                bounds = (0, *inner, blocks)
                for sizes, counts in _shares(asked.batch, degree, any(place.sharding > 1 for place in places)):
                    draft = Draft(bounds, places, order, blank, blank, sizes, counts, schedule)
                    yield _compute_s(asked, draft, of_device), draft


def _compute_s(asked: SearchProblem, draft: Draft, kind: list[int]) -> float:
    """Ops of the place with most of them."""
    degree, most = draft.data_degree, 0.0
    sizes, counts = draft.shares
    for number, place in enumerate(draft.places):
        own = draft.blocks_of(number)
        width, share = len(place.devices) // place.data_degree, degree // place.data_degree
        for replica in range(place.data_degree):
            samples = sum(sizes[replica * share : (replica + 1) * share])
            for device in place.devices[replica * width : (replica + 1) * width]:
                one = asked.costs.passes(kind[device], place.cut(samples))
                most = max(most, counts[replica * share] * float((one.forward_s + one.backward_s)[own].sum()))
    return most


def _all_places(cluster: Cluster) -> Iterator[tuple[Mesh, ...]]:
    """Every sequence of places on some of the devices."""
    alike: dict[tuple[str, int], list[int]] = {}
    for device, one in enumerate(cluster.kinds):
        alike.setdefault((one.name, cluster.hosts[device]), []).append(device)
    classes = list(alike.values())
    for count in range(1, cluster.num_devices + 1):
        labels = {
            order
            for chosen in itertools.combinations([c for c, own in enumerate(classes) for _ in own], count)
            for order in itertools.permutations(chosen)
        }
        for order in sorted(labels):
            taken = [iter(own) for own in classes]
            devices = [next(taken[label]) for label in order]
            for parts in range(1, count + 1):
                for inner in itertools.combinations(range(1, count), parts - 1):
                    ends = (0, *inner, count)
                    own = [tuple(devices[a:b]) for a, b in itertools.pairwise(ends)]
                    yield from itertools.product(*(list(_meshes(members, parts > 1)) for members in own))


def _meshes(devices: tuple[int, ...], pipeline: bool) -> Iterator[Mesh]:
    count = len(devices)
    for replicate, shard, tensor in itertools.product(range(1, count + 1), repeat=3):
        if replicate * shard * tensor == count and tensor in DEGREES:
            for level in (0,) if shard == 1 else (1,) if pipeline else (1, 2, 3):
                for sequence in (False, True) if tensor > 1 else (False,):
                    yield Mesh(devices, replicate, shard, 1, tensor, 1, level, sequence)


def _schedules(places: int, blocks: int) -> Iterator[tuple[str | None, int]]:
    if places == 1:
        yield None, 1
        return
    for name in SCHEDULES:
        for chunks in {ONE: (1,), V: (2,), LOOP: range(1, blocks // places + 1)}[SCHEDULES[name].layout]:
            if places * chunks <= blocks:
                yield name, chunks


def _shares(batch: int, degree: int, lockstep: bool) -> Iterator[Shares]:
    """Equal shares; else micro-batches of unlike size, or unlike numbers of them."""
    for part in (n for n in range(1, batch + 1) if batch % n == 0):
        rest = batch // part
        if rest % degree == 0:
            yield (rest // degree,), (part,)
        for parts in _compositions(rest, degree):
            if len(set(parts)) > 1:
                yield parts, (part,)
                if not lockstep:
                    yield (part,), parts


def _compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    for inner in itertools.combinations(range(1, total), parts - 1):
        ends = (0, *inner, total)
        yield tuple(b - a for a, b in itertools.pairwise(ends))


def _is_strategy(asked: SearchProblem, draft: Draft) -> bool:
    """Whether it contradicts itself nowhere."""
    try:
        return draft.strategy(asked.costs.names).batch == asked.batch and math.isfinite(asked.scores.score(draft)[0])
    except InputError:
        return False
