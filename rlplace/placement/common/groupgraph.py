"""The group graph: times, memory and traffic of groups, as arrays.

Planners place groups, but a problem lists ops and tensors. This module sums ops up to groups once per problem and keeps the
result while the problem lives.

Axes: D devices, G groups, M merged edges between two different groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlplace.memoized import memoized
from rlplace.problem import BACKWARD, FORWARD, Problem
from rlplace.problem.contract import crossing, merged_edges
from rlplace.problem.order import grouped, topological_order


@dataclass(frozen=True, eq=False)
class GroupGraph:
    """Groups and the traffic between them.

    Attributes:
        time_s: float64 [G, D], summed op times; inf where the group is not allowed.
        mean_time_s: float64 [G], mean of `time_s` over the devices that can run the group.
        footprint_bytes: int64 [G], resident bytes plus the outputs of forward ops that backward ops read: an estimate of
            what the group adds to its device's peak.
        order: int32 [G], groups by their earliest op in the problem's topological order.
        depth_first_order: int32 [G], a topological order of the same graph that finishes a branch before it starts the next.
        source, target: int32 [M], directed edges, every pair at most once.
        edge_bytes: float64 [M], bytes that cross when the two groups sit apart; a tensor counts once per reading group.
        edge_count: float64 [M], number of those tensors.
        edge_fixed_s: float64 [M], seconds of tensors that have their own transfer times (mean over device pairs).
        neighbor_ptr: int64 [G + 1], row offsets of the undirected graph.
        neighbor: int32 [2 M], other end of each undirected entry.
        neighbor_edge: int32 [2 M], the entry's index in the directed arrays.
        neighbor_out: bool [2 M], whether the row's group is the sender.
    """

    time_s: NDArray[np.float64]
    mean_time_s: NDArray[np.float64]
    footprint_bytes: NDArray[np.int64]
    order: NDArray[np.int32]
    depth_first_order: NDArray[np.int32]
    source: NDArray[np.int32]
    target: NDArray[np.int32]
    edge_bytes: NDArray[np.float64]
    edge_count: NDArray[np.float64]
    edge_fixed_s: NDArray[np.float64]
    neighbor_ptr: NDArray[np.int64]
    neighbor: NDArray[np.int32]
    neighbor_edge: NDArray[np.int32]
    neighbor_out: NDArray[np.bool_]

    def edge_s(self, latency_s: float, inverse_bandwidth: float) -> NDArray[np.float64]:
        """Returns float64 [M], seconds of every edge over a link of the given latency and seconds per byte, without waiting."""
        return self.edge_count * latency_s + self.edge_bytes * inverse_bandwidth + self.edge_fixed_s

    def crossing_s(self, order: NDArray[np.int32], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns float64 [G + 1], the sum of `seconds` [M] over the edges that cross a cut before each group of an order, and
        after the last.
        """
        position = np.argsort(order)
        at, to = position[self.source], position[self.target]
        opens = np.bincount(np.minimum(at, to) + 1, weights=seconds, minlength=len(order) + 2)
        closes = np.bincount(np.maximum(at, to) + 1, weights=seconds, minlength=len(order) + 2)
        return np.cumsum(opens - closes)[: len(order) + 1]


def finite_links(problem: Problem) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns latency in seconds and seconds per byte, float64 [D, D] each and 0 on the diagonal; a missing link has 1000 times
    the worst one, for estimates that must stay finite.
    """
    latency = problem.links.latency_s.copy()
    with np.errstate(divide="ignore"):
        inverse: NDArray[np.float64] = 1.0 / problem.links.bandwidth_bytes_per_s
    np.fill_diagonal(latency, 0.0)
    np.fill_diagonal(inverse, 0.0)
    missing = ~np.isfinite(inverse)
    if missing.any():
        worst = inverse[~missing].max(initial=0.0)
        inverse[missing] = 1000.0 * worst if worst > 0 else 1e-6
        latency[missing] = 1000.0 * latency.max(initial=1e-5)
    return latency, inverse


def mean_link(problem: Problem) -> tuple[float, float]:
    """Returns mean latency in seconds and mean seconds per byte over the links that exist; zeros for a single device."""
    exists = (problem.links.bandwidth_bytes_per_s > 0) & ~np.eye(problem.num_devices, dtype=bool)
    if not exists.any():
        return 0.0, 0.0
    return float(problem.links.latency_s[exists].mean()), float((1.0 / problem.links.bandwidth_bytes_per_s[exists]).mean())


def mean_transfer_s(problem: Problem) -> NDArray[np.float64]:
    """Returns float64 [T], seconds of every tensor over the mean link, or the mean of its own times."""
    latency, inverse = mean_link(problem)
    size, count, fixed = tensor_traffic(problem)
    return count * latency + size * inverse + fixed


def tensor_traffic(problem: Problem) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Returns float64 [T] each: bytes, and 1; 0 and 0 for a tensor with times of its own; and the mean of these, 0 for all
    others.
    """
    size, count, fixed = problem.tensor_bytes.astype(np.float64), np.ones(problem.num_tensors), np.zeros(problem.num_tensors)
    apart = ~np.eye(problem.num_devices, dtype=bool)
    for tensor, table in problem.tensor_transfer_s.items():
        size[tensor], count[tensor] = 0.0, 0.0
        fixed[tensor] = table[apart].mean() if apart.any() else 0.0
    return size, count, fixed


def finite_mean(values: NDArray[np.float64], axis: int = 1) -> NDArray[np.float64]:
    """Returns mean of the finite numbers along an axis; 0 where there is none."""
    finite = np.isfinite(values)
    return np.where(finite, values, 0.0).sum(axis=axis) / np.maximum(finite.sum(axis=axis), 1)


class Traffic(NamedTuple):
    """Costs of transfers between groups, for compiled loops; see `GroupGraph`."""

    ptr: Any  # int64 [G + 1], row offsets
    neighbor: Any  # int32 [2 M]
    edge: Any  # int32 [2 M]
    out: Any  # bool [2 M]
    size: Any  # float64 [M] bytes
    count: Any  # float64 [M] tensors
    fixed: Any  # float64 [M] seconds
    latency: Any  # float64 [D, D] seconds
    inverse: Any  # float64 [D, D] seconds per byte


@memoized
def traffic(problem: Problem) -> Traffic:
    """Returns the costs of transfers between the groups of a problem."""
    graph = group_graph(problem)
    rows = graph.neighbor_ptr, graph.neighbor, graph.neighbor_edge, graph.neighbor_out
    return Traffic(*rows, graph.edge_bytes, graph.edge_count, graph.edge_fixed_s, *finite_links(problem))


@memoized
def group_graph(problem: Problem) -> GroupGraph:
    """Returns the group graph of a problem, built on first use and kept while the problem lives."""
    groups = problem.num_groups
    reader = problem.op_group[problem.consumers]
    # A tensor is sent once to a device, however many ops of a group read it there.
    tensor, to = crossing(problem.edge_tensor, reader, problem.edge_source_group != reader, groups)
    values = (column[tensor] for column in tensor_traffic(problem))
    source, target, size, count, fixed = merged_edges(problem.tensor_group[tensor], to, groups, *values)
    source, target, edges = source.astype(np.int32), target.astype(np.int32), len(source)
    neighbor_ptr, perm = grouped(np.concatenate([source, target]), np.arange(2 * edges), groups)
    saved = np.flatnonzero(kept_for_backward(problem))
    footprint = problem.resident_bytes.copy()
    np.add.at(footprint, problem.op_group[problem.tensor_producer[saved]], problem.tensor_bytes[saved])
    earliest = np.full(groups, problem.num_ops, dtype=np.int64)
    np.minimum.at(earliest, problem.op_group, np.argsort(problem.topological_order))
    order = np.argsort(earliest, kind="stable").astype(np.int32)
    # The edges that agree with `order` have a topological order; the group that became ready last goes first.
    position = np.argsort(order)
    forward = position[source] < position[target]
    ranked, _ = topological_order(position[source[forward]], position[target[forward]], groups, depth_first=True)
    return GroupGraph(
        time_s=problem.group_time_s,
        mean_time_s=finite_mean(problem.group_time_s),
        footprint_bytes=footprint,
        order=order,
        depth_first_order=order[ranked],
        source=source,
        target=target,
        edge_bytes=size,
        edge_count=count,
        edge_fixed_s=fixed,
        neighbor_ptr=neighbor_ptr,
        neighbor=np.concatenate([target, source])[perm],
        neighbor_edge=(perm % max(edges, 1)).astype(np.int32),
        neighbor_out=perm < edges,
    )


def kept_for_backward(problem: Problem) -> NDArray[np.bool_]:
    """Returns bool [T], tensors that forward ops make and backward ops read."""
    producer = problem.tensor_producer[problem.edge_tensor]
    from_forward = (producer >= 0) & (problem.op_phase[np.maximum(producer, 0)] == FORWARD)
    kept = np.zeros(problem.num_tensors, dtype=bool)
    kept[problem.edge_tensor[from_forward & (problem.op_phase[problem.consumers] >= BACKWARD)]] = True
    return kept
