"""Starts with a shape for each kind of device: pipelines whose places have one data degree, and tensor groups by kind.

A closed form chooses among them. Let T be the seconds of a micro-batch through the whole model on a place of a kind, with the
collectives inside blocks. Places share the blocks so that all take as long, so a place holds the part p / T of the model and
sets the pace p = 1 / sum(1 / T) over places. What a part keeps beyond the room of its devices is recomputed, which lengthens T.
A step takes (m + f (S - 1)) p for m micro-batches over S places, where f of a forward and backward is not filled, and the
exchange of gradients. The best few become drafts with balanced stages.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from rlplace.budget import Budget
from rlplace.plan.schedule import GPIPE, ONE_F_ONE_B, SCHEDULES, ZBV, ZERO_BUBBLE
from rlplace.strategy.costs import FULL, RECOMPUTE
from rlplace.strategy.drafts import Draft, Mesh, plain_draft
from rlplace.strategy.search.chains import runs
from rlplace.strategy.search.shapes import MOST_KINDS, USUAL_COUNT, devices_by_kind, divisors, equal_shares, stage_order
from rlplace.strategy.search.tries import SearchProblem

KEPT = 24
"""Shapes that become drafts."""

SIZES = 4
"""Sizes of micro-batches that are tried at most, the smallest ones."""

WAYS = ((ONE_F_ONE_B, 1), (ZERO_BUBBLE, 1), (ZERO_BUBBLE, 2), (ZBV, 2), (GPIPE, 1))
"""Schedules, and stages a place."""


class _Part(NamedTuple):
    """The whole model on a place of one kind, for one micro-batch.

    Attributes:
        mesh: The first place of the kind.
        places: Places that its devices make.
        pass_s: Seconds of forward and backward.
        again_s: Seconds that full recomputation adds.
        exchange_s: Seconds to exchange all gradients.
        held_bytes: Held all step.
        kept_bytes: Saved of a micro-batch.
        saved_bytes: Part of it that recomputation saves.
        working_bytes: Largest of a pass.
    """

    mesh: Mesh
    places: int
    pass_s: float
    again_s: float
    exchange_s: float
    held_bytes: float
    kept_bytes: float
    saved_bytes: float
    working_bytes: float


class _Shape(NamedTuple):
    """A pipeline by kinds; the least `expected_s` first."""

    expected_s: float
    microbatches: int
    size: int
    parts: tuple[_Part, ...]
    way: tuple[str, int]


def starts_by_kind(problem: SearchProblem, seconds: float = math.inf) -> Iterator[Draft]:
    """Yields drafts for the kinds of devices of a cluster, the most promising by the closed form first; none for one kind.

    Numbers of micro-batches near `USUAL_COUNT` are priced first, and none of the others after so many seconds.
    """
    budget = Budget(seconds=seconds)
    space, kinds = problem.space, devices_by_kind(problem)
    if not 1 < len(kinds) <= MOST_KINDS:
        return
    spreads = [
        (degree, size, count)
        for degree in divisors(problem.batch)
        if degree <= sum(map(len, kinds.values()))
        for (size,), (count,) in equal_shares(problem.batch, degree, space)[:SIZES]
    ]
    found: list[_Shape] = []
    for degree, size, count in sorted(spreads, key=lambda spread: abs(math.log2(spread[2] / USUAL_COUNT))):
        if found and budget.left_s() < 0.0:
            break
        parts = [list(_parts(problem, devices, degree, size)) for devices in kinds.values()]
        for chosen in itertools.product(*([None, *own] for own in parts)):
            pipeline = tuple(part for part in chosen if part is not None)
            found += _shapes(problem, pipeline, count, size)
    for shape in sorted(found, key=lambda shape: shape.expected_s)[:KEPT]:
        yield from _drafts(problem, shape, kinds)


def _parts(problem: SearchProblem, devices: tuple[int, ...], degree: int, size: int) -> Iterator[_Part]:
    """Yields places of so many replicas on the devices of a kind, by tensor degree, inside a host."""
    space, costs = problem.space, problem.costs
    inside = min(Counter(problem.cluster.hosts[device] for device in devices).values())
    for tensor in space.only("tensor", divisors(inside)):
        width = degree * tensor
        if (tensor & (tensor - 1) and space.tensor is None) or width > len(devices):
            continue
        levels = [level for level in (1, 0) if _allowed(problem, degree, level)]
        if not levels:
            continue
        shard = degree if levels[0] else 1
        plain = Mesh(devices[:width], degree // shard, shard, tensor=tensor, sharding=int(shard > 1))
        split = dataclasses.replace(plain, sequence_parallel=tensor > 1)
        mesh = next((one for one in (split, plain) if costs.why_not(one.cut(size)) is None), None)
        if mesh is None:
            continue
        x = problem.scores.packer.all_blocks(mesh, size, 2, 2, ((0, 0), (FULL, 0)))
        kept = x.kept_bytes.sum(axis=1)
        passes_s = x.forward_s + x.forward_tensor_s + x.backward_s + x.backward_tensor_s
        recomputes = space.allows("recompute", RECOMPUTE[FULL])
        yield _Part(
            mesh, len(devices) // width, float(passes_s[0].sum()), float((x.again_s + x.weight_tensor_s)[1].sum()),
            float((x.reduce_s + x.copies_s)[0].sum()), float(x.static_bytes[0].sum()), float(kept[0]),
            float(kept[0] - kept[1]) if recomputes else 0.0, float(x.working_backward_bytes[0].max()),
        )  # fmt: skip


def _allowed(problem: SearchProblem, degree: int, level: int) -> bool:
    """Returns whether the space allows so many replicas that are copies (level 0) or share parameters at level 1."""
    space = problem.space
    if degree == 1 or not level:
        return level == 0 and space.allows("replicate", degree) and space.allows("shard", 1)
    return space.allows("sharding", 1) and space.allows("shard", degree) and space.allows("replicate", 1)


def _shapes(problem: SearchProblem, parts: tuple[_Part, ...], count: int, size: int) -> Iterator[_Shape]:
    """Yields the pipeline under every schedule that runs it, with its expected seconds."""
    places = sum(part.places for part in parts)
    if not 1 < places <= len(problem.costs.names) or not problem.space.allows("pipeline", places):
        return
    flight = min(count, places)
    pass_s = [part.pass_s for part in parts]
    missing = 0.0
    for _ in range(2):  # the second time with what the first has to recompute
        pace_s = 1.0 / sum(part.places / seconds for part, seconds in zip(parts, pass_s, strict=True))
        missing = 0.0
        for number, part in enumerate(parts):
            share, room = pace_s / pass_s[number], float(problem.room_bytes[part.mesh.devices[0]])
            over = share * (part.held_bytes + flight * part.kept_bytes) + part.working_bytes - room
            spare = share * flight * part.saved_bytes
            pass_s[number] = part.pass_s + part.again_s * min(1.0, max(0.0, over) / max(spare, 1.0))
            missing = max(missing, (over - spare) / room)
    exchange_s = max(part.exchange_s * pace_s / seconds for part, seconds in zip(parts, pass_s, strict=True))
    for schedule, chunks in WAYS:
        fits = problem.space.allows("schedule", schedule) and problem.space.allows("virtual", chunks)
        if fits and places * chunks <= len(problem.costs.names) and runs(schedule, places, chunks, count):
            unfilled = SCHEDULES[schedule].unfilled / chunks
            step_s = (count + unfilled * (places - 1)) * pace_s + exchange_s
            yield _Shape(step_s * (1.0 + max(0.0, missing)), count, size, parts, (schedule, chunks))


def _drafts(problem: SearchProblem, shape: _Shape, kinds: Mapping[str, tuple[int, ...]]) -> Iterator[Draft]:
    """Yields the drafts of a shape: kinds there and back, with balanced stages."""
    balance, (schedule, chunks) = problem.balance, shape.way
    for parts in (shape.parts, shape.parts[::-1])[: len(shape.parts)]:
        places = []
        for part in parts:
            devices, width = kinds[problem.cluster.kinds[part.mesh.devices[0]].name], len(part.mesh.devices)
            starts = range(0, part.places * width, width)
            places += [dataclasses.replace(part.mesh, devices=devices[start : start + width]) for start in starts]
        order = stage_order(len(places), schedule, chunks)
        bounds = balance.stages_on(places, order, shape.size).bounds
        yield plain_draft(
            bounds, places, order, microbatch=(shape.size,), microbatches=(shape.microbatches,), schedule=schedule
        )
