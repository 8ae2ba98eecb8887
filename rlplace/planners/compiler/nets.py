"""What the partitioner moves and what moving it costs: groups, and the nets that join them.

A *net* is all that one group sends to the same set of other groups: it pays once for every device that holds a reader and not
the sender, however many readers sit there. Nets of equal sender and readers are one net, with their bytes and counts added up.
A *level* is the graph at one coarseness: its vertices are groups, or clusters of groups that move together.

Axes: G vertices, K devices in use, N nets, P readers of nets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InfeasibleError
from rlplace.planners.common.groupgraph import group_graph
from rlplace.problem import FORWARD, Problem
from rlplace.problem.order import grouped, strong_components, topological_order


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
        time_s: float64 [G, K], inf where the vertex may not sit.
        footprint_bytes: float64 [G].
        band: int32 [G], the part of the step in which the vertex runs; load is balanced in each.
        nets: Traffic.
        source_ptr, source_nets: int64 [G + 1], int32 [N], nets by sender.
        reader_ptr, reader_nets: int64 [G + 1], int32 [P], nets by reader.
        before_ptr, before: int64 [G + 1], int32, vertices that feed the forward ops of each vertex.
        after_ptr, after: The same in the other direction.
    """

    time_s: NDArray[np.float64]
    footprint_bytes: NDArray[np.float64]
    band: NDArray[np.int32]
    nets: Nets
    source_ptr: NDArray[np.int64]
    source_nets: NDArray[np.int32]
    reader_ptr: NDArray[np.int64]
    reader_nets: NDArray[np.int32]
    before_ptr: NDArray[np.int64]
    before: NDArray[np.int32]
    after_ptr: NDArray[np.int64]
    after: NDArray[np.int32]


def problem_nets(problem: Problem) -> Nets:
    """Nets of the groups of a problem: a tensor goes once to each device that reads it."""
    groups = problem.num_groups
    tensor = problem.edge_tensor.astype(np.int64)
    producer, owner = problem.tensor_producer, problem.tensor_owner
    holder = np.where(producer >= 0, problem.op_group[np.maximum(producer, 0)], owner).astype(np.int64)
    reader = problem.op_group[problem.consumers].astype(np.int64)
    apart = holder[tensor] != reader
    pairs = np.unique(tensor[apart] * groups + reader[apart])
    tensor, reader = pairs // max(groups, 1), pairs % max(groups, 1)
    size, count = problem.tensor_bytes.astype(np.float64), np.ones(problem.num_tensors)
    fixed = np.zeros(problem.num_tensors)
    off = ~np.eye(problem.num_devices, dtype=bool)
    for number, table in problem.tensor_transfer_s.items():
        size[number], count[number] = 0.0, 0.0
        fixed[number] = float(table[off].mean()) if off.any() else 0.0
    return _joined(holder, tensor, reader, size, count, fixed)


def _joined(
    holder: NDArray[np.int64],
    tensor: NDArray[np.int64],
    reader: NDArray[np.int64],
    size: NDArray[np.float64],
    count: NDArray[np.float64],
    fixed: NDArray[np.float64],
) -> Nets:
    """Nets of (tensor, reader) pairs in order of the tensor; equal ones become one."""
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


def finest_level(problem: Problem, devices: Sequence[int], nets: Nets, band: NDArray[np.int32], *, stages: bool) -> Level:
    """The level whose vertices are groups.

    Args:
        problem: The problem.
        devices: The K devices in use.
        nets: Traffic between groups.
        band: int32 [G].
        stages: Whether the order of forward ops between groups matters.
    """
    graph = group_graph(problem)
    pairs = forward_pairs(problem) if stages else np.zeros((2, 0), dtype=np.int64)
    time_s = np.ascontiguousarray(graph.time_s[:, list(devices)])
    return make_level(time_s, graph.footprint_bytes.astype(np.float64), band, nets, pairs)


def make_level(
    time_s: NDArray[np.float64],
    footprint_bytes: NDArray[np.float64],
    band: NDArray[np.int32],
    nets: Nets,
    pairs: NDArray[np.int64],
) -> Level:
    """Adds the indices by vertex; `pairs` are int64 [2, E] vertices of which the first feeds the second."""
    count = len(footprint_bytes)
    net_of_pin = np.repeat(np.arange(len(nets.source)), np.diff(nets.pin_ptr))
    by_vertex = (nets.source, np.arange(len(nets.source))), (nets.pins, net_of_pin), (pairs[1], pairs[0]), (pairs[0], pairs[1])
    rows: list[Any] = [grouped(key, entry.astype(np.int32), count) for key, entry in by_vertex]
    return Level(time_s, footprint_bytes, band, nets, *(array for row in rows for array in row))


def contract_nets(level: Level, cluster: NDArray[np.int32]) -> Level:
    """The next coarser level: vertices of equal `cluster`, int32 [G] numbered from 0, become one."""
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
    feeds = np.repeat(np.arange(len(cluster)), np.diff(level.after_ptr))
    ordered = np.stack([cluster[feeds], cluster[level.after]]).astype(np.int64)
    ordered = np.unique(ordered[:, ordered[0] != ordered[1]], axis=1)
    return make_level(time_s, size, band, coarse, ordered)


def forward_pairs(problem: Problem) -> NDArray[np.int64]:
    """int64 [2, E], distinct pairs of groups of which a forward op of the first feeds one of the second."""
    source, reader = problem.op_edges
    both = (problem.op_phase[source] == FORWARD) & (problem.op_phase[reader] == FORWARD)
    a, b = problem.op_group[source[both]].astype(np.int64), problem.op_group[reader[both]].astype(np.int64)
    return np.unique(np.stack([a, b])[:, a != b], axis=1)


def staged_order(problem: Problem) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Vertices for stages: groups whose forward ops feed each other in a circle are one, as tied weights make them.

    Returns:
        int32 [G], vertex of every group, numbered so that forward ops read from vertices of lower number; and int32 [G], groups
        in order of their vertices.
    """
    groups, order = problem.num_groups, group_graph(problem).order
    a, b = forward_pairs(problem)
    part = strong_components(groups, a, b)
    first = {circle: i for i, circle in enumerate(dict.fromkeys(part[order].tolist()))}  # by first member
    number = np.array([first[circle] for circle in part.tolist()], dtype=np.int64)
    apart = number[a] != number[b]
    ranked, _ = topological_order(number[a][apart], number[b][apart], len(first))
    vertex = np.argsort(ranked).astype(np.int32)[number]
    return vertex, order[np.argsort(vertex[order], kind="stable")]


def in_order(level: Level, part: NDArray[np.int32], names: Sequence[str]) -> NDArray[np.int32]:
    """The stages nearest to `part` that respect null times and the order of stages.

    Args:
        level: The graph, vertices in topological order.
        part: int32 [G], stages wished for.
        names: Names of the devices, in order of the stages.

    Raises:
        InfeasibleError: A vertex must sit on an earlier stage than one that feeds it.
    """
    allowed = np.isfinite(level.time_s)
    count, stages = allowed.shape
    latest = np.full(count, stages - 1)
    for v in range(count - 1, -1, -1):
        after = level.after[level.after_ptr[v] : level.after_ptr[v + 1]]
        top = int(latest[after].min(initial=stages - 1))
        possible = np.flatnonzero(allowed[v, : top + 1])
        if len(possible) == 0:
            raise InfeasibleError(
                f"stages: what follows a group must run on {names[top]} or before it, where the group cannot run; order the "
                "devices differently, or leave stages out"
            )
        latest[v] = possible[-1]
    stage = part.copy()
    for v in range(count):
        before = level.before[level.before_ptr[v] : level.before_ptr[v + 1]]
        low = int(stage[before].max(initial=0))
        possible = low + np.flatnonzero(allowed[v, low : latest[v] + 1])
        stage[v] = possible[np.abs(possible - part[v]).argmin()]
    return stage
