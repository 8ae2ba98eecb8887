"""The graph that ParDNN cuts: weighted nodes, weighted edges, and the group of each node.

Two views of a problem. `op_graph`: a node per op, and one of no time for every parameter that other groups read (the paper's
variable nodes). `folded_graph`: a node per group, for problems whose groups hold forward and backward ops; an edge then costs
the activation one way and the gradient the other.

Axes: V nodes, E edges, K devices in use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlplace.placement.common.groupgraph import finite_links, finite_mean, group_graph
from rlplace.problem import Problem
from rlplace.problem.contract import merged_edges
from rlplace.problem.order import grouped


class Edges(NamedTuple):
    """Edges by source: those of node v are the entries from ``ptr[v]`` up to ``ptr[v + 1]``."""

    ptr: Any  # int64 [V + 1]
    node: Any  # int32 [E], where each edge ends
    cost: Any  # float64 [E] seconds


@dataclass(frozen=True, eq=False)
class NodeGraph:
    """Nodes and edges with the costs of one set of devices.

    Attributes:
        devices: K device numbers of the problem; column k of `time_s` is device ``devices[k]``.
        group: int32 [V], group of each node.
        time_s: float64 [V, K], inf where the node's group is not allowed.
        weight_s: float64 [V], mean of the finite entries of `time_s`; 0 where there is none.
        order: int32 [V], nodes in topological order.
        source, target: int32 [E], ends of the edges.
        cost_s: float64 [E], latency and transfer of the edge between two devices (mean over the links in use).
        footprint_bytes: float64 [V], a group's footprint (`rlplace.placement.common.groupgraph`), at its heaviest node.
        distance: float64 [K, K], transfer time of a mean tensor between two devices relative to the mean over all pairs; 1
            off the diagonal where links are equal, 0 on it.
        parcel: int64 [E]; edges of one number carry the same tensor, which goes to a device once.
    """

    devices: tuple[int, ...]
    group: NDArray[np.int32]
    time_s: NDArray[np.float64]
    weight_s: NDArray[np.float64]
    order: NDArray[np.int32]
    source: NDArray[np.int32]
    target: NDArray[np.int32]
    cost_s: NDArray[np.float64]
    parcel: NDArray[np.int64]
    footprint_bytes: NDArray[np.float64]
    distance: NDArray[np.float64]

    @property
    def num_nodes(self) -> int:
        return len(self.group)

    @cached_property
    def out(self) -> Edges:
        """The edges by source."""
        ptr, edge = grouped(self.source, np.arange(len(self.source)), self.num_nodes)
        return Edges(ptr, self.target[edge], self.cost_s[edge])

    @cached_property
    def restricted(self) -> NDArray[np.bool_]:
        """Boolean [V], nodes that cannot go to every device in use."""
        return np.asarray(~np.isfinite(self.time_s).all(axis=1))


def op_graph(problem: Problem, devices: Sequence[int]) -> NodeGraph:
    """Returns one node per op; then one per group that owns a tensor others read."""
    owners, owner_node = np.unique(problem.tensor_owner[problem.tensor_owner >= 0], return_inverse=True)
    ops, tensor = problem.num_ops, problem.edge_tensor
    maker = problem.tensor_producer.astype(np.int64)
    maker[problem.tensor_owner >= 0] = ops + owner_node
    group = np.concatenate([problem.op_group, owners]).astype(np.int32)
    time_s = np.zeros((len(group), len(devices)))
    time_s[:ops] = problem.time_s[:, list(devices)]
    time_s[~problem.group_allowed[group][:, list(devices)]] = np.inf
    latency, inverse = _mean_link(problem, devices)
    cost = latency + problem.tensor_bytes * inverse
    for number, matrix in problem.tensor_transfer_s.items():
        cost[number] = _mean_off_diagonal(matrix[np.ix_(devices, devices)])
    return _node_graph(
        problem, devices, group=group, time_s=time_s,
        order=np.concatenate([np.arange(ops, len(group)), problem.topological_order]).astype(np.int32),
        source=maker[tensor], target=problem.consumers, cost_s=cost[tensor], parcel=tensor,
    )  # fmt: skip


def folded_graph(problem: Problem, devices: Sequence[int]) -> NodeGraph:
    """Returns one node per group, in the order in which the step first reaches them."""
    graph, groups = group_graph(problem), problem.num_groups
    position = np.argsort(graph.order)
    first = np.where(position[graph.source] < position[graph.target], graph.source, graph.target)
    last = graph.source + graph.target - first
    source, target, cost = merged_edges(first, last, groups, graph.edge_s(*_mean_link(problem, devices)))
    return _node_graph(
        problem, devices, group=np.arange(groups, dtype=np.int32), time_s=graph.time_s[:, list(devices)],
        order=graph.order, source=source, target=target, cost_s=cost,
        parcel=np.arange(len(source)),
    )  # fmt: skip


def _node_graph(
    problem: Problem, devices: Sequence[int], *, group: NDArray[np.int32], time_s: NDArray[np.float64], source: NDArray[Any],
    target: NDArray[Any], parcel: NDArray[Any], **fields: NDArray[Any],
) -> NodeGraph:  # fmt: skip
    """Adds weights, footprints and distances."""
    weight = finite_mean(time_s)
    heaviest = np.lexsort((-weight, group))
    kept = heaviest[np.searchsorted(group[heaviest], np.unique(group))]
    footprint = np.zeros(len(group))
    footprint[kept] = group_graph(problem).footprint_bytes[group[kept]]
    latency, inverse = finite_links(problem)
    pairs = np.ix_(devices, devices)
    seconds = latency[pairs] + (float(problem.tensor_bytes.mean()) if problem.num_tensors else 0.0) * inverse[pairs]
    mean, equal = _mean_off_diagonal(seconds), 1.0 - np.eye(len(seconds))
    return NodeGraph(
        devices=tuple(int(d) for d in devices),
        group=group,
        time_s=np.ascontiguousarray(time_s),
        weight_s=weight,
        source=source.astype(np.int32),
        target=target.astype(np.int32),
        parcel=parcel.astype(np.int64),
        footprint_bytes=footprint,
        distance=seconds / mean * equal if mean > 0 else equal,
        **fields,
    )


def _mean_link(problem: Problem, devices: Sequence[int]) -> tuple[float, float]:
    """Returns mean latency in seconds and mean seconds per byte between the devices in use."""
    latency, inverse = finite_links(problem)
    pairs = np.ix_(devices, devices)
    return _mean_off_diagonal(latency[pairs]), _mean_off_diagonal(inverse[pairs])


def _mean_off_diagonal(matrix: NDArray[np.float64]) -> float:
    off = ~np.eye(len(matrix), dtype=bool)
    return float(matrix[off].mean()) if off.any() else 0.0
