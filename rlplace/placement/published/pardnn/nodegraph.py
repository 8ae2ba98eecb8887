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

import numpy as np
from numpy.typing import NDArray

from rlplace.placement.common.groupgraph import finite_links, finite_mean, group_graph
from rlplace.problem import FORWARD, Problem
from rlplace.problem.order import grouped


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
        backward: bool [V], ops after the forward pass; nothing in a graph of groups.
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
    backward: NDArray[np.bool_]

    @property
    def num_nodes(self) -> int:
        return len(self.group)

    @cached_property
    def out(self) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.float64]]:
        """int64 [V + 1] offsets, int32 [E] targets and float64 [E] costs of the edges by source."""
        ptr, edge = grouped(self.source, np.arange(len(self.source)), self.num_nodes)
        return ptr, self.target[edge], self.cost_s[edge]

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
    order = np.concatenate([np.arange(ops, len(group)), problem.topological_order]).astype(np.int32)
    backward = np.zeros(len(group), dtype=bool)
    backward[:ops] = problem.op_phase > FORWARD
    return _graph(problem, devices, group, time_s, order, maker[tensor], problem.consumers, cost[tensor], tensor, backward)


def folded_graph(problem: Problem, devices: Sequence[int]) -> NodeGraph:
    """Returns one node per group, in the order in which the step first reaches them."""
    graph = group_graph(problem)
    latency, inverse = _mean_link(problem, devices)
    cost = graph.edge_s(latency, inverse)
    position = np.argsort(graph.order)
    first = np.where(position[graph.source] < position[graph.target], graph.source, graph.target).astype(np.int64)
    last = graph.source.astype(np.int64) + graph.target - first
    key, inverse_key = np.unique(first * problem.num_groups + last, return_inverse=True)
    total = np.bincount(inverse_key, weights=cost, minlength=len(key))
    source, target = key // max(problem.num_groups, 1), key % max(problem.num_groups, 1)
    group = np.arange(problem.num_groups, dtype=np.int32)
    backward = np.zeros(problem.num_groups, dtype=bool)
    times = graph.time_s[:, list(devices)]
    return _graph(problem, devices, group, times, graph.order, source, target, total, np.arange(len(key)), backward)


def _graph(
    problem: Problem,
    devices: Sequence[int],
    group: NDArray[np.int32],
    time_s: NDArray[np.float64],
    order: NDArray[np.int32],
    source: NDArray,
    target: NDArray,
    cost: NDArray,
    parcel: NDArray,
    backward: NDArray[np.bool_],
) -> NodeGraph:
    weight = finite_mean(time_s)
    heaviest = np.lexsort((-weight, group))
    kept = heaviest[np.searchsorted(group[heaviest], np.unique(group))]
    footprint = np.zeros(len(group))
    footprint[kept] = group_graph(problem).footprint_bytes[group[kept]]
    return NodeGraph(
        devices=tuple(int(d) for d in devices),
        group=group,
        time_s=np.ascontiguousarray(time_s),
        weight_s=weight,
        order=np.ascontiguousarray(order, dtype=np.int32),
        source=source.astype(np.int32),
        target=target.astype(np.int32),
        cost_s=np.ascontiguousarray(cost, dtype=np.float64),
        parcel=parcel.astype(np.int64),
        footprint_bytes=footprint,
        distance=_distance(problem, devices),
        backward=backward,
    )


def _distance(problem: Problem, devices: Sequence[int]) -> NDArray[np.float64]:
    latency, inverse = finite_links(problem)
    pairs = np.ix_(devices, devices)
    size = float(problem.tensor_bytes.mean()) if problem.num_tensors else 0.0
    seconds = latency[pairs] + size * inverse[pairs]
    mean = _mean_off_diagonal(seconds)
    equal = 1.0 - np.eye(len(seconds))
    return np.asarray(seconds / mean * equal if mean > 0 else equal, dtype=np.float64)


def _mean_link(problem: Problem, devices: Sequence[int]) -> tuple[float, float]:
    """Returns mean latency in seconds and mean seconds per byte between the devices in use."""
    latency, inverse = finite_links(problem)
    pairs = np.ix_(devices, devices)
    return _mean_off_diagonal(latency[pairs]), _mean_off_diagonal(inverse[pairs])


def _mean_off_diagonal(matrix: NDArray[np.float64]) -> float:
    off = ~np.eye(len(matrix), dtype=bool)
    return float(matrix[off].mean()) if off.any() else 0.0
