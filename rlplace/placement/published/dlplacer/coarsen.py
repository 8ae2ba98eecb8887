"""Groups that share a device: shrinks the graph of groups until the exact program can handle it.

The forward graph stays acyclic (`rlplace.model.graph.contract`): under growing limits of work, edges are contracted that are
the only one out of or into a node, most traffic first; groups with the same neighbours are joined; then neighbours in a
topological order. Groups join only where an allowed device is common and where both fit into a share of a device.

The coarse problem has nodes of joined groups as groups, and one op for each of their phases. A coarse op takes as long as its
ops one after another and ends with the last of them, so a tensor leaves a node later than it could. Where joining the ops of a
phase would make a cycle (a node is left and entered again), those ops stay as they are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InputError
from rlplace.model.graph.contract import ContractionGraph
from rlplace.placement.common.groupgraph import group_graph, mean_link
from rlplace.placement.published.dlplacer.instance import transfer_seconds
from rlplace.problem import FORWARD, PHASES, Problem
from rlplace.problem.build import tensor_fields
from rlplace.problem.contract import alike, crossing, merged_edges
from rlplace.problem.order import grouped, topological_order

MEMORY_SHARE = 1 / 3
"""Joined groups take at most this share of the largest device."""

TWIN_DEGREE = 16
"""Twins are looked for among nodes with at most this many neighbours."""

WORK_SHARES = (0.25, 0.5, 1.0, 2.0, 3.0)
"""Joined groups take at most these shares of the mean work of a node of the target size, one after another; then any."""


def contract_groups(problem: Problem, node_of_group: NDArray[np.int32]) -> tuple[Problem, NDArray[np.int64]]:
    """Returns the problem with joined groups, and the op of it that each op is part of; the problem itself when no groups are
    joined.

    Args:
        problem: The problem.
        node_of_group: int32 [G], numbered from 0 without gaps.

    Raises:
        InputError: The problem has collectives.
    """
    nodes = int(node_of_group.max()) + 1
    if nodes == problem.num_groups:
        return problem, np.arange(problem.num_ops, dtype=np.int64)
    if problem.collectives:
        raise InputError("dlplacer: the problem has collectives; plan the problem of one replica, before `expand`")
    node = node_of_group[problem.op_group]
    part = _acyclic_parts(problem, node)
    count = int(part.max()) + 1
    first = np.zeros(count, dtype=np.int64)
    first[part[::-1]] = np.arange(problem.num_ops)[::-1]
    time_s = np.zeros((count, problem.num_devices))
    np.add.at(time_s, part, problem.time_s)  # NaN stays NaN: a part runs only where all of its ops do
    fixed = np.full(nodes, -1, dtype=np.int32)
    held = problem.group_device >= 0
    fixed[node_of_group[held]] = problem.group_device[held]
    # Tensors that leave their part; those of equal ends become one, with the sum of their transfer times.
    tensor, produced = problem.edge_tensor, problem.tensor_producer >= 0
    home = np.where(produced, part[np.maximum(problem.tensor_producer, 0)], -1)
    owner = np.where(produced, problem.tensor_owner, node_of_group[np.maximum(problem.tensor_owner, 0)])
    reader = part[problem.consumers]
    leaves = np.where(produced[tensor], home[tensor] != reader, owner[tensor] != node[problem.consumers])
    ids, number, ends = alike(*crossing(tensor, reader, leaves, count), home, owner)
    ptr, members = grouped(number, ids, len(ends))
    sent, rows, tables = transfer_seconds(problem), [], {}
    for index, (maker, own, readers) in enumerate(ends):
        tensors = members[ptr[index] : ptr[index + 1]]
        rows.append((maker, own, int(problem.tensor_bytes[tensors].sum()), readers))
        if len(tensors) > 1 or int(tensors[0]) in problem.tensor_transfer_s:
            table = sent[tensors].sum(axis=0)
            tables[index] = np.where(np.isfinite(table), table, 0.0)  # no link: never used
    # Most bytes that one op of each part needs for itself and for outputs that stay inside the part.
    stays = produced.copy()
    stays[tensor[leaves]] = False
    need, temporary = problem.temporary_bytes.copy(), np.zeros(count, dtype=np.int64)
    np.add.at(need, problem.tensor_producer[stays], problem.tensor_bytes[stays])
    np.maximum.at(temporary, part, need)
    coarse = Problem(
        name=f"{problem.name}, {nodes} nodes",
        samples_per_microbatch=problem.samples_per_microbatch,
        devices=problem.devices,
        links=problem.links,
        group_names=tuple(f"node{i}" for i in range(nodes)),
        resident_bytes=np.bincount(node_of_group, weights=problem.resident_bytes, minlength=nodes).astype(np.int64),
        group_device=fixed,
        op_names=tuple(f"part{i}/{PHASES[problem.op_phase[op]]}" for i, op in enumerate(first.tolist())),
        op_group=node[first],
        op_phase=problem.op_phase[first].copy(),
        time_s=time_s,
        temporary_bytes=temporary,
        **tensor_fields(rows),
        tensor_transfer_s=tables,
    )
    return coarse, part


def _acyclic_parts(problem: Problem, node: NDArray[np.int32]) -> NDArray[np.int64]:
    """Returns int64 [N], the part of every op: one per node and phase, or the op alone where parts would wait in a cycle."""
    key = node.astype(np.int64) * len(PHASES) + problem.op_phase
    source, target = problem.op_edges
    loose = np.zeros(problem.num_ops, dtype=bool)
    while True:
        own = len(PHASES) * problem.num_groups + np.arange(problem.num_ops)
        part = np.unique(np.where(loose, own, key), return_inverse=True)[1].astype(np.int64)
        count = int(part.max()) + 1
        apart = part[source] != part[target]
        heads, tails = part[source[apart]], part[target[apart]]
        order, stuck = topological_order(heads, tails, count)
        if stuck is None:
            return part
        # What neither Kahn's algorithm nor its mirror image can order lies on cycles or between them.
        back, _ = topological_order(tails, heads, count)
        cyclic = np.ones(count, dtype=bool)
        cyclic[order] = False
        cyclic[back] = False
        several = np.bincount(part, minlength=count) > 1
        loose |= cyclic[part] & several[part]


class _ShrinkingGraph(ContractionGraph):
    """The forward graph of groups while it shrinks; a node has the number of one of its groups, edges weigh seconds."""

    def __init__(self, problem: Problem, count: int) -> None:
        super().__init__(problem.num_groups, *(row.tolist() for row in _forward_edges(problem)))
        graph = group_graph(problem)
        self.work_s, self.size_bytes = graph.mean_time_s.tolist(), graph.footprint_bytes.astype(np.float64).tolist()
        self.allowed = problem.group_allowed.copy()
        limits = problem.memory_limit_bytes[np.isfinite(problem.memory_limit_bytes)]
        self.most_bytes = MEMORY_SHARE * float(limits.max()) if len(limits) else np.inf
        self.count, self.left, self.mean_s = count, problem.num_groups, sum(self.work_s) / count
        self.most_s = 0.0

    def fits(self, u: int, v: int) -> bool:
        """Returns whether two nodes may sit together and stay small enough."""
        if self.work_s[u] + self.work_s[v] > self.most_s or self.size_bytes[u] + self.size_bytes[v] > self.most_bytes:
            return False
        return bool((self.allowed[u] & self.allowed[v]).any())

    def merged(self, u: int, v: int, kept: int) -> bool:
        """Adds up two nodes that were merged; returns whether few enough are left."""
        gone = u + v - kept
        self.work_s[kept] += self.work_s[gone]
        self.size_bytes[kept] += self.size_bytes[gone]
        self.allowed[kept] &= self.allowed[gone]
        self.left -= 1
        return self.left <= self.count

    def twins(self) -> list[list[int]]:
        """Returns sets of nodes with equal predecessors and equal successors, smallest number first."""
        alike: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
        for node in self.live():
            key = tuple(sorted(self.predecessors[node])), tuple(sorted(self.successors[node]))
            if 0 < len(key[0]) + len(key[1]) <= TWIN_DEGREE:
                alike.setdefault(key, []).append(node)
        return [nodes for nodes in alike.values() if len(nodes) > 1]

    def merge_runs(self, runs: list[list[int]]) -> bool:
        """Merges neighbours in each run while they fit; returns whether few enough nodes are left."""
        for nodes in runs:
            kept = nodes[0]
            for node in nodes[1:]:
                if self.fits(kept, node):
                    before, (kept, _) = kept, self.merge(kept, node)
                    if self.merged(before, node, kept):
                        return True
                else:
                    kept = node
        return False


def coarsen(problem: Problem, count: int) -> NDArray[np.int32]:
    """Joins groups until at most `count` nodes are left, or none can be joined.

    Args:
        problem: The problem; one of at most `count` groups is left as it is.
        count: Largest number of nodes.

    Returns:
        int32 [G], the node of every group, numbered by their first group.
    """
    if problem.num_groups <= count:
        return np.arange(problem.num_groups, dtype=np.int32)
    graph = _ShrinkingGraph(problem, count)
    for share in (*WORK_SHARES, np.inf):
        graph.most_s = share * graph.mean_s
        done = graph.contract_edges(graph.edges(), lambda a, b: 0, graph.fits, graph.merged) or graph.merge_runs(graph.twins())
        if done or (share >= 1.0 and graph.merge_runs([graph.depth_first_order()])):
            break
    root = [graph.find(group) for group in range(problem.num_groups)]
    _, first, inverse = np.unique(root, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[inverse].astype(np.int32)


def _forward_edges(problem: Problem) -> tuple[NDArray[Any], ...]:
    """Returns sender, receiver and seconds of the forward traffic between groups, without edges against the order."""
    latency, inverse = mean_link(problem)
    tensor = problem.edge_tensor
    producer = problem.tensor_producer[tensor]
    forward = (producer >= 0) & (problem.op_phase[problem.consumers] == FORWARD)
    forward &= problem.op_phase[np.maximum(producer, 0)] == FORWARD
    source, target = problem.op_group[producer[forward]], problem.op_group[problem.consumers[forward]]
    seconds = latency + problem.tensor_bytes[tensor[forward]] * inverse
    apart = source != target
    order, stuck = topological_order(source[apart], target[apart], problem.num_groups)
    position = np.argsort(group_graph(problem).order if stuck is not None else order)
    along = position[source] < position[target]
    return merged_edges(source[along], target[along], problem.num_groups, seconds[along])
