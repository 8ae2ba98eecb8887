"""The graph that the partitioner cuts: groups, the nets that join them, and how vertices fuse.

A *net* is all that one group sends to the same set of other groups: it pays once for every device that holds a reader and not
the sender, however many readers sit there. Nets of equal sender and readers are one net, with their bytes and counts added up.
A *level* is the graph at one coarseness: its vertices are groups, or clusters of groups that move together. Vertices of one
device and band are matched in pairs by heaviest traffic; chains of single consumers, whose traffic has nowhere else to go, come
out first.

Axes: G vertices, K devices in use, N nets, P readers of nets.
"""

# Compiled functions take their types from their arguments.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlplace.compiled import entry
from rlplace.memoized import memoized
from rlplace.placement.common.groupgraph import tensor_traffic
from rlplace.problem import Problem
from rlplace.problem.contract import alike, crossing
from rlplace.problem.order import grouped

WIDE = 32
"""Nets with more readers than this are ignored when vertices are matched."""


class Nets(NamedTuple):
    """Traffic between vertices.

    Attributes:
        source: int32 [N], vertex that sends.
        pin_ptr: int64 [N + 1], offsets of each net's readers.
        pins: int32 [P], vertices that read, distinct within a net and never its source.
        size_bytes, tensors, fixed_s: float64 [N], bytes, tensors and seconds that do not depend on the link.
    """

    source: NDArray[np.int32]
    pin_ptr: NDArray[np.int64]
    pins: NDArray[np.int32]
    size_bytes: NDArray[np.float64]
    tensors: NDArray[np.float64]
    fixed_s: NDArray[np.float64]

    def seconds(self, latency_s: float, inverse_bandwidth: float) -> NDArray[np.float64]:
        """Returns float64 [N], seconds of every net over a link of the given latency and seconds per byte."""
        return self.tensors * latency_s + self.size_bytes * inverse_bandwidth + self.fixed_s


class Level(NamedTuple):
    """The graph at one coarseness.

    Attributes:
        time_s: float64 [G, K], seconds on each device, inf where the vertex is not allowed.
        footprint_bytes: float64 [G], memory of each vertex.
        band: int32 [G], the part of the step in which the vertex runs; load is balanced in each.
        nets: Traffic between vertices.
        source_ptr, source_nets: int64 [G + 1], int32 [N], nets by sender.
        reader_ptr, reader_nets: int64 [G + 1], int32 [P], nets by reader.
    """

    time_s: NDArray[np.float64]
    footprint_bytes: NDArray[np.float64]
    band: NDArray[np.int32]
    nets: Nets
    source_ptr: NDArray[np.int64]
    source_nets: NDArray[np.int32]
    reader_ptr: NDArray[np.int64]
    reader_nets: NDArray[np.int32]


@memoized
def problem_nets(problem: Problem) -> Nets:
    """Returns nets of the groups of a problem: a tensor goes once to each device that reads it, and equal nets are one."""
    holder, reader = problem.tensor_group, problem.op_group[problem.consumers]
    pairs = crossing(problem.edge_tensor, reader, holder[problem.edge_tensor] != reader, problem.num_groups)
    used, net, rows = alike(*pairs, holder)
    size, count, fixed = (
        np.bincount(net, weights=values[used], minlength=len(rows)).astype(np.float64) for values in tensor_traffic(problem)
    )
    return Nets(
        source=np.array([source for source, _ in rows], dtype=np.int32),
        pin_ptr=np.cumsum([0, *(len(pins) for _, pins in rows)], dtype=np.int64),
        pins=np.array([pin for _, pins in rows for pin in pins], dtype=np.int32),
        size_bytes=size,
        tensors=count,
        fixed_s=fixed,
    )


def make_level(time_s: NDArray[np.float64], footprint_bytes: NDArray[np.float64], band: NDArray[np.int32], nets: Nets) -> Level:
    """Returns a level: a graph with the indices of its nets by vertex."""
    count = len(footprint_bytes)
    net_of_pin = np.repeat(np.arange(len(nets.source)), np.diff(nets.pin_ptr))
    by_vertex = (nets.source, np.arange(len(nets.source))), (nets.pins, net_of_pin)
    rows: list[Any] = [grouped(key, entry.astype(np.int32), count) for key, entry in by_vertex]
    return Level(time_s, footprint_bytes, band, nets, *(array for row in rows for array in row))


def contract_nets(level: Level, cluster: NDArray[np.int32]) -> Level:
    """Returns the next coarser level: vertices of equal `cluster`, int32 [G] numbered from 0, become one."""
    count = int(cluster.max(initial=-1)) + 1
    time_s = np.zeros((count, level.time_s.shape[1]))
    np.add.at(time_s, cluster, level.time_s)
    size = np.bincount(cluster, weights=level.footprint_bytes, minlength=count).astype(np.float64)
    band = np.zeros(count, dtype=np.int32)
    band[cluster] = level.band
    nets = level.nets
    source, pins = cluster[nets.source], cluster[nets.pins]
    of_pin = np.repeat(np.arange(len(source)), np.diff(nets.pin_ptr))
    net, pin = crossing(of_pin, pins, pins != source[of_pin], count)
    kept, first = np.unique(net, return_index=True)
    coarse = Nets(
        source=source[kept],
        pin_ptr=np.append(first, len(net)).astype(np.int64),
        pins=pin.astype(np.int32),
        size_bytes=nets.size_bytes[kept],
        tensors=nets.tensors[kept],
        fixed_s=nets.fixed_s[kept],
    )
    return make_level(time_s, size, band, coarse)


def match(
    level: Level, part: NDArray[np.int32], order: NDArray[np.int64], link: tuple[float, float], most_s: float
) -> NDArray[np.int32]:
    """Returns int32 [G], the cluster of every vertex, numbered from 0 by first member.

    Args:
        level: The graph.
        part: int32 [G]; only vertices of one part are matched.
        order: int64 [G], order in which vertices choose their partner.
        link: Latency in seconds and seconds per byte, by which traffic is weighed.
        most_s: Largest time of a cluster on the fastest device.
    """
    partner = _match(order, part, level, level.nets.seconds(*link), level.time_s.min(axis=1), most_s)
    leader = np.where(partner >= 0, np.minimum(partner, np.arange(len(part))), np.arange(len(part)))
    return np.unique(leader, return_inverse=True)[1].astype(np.int32)


@entry
def _match(order, part, g, seconds, here_s, most_s):
    """Returns int64 [G], the partner of each vertex, -1 for none."""
    weight, near, partner = np.zeros(len(part)), np.empty(len(part), dtype=np.int64), np.full(len(part), -1, dtype=np.int64)
    source, pin_ptr, pins = g.nets.source, g.nets.pin_ptr, g.nets.pins
    s_ptr, s_nets, r_ptr, r_nets = g.source_ptr, g.source_nets, g.reader_ptr, g.reader_nets
    band, time_s = g.band, g.time_s
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
                for d in range(time_s.shape[1]):
                    same &= (time_s[u, d] < np.inf) == (time_s[v, d] < np.inf)
                if same and here_s[u] + here_s[v] <= most_s:
                    best, heaviest = u, weight[u]
            weight[u] = 0.0
        if best >= 0:
            partner[v], partner[best] = best, v
    return partner
