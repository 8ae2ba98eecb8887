"""Starts of the search from published planners, each as its own objective cuts the chain of blocks.

* GPipe (Huang et al., NeurIPS 2019): stages of equal cost, four micro-batches a stage, all forwards first.
* PipeDream (Narayanan et al., SOSP 2019): stages with replicas of their own, the slowest as quick as it can be; the paper's
  formulas, over blocks and, as the record of strategies asks, degrees that divide the largest.
* The compiler partition (Tavarageri et al., 2019): loads nearly equal, the least bytes over the cuts.
* DLPlacer's hybrid (Pal et al., IEEE Micro 2019): replicas of several devices that pass one micro-batch on.

PaSE's layouts are those of the tensor axis. Recomputation and offload, which these leave open, are fitted as for all drafts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from rlplace.plan.schedule import GPIPE, ONE_F_ONE_B
from rlplace.strategy.costs import Cut, Floats
from rlplace.strategy.drafts import Devices, Draft, Mesh, plain_draft
from rlplace.strategy.search.cuts import walked_back
from rlplace.strategy.search.shapes import divisors, equal_shares
from rlplace.strategy.search.stages import MOST_UNITS, orders
from rlplace.strategy.search.tries import SearchProblem

MICROBATCHES = 4
"""GPipe's micro-batches for every stage."""

IMBALANCES = (0.05, 0.3)
"""Excess over the best balance that the slowest stage of the compiler partition may have."""


def published_starts(problem: SearchProblem) -> Iterator[Draft]:
    """Yields drafts of published planners where they have one, without recomputation."""
    for devices in orders(problem):
        if problem.devices is not None:
            devices = Devices(device for device in devices if device in problem.devices)
        for count in divisors(len(devices))[1:]:
            if count <= len(problem.costs.names):
                yield from _equal(problem, devices, count)
        for degree in divisors(problem.batch):
            if degree <= len(devices):
                yield from _pipedream(problem, devices, degree)


def _equal(problem: SearchProblem, devices: tuple[int, ...], count: int) -> Iterator[Draft]:
    """Yields GPipe's, the compiler's and DLPlacer's starts with so many stages, each with the same number of replicas."""
    degree, balance = len(devices) // count, problem.balance
    widths, order = [degree] * count, tuple(range(count))
    kinds = balance.kinds(devices, count)
    for spread in _microbatches(problem, degree, MICROBATCHES * count):
        cut, passes = Cut(spread[0]), spread[1]
        if balance.can_cut(cut):
            even = balance.stages(kinds, cut, order)
            yield _chain(devices, widths, even.bounds, spread, GPIPE)
            if passes >= count:
                seconds = np.array([balance.pass_s(own, cut) for own in kinds])
                for more in IMBALANCES:
                    limit_s = (1 + more) * max(even.taken_s)
                    bounds = least_traffic(seconds, problem.costs.passes(0, cut).sent_bytes.astype(float), limit_s)
                    yield _chain(devices, widths, bounds, spread, ONE_F_ONE_B)
    whole = problem.batch // degree
    if problem.batch % degree == 0 and balance.can_cut(Cut(whole)):
        yield _chain(devices, widths, balance.stages(kinds, Cut(whole), order).bounds, (whole, 1), GPIPE)


def least_traffic(seconds: Floats, sent_bytes: Floats, limit_s: float) -> tuple[int, ...]:
    """Cuts blocks into parts that take no longer than a limit, with the least bytes over all cuts.

    Args:
        seconds: float64 [K, B], of every block in every part.
        sent_bytes: float64 [B], over a cut behind a block.
        limit_s: Of a part; some cuts respect it.

    Returns:
        The first block of every part, and B.
    """
    parts, blocks = seconds.shape
    ends = np.concatenate([np.zeros((parts, 1)), np.cumsum(seconds, axis=1)], axis=1)
    cost = np.where(np.arange(blocks + 1) == 0, 0.0, np.inf)  # by where the parts so far end
    crossing = np.concatenate([[0.0], sent_bytes])  # by where a part begins
    starts = []
    for part in range(parts):
        part_s = ends[part][None, :] - ends[part][:, None]  # [start, end]
        allowed = (part_s <= limit_s * (1 + 1e-12)) & ~np.tri(blocks + 1, dtype=bool)
        reached = np.where(allowed, (cost + (crossing if part else 0.0))[:, None], np.inf)
        starts.append(reached.argmin(axis=0))
        cost = reached.min(axis=0)
    return walked_back(starts, blocks)


def _pipedream(problem: SearchProblem, devices: tuple[int, ...], degree: int) -> Iterator[Draft]:
    """Yields PipeDream's stages with so many replicas at most."""
    together, balance = -(-len(devices) // MOST_UNITS), problem.balance
    units, links = len(devices) // together, problem.cluster.links
    if degree % together or len(devices) < 2:
        return
    bandwidth = float(links.rates(devices[:-1], devices[1:])[0].min())
    for spread in _microbatches(problem, degree, MICROBATCHES * max(2, len(devices) // degree)):
        cut, passes = Cut(spread[0]), spread[1]
        if bandwidth > 0 and balance.can_cut(cut):
            seconds = degree * balance.pass_s(balance.kinds(devices, 1)[0], cut) / together
            sent = degree * problem.costs.passes(0, cut).sent_bytes / together
            weights = problem.costs.held().weight_bytes.astype(float)
            bounds, replicas = replicated_stages(seconds, weights / bandwidth, sent / bandwidth, units, degree // together)
            if max(replicas) * together == degree and 1 < len(replicas) <= passes:
                yield _chain(devices, [together * own for own in replicas], bounds, spread, ONE_F_ONE_B)


def replicated_stages(
    seconds: Floats, weights_s: Floats, sent_s: Floats, machines: int, degree: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Computes PipeDream's table: the slowest stage or stage transfer of a minibatch as quick as it can be.

    Args:
        seconds: float64 [B], forward and backward of a minibatch on one machine.
        weights_s: float64 [B], to send a block's weights.
        sent_s: float64 [B], to send a minibatch over a cut behind a block.
        machines: Most machines; some may stay unused.
        degree: Replicas of stages divide it.

    Returns:
        First block of every stage, and B; replicas of every stage.
    """
    blocks, ways = len(seconds), [own for own in divisors(degree) if own <= machines]
    inside = ~np.tri(blocks + 1, dtype=bool)
    work, held = (np.concatenate([[0.0], np.cumsum(values)]) for values in (seconds, weights_s))
    crossing = np.concatenate([[0.0], sent_s])
    work, held = (values[None, :] - values[:, None] for values in (work, held))  # [start, end]
    stage = {own: np.where(inside, (work + 4 * (own - 1) / own * held) / own, np.inf) for own in ways}
    best = np.full((machines + 1, blocks + 1), np.inf)  # of the first blocks, on so many machines
    best[:, 0] = 0.0
    choice = np.zeros((machines + 1, blocks + 1, 2), dtype=np.int64)  # where the last stage begins, and its replicas
    for count in range(1, machines + 1):
        for own in (own for own in ways if own <= count):
            before = np.maximum(best[count - own], 2 * crossing / own)
            before[0] = 0.0
            reached = np.maximum(before[:, None], stage[own])
            start = reached.argmin(axis=0)
            slowest = reached[start, np.arange(blocks + 1)]
            better = slowest < best[count]
            best[count, better] = slowest[better]
            choice[count, better] = np.stack([start, np.full(blocks + 1, own)], axis=1)[better]
    count, bounds, replicas = int(best[:, blocks].argmin()), [blocks], list[int]()
    while bounds[-1] > 0:
        start, own = choice[count, bounds[-1]].tolist()
        bounds.append(start)
        replicas.append(own)
        count -= own
    return tuple(reversed(bounds)), tuple(reversed(replicas))


def _microbatches(problem: SearchProblem, degree: int, wanted: int) -> list[tuple[int, int]]:
    """Returns the equal shares of so many replicas whose number of micro-batches is nearest to the wanted one, if any."""
    spreads = [(sizes[0], counts[0]) for sizes, counts in equal_shares(problem.batch, degree, problem.space)]
    return sorted(spreads, key=lambda spread: abs(math.log(spread[1] / wanted)))[:1]


def _chain(devices: Sequence[int], widths: Sequence[int], bounds: tuple[int, ...], spread: tuple[int, int], name: str) -> Draft:
    """Returns stages of so many copies each, on consecutive devices."""
    ends = np.cumsum([0, *widths]).tolist()
    places = tuple(Mesh(tuple(devices[a:b]), replicate=b - a) for a, b in pairwise(ends))
    return plain_draft(bounds, places, microbatch=spread[:1], microbatches=spread[1:], schedule=name)
