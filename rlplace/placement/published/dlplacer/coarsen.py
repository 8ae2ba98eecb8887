"""Groups that share a device: shrinks the graph of groups until the exact program can handle it.

Three steps, each of which keeps the forward graph acyclic: groups that take next to no time join the neighbour they exchange
most with; chains (a group whose only reader has no other input) are fused; then the pair with the most traffic for its work is
joined, again and again, until few enough are left. Groups join only where an allowed device is common and where both fit
into a share of a device.

The coarse problem: nodes of joined groups as groups, one op for each of their phases.

A coarse op takes as long as its ops one after another and ends with the last of them, so a tensor leaves a node later than it
could. Where joining the ops of a phase would make a cycle (a node is left and entered again), those ops stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InputError
from rlplace.placement.common.groupgraph import group_graph, mean_link
from rlplace.placement.published.dlplacer.instance import transfer_seconds
from rlplace.problem import FORWARD, PHASES, Problem
from rlplace.problem.build import tensor_fields, unknown_parts
from rlplace.problem.order import topological_order


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
    resident = np.bincount(node_of_group, weights=problem.resident_bytes, minlength=nodes).astype(np.int64)
    fixed = np.full(nodes, -1, dtype=np.int32)
    held = problem.group_device >= 0
    fixed[node_of_group[held]] = problem.group_device[held]
    tensors = _tensors(problem, node_of_group, part)
    coarse = Problem(
        name=f"{problem.name}, {nodes} nodes",
        samples_per_microbatch=problem.samples_per_microbatch,
        devices=problem.devices,
        links=problem.links,
        group_names=tuple(f"node{i}" for i in range(nodes)),
        resident_bytes=resident,
        **unknown_parts(nodes),
        group_device=fixed,
        op_names=tuple(f"part{i}/{PHASES[problem.op_phase[op]]}" for i, op in enumerate(first.tolist())),
        op_group=node[first].astype(np.int32),
        op_phase=problem.op_phase[first].copy(),
        time_s=time_s,
        temporary_bytes=_temporary(problem, part, count),
        **tensor_fields([t[:4] for t in tensors]),
        tensor_transfer_s={i: t[4] for i, t in enumerate(tensors) if t[4] is not None},
    )
    return coarse, part


def _acyclic_parts(problem: Problem, node: NDArray[np.int32]) -> NDArray[np.int64]:
    """Returns int64 [N], the part of every op: one per node and phase, broken up into its ops where parts would wait for each
    other.
    """
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


def _temporary(problem: Problem, part: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Returns int64 [parts], most bytes that one op of each part needs for itself and for outputs that stay inside the part."""
    need = problem.temporary_bytes.copy()
    leaves = np.zeros(problem.num_tensors, dtype=bool)
    producer = problem.tensor_producer[problem.edge_tensor]
    leaves[problem.edge_tensor[(producer >= 0) & (part[np.maximum(producer, 0)] != part[problem.consumers])]] = True
    inner = (problem.tensor_producer >= 0) & ~leaves
    np.add.at(need, problem.tensor_producer[inner], problem.tensor_bytes[inner])
    most = np.zeros(count, dtype=np.int64)
    np.maximum.at(most, part, need)
    return most


CoarseTensor = tuple[int, int, int, Sequence[int], "NDArray[Any] | None"]


def _tensors(problem: Problem, node_of_group: NDArray[np.int32], part: NDArray[np.int64]) -> list[CoarseTensor]:
    """(producer, owner, bytes, consumers, transfer times) of tensors that leave their part; equal ends are one tensor."""
    alike: dict[tuple[int, int, tuple[int, ...]], list[int]] = {}
    for tensor in range(problem.num_tensors):
        readers = problem.consumers[problem.consumer_ptr[tensor] : problem.consumer_ptr[tensor + 1]]
        producer, owner = int(problem.tensor_producer[tensor]), int(problem.tensor_owner[tensor])
        outside = set(part[readers].tolist())
        if producer >= 0:
            producer = int(part[producer])
            outside.discard(producer)
        else:
            owner = int(node_of_group[owner])
            outside = set(part[readers[node_of_group[problem.op_group[readers]] != owner]].tolist())
        if outside:
            alike.setdefault((producer, owner, tuple(sorted(outside))), []).append(tensor)
    sent = transfer_seconds(problem)
    rows: list[CoarseTensor] = []
    for (producer, owner, outside_readers), tensors in alike.items():
        table = None
        if len(tensors) > 1 or tensors[0] in problem.tensor_transfer_s:
            table = sent[tensors].sum(axis=0)
            table[~np.isfinite(table)] = 0.0  # no link: never used
        rows.append((producer, owner, int(problem.tensor_bytes[tensors].sum()), outside_readers, table))
    return rows


TINY = 1e-3
"""Share of the step's work below which a group is joined to a neighbour."""

MEMORY_SHARE = 1 / 3
"""Joined groups take at most this share of the largest device."""

WORK_SHARE = 3.0
"""Joined groups take at most this many times the mean work of a node of the target size."""

PRESPLIT = 512
"""Graphs with more groups are first cut into this many pieces of a topological order."""


@dataclass(eq=False)
class _Node:
    members: list[int]
    work_s: float
    size_bytes: float
    allowed: NDArray[np.bool_]


class _Graph:
    """The forward graph of groups while it shrinks; nodes are named by one of their members, edges weigh seconds."""

    def __init__(self, problem: Problem) -> None:
        graph = group_graph(problem)
        self.nodes = {
            g: _Node([g], float(graph.mean_time_s[g]), float(graph.footprint_bytes[g]), problem.group_allowed[g])
            for g in range(problem.num_groups)
        }
        self.flow: nx.DiGraph[int] = nx.DiGraph()
        self.flow.add_nodes_from(self.nodes)
        self.flow.add_weighted_edges_from(zip(*(row.tolist() for row in _forward_edges(problem)), strict=True))
        limits = problem.memory_limit_bytes[np.isfinite(problem.memory_limit_bytes)]
        self.most_bytes = MEMORY_SHARE * float(limits.max()) if len(limits) else np.inf
        self.work_s = sum(node.work_s for node in self.nodes.values())

    def fits(self, u: int, v: int, most_s: float) -> bool:
        """Returns whether two nodes may sit together and stay small enough."""
        a, b = self.nodes[u], self.nodes[v]
        if a.work_s + b.work_s > most_s or a.size_bytes + b.size_bytes > self.most_bytes:
            return False
        return bool((a.allowed & b.allowed).any())

    def levels(self) -> dict[int, int]:
        """Returns edges on the longest path to each node."""
        return {u: level for level, nodes in enumerate(nx.topological_generations(self.flow)) for u in nodes}

    def only_path(self, u: int, v: int, level: dict[int, int]) -> bool:
        """Returns whether the edge from u to v is the only way from u to v, so that joining them makes no cycle."""
        if len(self.flow.succ[u]) == 1 or len(self.flow.pred[v]) == 1 or level[v] == level[u] + 1:
            return True
        return not any(nx.has_path(self.flow, w, v) for w in self.flow.succ[u] if w != v and level[w] < level[v])

    def join(self, u: int, v: int) -> None:
        """Makes v part of u."""
        gone = self.nodes.pop(v)
        kept = self.nodes[u]
        self.nodes[u] = _Node(
            kept.members + gone.members,
            kept.work_s + gone.work_s,
            kept.size_bytes + gone.size_bytes,
            kept.allowed & gone.allowed,
        )
        moved = [(u, w, edge["weight"]) for w, edge in self.flow.succ[v].items()]
        moved += [(w, u, edge["weight"]) for w, edge in self.flow.pred[v].items()]
        self.flow.remove_node(v)
        for a, b, seconds in moved:
            if a != b:
                self.flow.add_edge(a, b, weight=self.flow.get_edge_data(a, b, {"weight": 0.0})["weight"] + seconds)


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
    graph = _Graph(problem)
    most_s = WORK_SHARE * graph.work_s / count
    if problem.num_groups > PRESPLIT:
        _presplit(graph, problem)
    _join_tiny(graph, count)
    _fuse_chains(graph, count, most_s)
    while len(graph.nodes) > count:
        if not (_join_best(graph, most_s) or _join_level(graph, most_s)):
            if most_s == np.inf:
                break
            most_s = np.inf
    node_of_group = np.empty(problem.num_groups, dtype=np.int32)
    for number, members in enumerate(sorted(sorted(node.members) for node in graph.nodes.values())):
        node_of_group[members] = number
    return node_of_group


def _presplit(graph: _Graph, problem: Problem) -> None:
    """Joins runs of a depth-first topological order: pieces of equal work, without cycles since all edges point one way.

    Nodes that nothing comes before are in the order of the group graph, the others in that of their numbers.
    """
    position = np.argsort(group_graph(problem).order)
    count = problem.num_groups
    later = np.array([len(graph.flow.pred[u]) > 0 for u in range(count)])
    named = np.lexsort((np.where(later, np.arange(count), position), later))
    rank = np.argsort(named)
    edges = rank[np.array(graph.flow.edges, dtype=np.int64).reshape(-1, 2)]
    order = named[topological_order(edges[:, 0], edges[:, 1], count, depth_first=True)[0]].tolist()
    most_s = graph.work_s / PRESPLIT
    current = order[0]
    for group in order[1:]:
        if graph.fits(current, group, most_s):
            graph.join(current, group)
        else:
            current = group


def _join_tiny(graph: _Graph, count: int) -> None:
    least_s = TINY * graph.work_s
    level = graph.levels()
    for u in sorted((u for u in graph.nodes if graph.nodes[u].work_s < least_s), key=lambda u: (graph.nodes[u].work_s, u)):
        if len(graph.nodes) <= count:
            return
        if u not in graph.nodes:
            continue
        near = [(-edge["weight"], v, (u, v)) for v, edge in graph.flow.succ[u].items()]
        near += [(-edge["weight"], v, (v, u)) for v, edge in graph.flow.pred[u].items()]
        for _, v, (first, second) in sorted(near):
            if graph.fits(u, v, np.inf) and graph.only_path(first, second, level):
                graph.join(v, u)
                level = graph.levels()
                break


def _fuse_chains(graph: _Graph, count: int, most_s: float) -> None:
    """Lightest pairs first, so that a long chain falls into pieces of like work."""
    while len(graph.nodes) > count:
        pairs = [
            (graph.nodes[u].work_s + graph.nodes[v].work_s, u, v)
            for u, v in graph.flow.edges
            if len(graph.flow.succ[u]) == len(graph.flow.pred[v]) == 1 and graph.fits(u, v, most_s)
        ]
        if not pairs:
            return
        _, u, v = min(pairs)
        graph.join(u, v)


def _join_best(graph: _Graph, most_s: float) -> bool:
    """Joins the pair with the most traffic for its work."""
    level = graph.levels()
    floor_s = 1e-6 * graph.work_s + 1e-300

    def rating(edge: tuple[int, int, float]) -> tuple[float, int, int]:
        u, v, seconds = edge
        return -(seconds + floor_s) / ((graph.nodes[u].work_s + floor_s) * (graph.nodes[v].work_s + floor_s)), u, v

    for u, v, _ in sorted(graph.flow.edges(data="weight"), key=rating):
        if graph.fits(u, v, most_s) and graph.only_path(u, v, level):
            graph.join(u, v)
            return True
    return False


def _join_level(graph: _Graph, most_s: float) -> bool:
    """Joins the two lightest nodes of a level that fit together: there is no path between nodes of one level."""
    level = graph.levels()
    by_level: dict[int, list[int]] = {}
    for u in sorted(graph.nodes, key=lambda u: (graph.nodes[u].work_s, u)):
        by_level.setdefault(level[u], []).append(u)
    for _, nodes in sorted(by_level.items()):
        for i, u in enumerate(nodes):
            for v in nodes[i + 1 : i + 9]:
                if graph.fits(u, v, most_s):
                    graph.join(u, v)
                    return True
    return False


def _forward_edges(problem: Problem) -> tuple[Any, Any, NDArray[np.float64]]:
    """Sender, receiver and seconds of the traffic between groups in the forward pass, edges against the order left out."""
    latency, inverse = mean_link(problem)
    tensor = problem.edge_tensor
    producer = problem.tensor_producer[tensor]
    forward = (producer >= 0) & (problem.op_phase[problem.consumers] == FORWARD)
    forward &= problem.op_phase[np.maximum(producer, 0)] == FORWARD
    source, target = problem.op_group[producer[forward]], problem.op_group[problem.consumers[forward]]
    seconds = latency + problem.tensor_bytes[tensor[forward]] * inverse
    apart = source != target
    source, target, seconds = source[apart], target[apart], seconds[apart]
    order, stuck = topological_order(source, target, problem.num_groups)
    position = np.argsort(group_graph(problem).order if stuck is not None else order)
    along = position[source] < position[target]
    key, inverse_key = np.unique(source[along].astype(np.int64) * problem.num_groups + target[along], return_inverse=True)
    total = np.bincount(inverse_key, weights=seconds[along], minlength=len(key)).astype(np.float64)
    return key // problem.num_groups, key % problem.num_groups, total
