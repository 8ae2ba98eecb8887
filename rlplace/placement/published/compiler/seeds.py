"""Starts of refinement: contiguous pieces of a topological order, or streamed bands.

Bands cut the step into parts of equal work by when groups can start: with W bands, every device gets its share of each, so
that all have work at all times. One band asks for equal totals only, which a row of stages satisfies although its devices take
turns.
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
    """Cuts an order into K contiguous pieces, each cut at the least traffic within `eps` of the wanted prefix sum.

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
    return _stream(order, level, level.nets.seconds(*link), limit, room)


@entry
def _stream(order, g, seconds, limit, room):
    part = np.full(len(order), -1, dtype=np.int32)
    source, pin_ptr, pins = g.nets.source, g.nets.pin_ptr, g.nets.pins
    s_ptr, s_nets, r_ptr, r_nets = g.source_ptr, g.source_nets, g.reader_ptr, g.reader_nets
    time_s, footprint, band = g.time_s, g.footprint_bytes, g.band
    devices = time_s.shape[1]
    load, used, trade = np.zeros(limit.shape), np.zeros(devices), np.zeros(devices)
    for v in order:
        trade[:] = 0.0
        for net in s_nets[s_ptr[v] : s_ptr[v + 1]]:
            for pin in pins[pin_ptr[net] : pin_ptr[net + 1]]:
                if part[pin] >= 0:
                    trade[part[pin]] += seconds[net]
        for net in r_nets[r_ptr[v] : r_ptr[v + 1]]:
            if part[source[net]] >= 0:
                trade[part[source[net]]] += seconds[net]
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
    return part
