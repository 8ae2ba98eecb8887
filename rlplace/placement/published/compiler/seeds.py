"""Starts of refinement: contiguous pieces of a topological order, or streamed bands.

Bands cut the step into parts of equal work by when groups can start: with W bands, every device gets its share of each, so
that all have work at all times. One band asks for equal totals only, which a row of stages satisfies although its devices take
turns.

Fusing vertices with heavy traffic between them, so that refinement can move them together.

Vertices of one device and band are matched in pairs by heaviest traffic; chains of single consumers, whose traffic has nowhere
else to go, come out first.
"""

# Compiled functions take their types from their arguments.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlplace.compiled import entry
from rlplace.memoized import memoized
from rlplace.placement.common.groupgraph import finite_mean, group_graph
from rlplace.placement.common.oparrays import op_arrays
from rlplace.placement.published.compiler.nets import Level
from rlplace.problem import Problem
from rlplace.problem.order import longest_ways

WIDE = 32
"""Nets with more readers than this are ignored when vertices are matched."""


def match(
    level: Level, part: NDArray[np.int32], order: NDArray[np.int64], link: tuple[float, float], most_s: float
) -> NDArray[np.int32]:
    """Cluster of every vertex, numbered from 0 by first member.

    Args:
        level: The graph.
        part: int32 [G]; only vertices of one part are matched.
        order: int64 [G], order in which vertices choose their partner.
        link: Latency in seconds and seconds per byte, by which traffic is weighed.
        most_s: Largest time of a cluster on the fastest device.
    """
    nets = level.nets
    seconds = nets.tensors * link[0] + nets.size_bytes * link[1] + nets.fixed_s
    partner = np.full(len(part), -1, dtype=np.int64)
    here_s = level.time_s.min(axis=1)
    allowed = np.isfinite(level.time_s)
    _match(
        order, part, level.band, here_s, allowed, most_s, seconds, nets.source, nets.pin_ptr, nets.pins, level.source_ptr,
        level.source_nets, level.reader_ptr, level.reader_nets, partner, np.zeros(len(part)),
    )  # fmt: skip
    leader = np.where(partner >= 0, np.minimum(partner, np.arange(len(part))), np.arange(len(part)))
    return np.unique(leader, return_inverse=True)[1].astype(np.int32)


@entry
def _match(
    order, part, band, here_s, allowed, most_s, seconds, source, pin_ptr, pins, s_ptr, s_nets, r_ptr, r_nets, partner, weight
):  # fmt: skip
    """Fills `partner`; `weight` float64 [G] are zeros before and after."""
    near = np.empty(len(part), dtype=np.int64)
    for v in order:
        if partner[v] >= 0:
            continue
        count = 0
        for i in range(s_ptr[v], s_ptr[v + 1]):
            net = s_nets[i]
            readers = pin_ptr[net + 1] - pin_ptr[net]
            if readers > WIDE:
                continue
            for j in range(pin_ptr[net], pin_ptr[net + 1]):
                if weight[pins[j]] == 0.0:
                    near[count] = pins[j]
                    count += 1
                weight[pins[j]] += (seconds[net] + 1e-30) / readers
        for i in range(r_ptr[v], r_ptr[v + 1]):
            net = r_nets[i]
            readers = pin_ptr[net + 1] - pin_ptr[net]
            if readers > WIDE:
                continue
            if weight[source[net]] == 0.0:
                near[count] = source[net]
                count += 1
            weight[source[net]] += (seconds[net] + 1e-30) / readers
        best, heaviest = -1, 0.0
        for i in range(count):
            u = near[i]
            if partner[u] < 0 and u != v and part[u] == part[v] and band[u] == band[v] and weight[u] > heaviest:
                same = True  # a pair may sit wherever its members may
                for d in range(allowed.shape[1]):
                    same &= allowed[u, d] == allowed[v, d]
                if same and here_s[u] + here_s[v] <= most_s:
                    best, heaviest = u, weight[u]
            weight[u] = 0.0
        if best >= 0:
            partner[v], partner[best] = best, v


def bands(problem: Problem, count: int) -> NDArray[np.int32]:
    """Returns int32 [G], which of `count` bands of about equal work each group runs in, by the earliest start of its
    first op.
    """
    graph = group_graph(problem)
    if count <= 1 or problem.num_groups == 0:
        return np.zeros(problem.num_groups, dtype=np.int32)
    start = earliest_starts(problem)
    order = np.lexsort((np.argsort(graph.order, kind="stable"), start))
    work = np.cumsum(graph.mean_time_s[order])
    middle = work - 0.5 * graph.mean_time_s[order]
    band = np.zeros(problem.num_groups, dtype=np.int32)
    band[order] = np.minimum((middle / max(float(work[-1]), 1e-30) * count).astype(np.int32), count - 1)
    return band


@memoized
def earliest_starts(problem: Problem) -> NDArray[np.float64]:
    """Returns float64 [G], longest path of mean times before the first op of each group, transfers left out."""
    start = longest_ways(problem, finite_mean(op_arrays(problem).time_s).tolist(), backwards=False)
    first = np.full(problem.num_groups, np.inf)
    np.minimum.at(first, problem.op_group, start)
    return np.where(np.isfinite(first), first, 0.0)


def contiguous(
    time_s: NDArray[np.float64], order: NDArray[np.int32], cut_s: NDArray[np.float64], share: NDArray[np.float64], eps: float
) -> NDArray[np.int32]:
    """K contiguous pieces of an order, each cut at the least traffic within `eps` of the wanted prefix sum.

    Args:
        time_s: float64 [G], mean time of every vertex.
        order: int32 [G], vertices in the order that is cut.
        cut_s: float64 [G + 1], seconds that cross a cut before each vertex of the order, and at its end.
        share: float64 [K], share of the work of each piece.
        eps: Allowed imbalance; a cut stays within half of it, in shares of a mean piece.

    Returns:
        int32 [G], the piece of each vertex.
    """
    prefix = np.concatenate([[0.0], np.cumsum(time_s[order])])
    total, parts = float(prefix[-1]), len(share)
    aims = np.cumsum(share / share.sum())[:-1] * total
    cuts, last = [0], 0
    for k, aim in enumerate(aims.tolist()):
        slack = 0.5 * eps * total / parts
        inside = np.flatnonzero((prefix >= aim - slack) & (prefix <= aim + slack))
        inside = inside[(inside > last) & (inside <= len(order) - (parts - 1 - k))]
        if len(inside):
            last = int(inside[np.argmin(cut_s[inside])])
        else:
            last = min(max(int(np.abs(prefix - aim).argmin()), last), len(order))
        cuts.append(last)
    part = np.empty(len(order), dtype=np.int32)
    part[order] = np.repeat(np.arange(parts, dtype=np.int32), np.diff([*cuts, len(order)]))
    return part


def streamed(
    level: Level, order: NDArray[np.int32], limit: NDArray[np.float64], room: NDArray[np.float64], link: tuple[float, float]
) -> NDArray[np.int32]:
    """Returns int32 [G]: each vertex in turn goes to the cell with room that has most of its traffic with earlier ones."""
    nets = level.nets
    seconds = nets.tensors * link[0] + nets.size_bytes * link[1] + nets.fixed_s
    part = np.full(len(order), -1, dtype=np.int32)
    _stream(
        order, part, level.time_s, level.footprint_bytes, level.band, seconds, nets.source, nets.pin_ptr, nets.pins,
        level.source_ptr, level.source_nets, level.reader_ptr, level.reader_nets, limit, room,
    )  # fmt: skip
    return part


@entry
def _stream(
    order, part, time_s, footprint, band, seconds, source, pin_ptr, pins, s_ptr, s_nets, r_ptr, r_nets, limit, room
):  # fmt: skip
    devices = time_s.shape[1]
    load, used, trade = np.zeros(limit.shape), np.zeros(devices), np.zeros(devices)
    for v in order:
        trade[:] = 0.0
        for i in range(s_ptr[v], s_ptr[v + 1]):
            for j in range(pin_ptr[s_nets[i]], pin_ptr[s_nets[i] + 1]):
                if part[pins[j]] >= 0:
                    trade[part[pins[j]]] += seconds[s_nets[i]]
        for i in range(r_ptr[v], r_ptr[v + 1]):
            if part[source[r_nets[i]]] >= 0:
                trade[part[source[r_nets[i]]]] += seconds[r_nets[i]]
        best, fits = -1, False
        for d in range(devices):
            if time_s[v, d] == np.inf:
                continue
            after = load[d, band[v]] + time_s[v, d]
            room_here = after <= limit[d, band[v]] and used[d] + footprint[v] <= room[d]
            if best < 0 or (room_here and not fits):
                best, fits = d, room_here
            elif room_here == fits:
                than = load[best, band[v]] + time_s[v, best]
                if not fits:
                    closer = after < than
                elif trade[d] != trade[best]:
                    closer = trade[d] > trade[best]
                else:
                    closer = after < than
                if closer:
                    best = d
        part[v] = max(best, 0)
        load[part[v], band[v]] += time_s[v, part[v]] if best >= 0 else 0.0
        used[part[v]] += footprint[v]
