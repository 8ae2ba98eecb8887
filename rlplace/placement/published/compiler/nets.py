"""The graph that the partitioner cuts: groups, and the nets that join them.

A *net* is all that one group sends to the same set of other groups: it pays once for every device that holds a reader and not
the sender, however many readers sit there. Nets of equal sender and readers are one net, with their bytes and counts added up.
A *level* is the graph at one coarseness: its vertices are groups, or clusters of groups that move together.

Axes: G vertices, K devices in use, N nets, P readers of nets.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlplace.placement.common.groupgraph import tensor_traffic
from rlplace.problem import Problem
from rlplace.problem.order import grouped


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


def problem_nets(problem: Problem) -> Nets:
    """Returns nets of the groups of a problem: a tensor goes once to each device that reads it, and equal nets are one."""
    groups = problem.num_groups
    tensor = problem.edge_tensor.astype(np.int64)
    holder = problem.tensor_group.astype(np.int64)
    reader = problem.op_group[problem.consumers].astype(np.int64)
    apart = holder[tensor] != reader
    pairs = np.unique(tensor[apart] * groups + reader[apart])
    tensor, reader = pairs // max(groups, 1), pairs % max(groups, 1)
    size, count, fixed = tensor_traffic(problem)
    used, first = np.unique(tensor, return_index=True)
    ends = np.append(first[1:], len(tensor))[: len(used)]
    rows: dict[tuple[int, bytes], int] = {}
    which = np.empty(len(used), dtype=np.int64)
    for i, (number, begin, end) in enumerate(zip(used.tolist(), first.tolist(), ends.tolist(), strict=True)):
        which[i] = rows.setdefault((int(holder[number]), reader[begin:end].tobytes()), len(rows))
    kept = [np.frombuffer(key, dtype=np.int64) for _, key in rows]
    lengths = np.array([len(pins) for pins in kept], dtype=np.int64)
    return Nets(
        source=np.array([source for source, _ in rows], dtype=np.int32),
        pin_ptr=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        pins=np.concatenate([*kept, np.zeros(0, dtype=np.int64)]).astype(np.int32),
        size_bytes=np.bincount(which, weights=size[used], minlength=len(rows)).astype(np.float64),
        tensors=np.bincount(which, weights=count[used], minlength=len(rows)).astype(np.float64),
        fixed_s=np.bincount(which, weights=fixed[used], minlength=len(rows)).astype(np.float64),
    )


def make_level(time_s: NDArray[np.float64], footprint_bytes: NDArray[np.float64], band: NDArray[np.int32], nets: Nets) -> Level:
    """Adds the indices by vertex."""
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
    source = cluster[nets.source].astype(np.int64)
    net = np.repeat(np.arange(len(source)), np.diff(nets.pin_ptr))
    pin = cluster[nets.pins].astype(np.int64)
    apart = pin != source[net]
    pairs = np.unique(net[apart] * max(count, 1) + pin[apart])
    net, pin = pairs // max(count, 1), pairs % max(count, 1)
    kept, first = np.unique(net, return_index=True)
    coarse = Nets(
        source=source[kept].astype(np.int32),
        pin_ptr=np.append(first, len(net)).astype(np.int64),
        pins=pin.astype(np.int32),
        size_bytes=nets.size_bytes[kept],
        tensors=nets.tensors[kept],
        fixed_s=nets.fixed_s[kept],
    )
    return make_level(time_s, size, band, coarse)
