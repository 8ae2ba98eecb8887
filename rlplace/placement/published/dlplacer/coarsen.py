"""Groups that share a device: shrinks the graph of groups until the exact program can handle it.

Three steps, each of which keeps the forward graph acyclic: groups that take next to no time join the neighbour they exchange
most with; chains (a group whose only reader has no other input) are fused; then the pair with the most traffic for its work is
joined, again and again, until few enough are left. Groups join only where an allowed device is common and where both fit
into a share of a device.

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

TINY = 1e-3
"""Share of the step's work below which a group is joined to a neighbour."""

MEMORY_SHARE = 1 / 3
"""Joined groups take at most this share of the largest device."""

WORK_SHARE = 3.0
"""Joined groups take at most this many times the mean work of a node of the target size."""

PRESPLIT = 512
"""Graphs with more groups are first cut into this many pieces of a topological order."""


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

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.num_groups, *(row.tolist() for row in _forward_edges(problem)))
        graph = group_graph(problem)
        self.work_s, self.size_bytes = graph.mean_time_s.tolist(), graph.footprint_bytes.astype(np.float64).tolist()
        self.allowed = problem.group_allowed.copy()
        limits = problem.memory_limit_bytes[np.isfinite(problem.memory_limit_bytes)]
        self.most_bytes = MEMORY_SHARE * float(limits.max()) if len(limits) else np.inf
        self.total_s, self.left = sum(self.work_s), problem.num_groups

    def fits(self, u: int, v: int, most_s: float) -> bool:
        """Returns whether two nodes may sit together and stay small enough."""
        if self.work_s[u] + self.work_s[v] > most_s or self.size_bytes[u] + self.size_bytes[v] > self.most_bytes:
            return False
        return bool((self.allowed[u] & self.allowed[v]).any())

    def only_path(self, u: int, v: int, level: dict[int, int]) -> bool:
        """Returns whether the edge from u to v is the only way from u to v, so that joining them makes no cycle."""
        if self.contractible(u, v) or level[v] == level[u] + 1:
            return True
        seen, stack = {v}, [w for w in self.successors[u] if w != v]
        while stack:
            w = stack.pop()
            if v in self.successors[w]:
                return False
            if w not in seen and level[w] < level[v]:
                seen.add(w)
                stack.extend(self.successors[w])
        return True

    def add(self, u: int, v: int) -> None:
        """Makes v part of u."""
        self.join(u, v)
        self.work_s[u] += self.work_s[v]
        self.size_bytes[u] += self.size_bytes[v]
        self.allowed[u] &= self.allowed[v]
        self.left -= 1


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
    graph = _ShrinkingGraph(problem)
    most_s = WORK_SHARE * graph.total_s / count
    if problem.num_groups > PRESPLIT:
        _presplit(graph, problem)
    _join_tiny(graph, count)
    _fuse_chains(graph, count, most_s)
    while graph.left > count:
        if not (_join_best(graph, most_s) or _join_level(graph, most_s)):
            if most_s == np.inf:
                break
            most_s = np.inf
    root = [graph.find(group) for group in range(problem.num_groups)]
    _, first, inverse = np.unique(root, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[inverse].astype(np.int32)


def _presplit(graph: _ShrinkingGraph, problem: Problem) -> None:
    """Joins runs of a depth-first topological order: pieces of equal work, without cycles since all edges point one way.

    Nodes that nothing comes before are in the order of the group graph, the others in that of their numbers.
    """
    position = np.argsort(group_graph(problem).order)
    count = problem.num_groups
    later = np.array([len(before) > 0 for before in graph.predecessors])
    named = np.lexsort((np.where(later, np.arange(count), position), later))
    edges = np.argsort(named)[np.array(graph.edges(), dtype=np.int64).reshape(-1, 2)]
    order = named[topological_order(edges[:, 0], edges[:, 1], count, depth_first=True)[0]].tolist()
    most_s = graph.total_s / PRESPLIT
    current = order[0]
    for group in order[1:]:
        if graph.fits(current, group, most_s):
            graph.add(current, group)
        else:
            current = group


def _join_tiny(graph: _ShrinkingGraph, count: int) -> None:
    least_s = TINY * graph.total_s
    level = graph.levels()
    for u in sorted((u for u in graph.live() if graph.work_s[u] < least_s), key=lambda u: (graph.work_s[u], u)):
        if graph.left <= count:
            return
        if graph.find(u) != u:
            continue
        near = [(-seconds, v, (u, v)) for v, seconds in graph.successors[u].items()]
        near += [(-seconds, v, (v, u)) for v, seconds in graph.predecessors[u].items()]
        for _, v, (first, second) in sorted(near):
            if graph.fits(u, v, np.inf) and graph.only_path(first, second, level):
                graph.add(v, u)
                level = graph.levels()
                break


def _fuse_chains(graph: _ShrinkingGraph, count: int, most_s: float) -> None:
    """Fuses the lightest pairs first, so that a long chain falls into pieces of like work."""
    while graph.left > count:
        pairs = [
            (graph.work_s[u] + graph.work_s[v], u, v)
            for u, v in graph.edges()
            if len(graph.successors[u]) == len(graph.predecessors[v]) == 1 and graph.fits(u, v, most_s)
        ]
        if not pairs:
            return
        _, u, v = min(pairs)
        graph.add(u, v)


def _join_best(graph: _ShrinkingGraph, most_s: float) -> bool:
    """Joins the pair with the most traffic for its work."""
    level = graph.levels()
    floor_s = 1e-6 * graph.total_s + 1e-300

    def rating(edge: tuple[int, int]) -> tuple[float, int, int]:
        u, v = edge
        seconds = graph.successors[u][v]
        return -(seconds + floor_s) / ((graph.work_s[u] + floor_s) * (graph.work_s[v] + floor_s)), u, v

    for u, v in sorted(graph.edges(), key=rating):
        if graph.fits(u, v, most_s) and graph.only_path(u, v, level):
            graph.add(u, v)
            return True
    return False


def _join_level(graph: _ShrinkingGraph, most_s: float) -> bool:
    """Joins the two lightest nodes of a level that fit together: there is no path between nodes of one level."""
    level = graph.levels()
    by_level: dict[int, list[int]] = {}
    for u in sorted(graph.live(), key=lambda u: (graph.work_s[u], u)):
        by_level.setdefault(level[u], []).append(u)
    for _, nodes in sorted(by_level.items()):
        for i, u in enumerate(nodes):
            for v in nodes[i + 1 : i + 9]:
                if graph.fits(u, v, most_s):
                    graph.add(u, v)
                    return True
    return False


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
