"""Coarsening: op graph to about 200 groups that a planner places.

Two notions are kept apart. A *cluster* is a set of ops whose forward ops contract to one node without making the graph
cyclic; with its backward and update ops it becomes one task per phase. A *group* is a set of clusters that must share a
device, because they read the same trainable parameter (tied embeddings); all other groups are one cluster.

A forward op, its backward ops, the update of the parameters it reads and everything with the same `op_colocate` share a
cluster from the start. Contraction then follows growing size caps, at each cap from the deepest common module outwards,
heaviest edges first, and over edges only, so that branches stay apart as long as possible. When that leaves too many groups,
neighbours in a depth-first topological order are merged. The result is deterministic.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InputError, whole_number
from rlplace.model.graph.atoms import (
    ModuleHierarchy,
    anchor_graph,
    atoms,
    held_bytes,
    loose_views,
    op_anchors,
    parameter_ties,
    unique_names,
)
from rlplace.model.graph.contract import ContractionGraph
from rlplace.model.graph.opgraph import FORWARD, OpGraph
from rlplace.problem.order import UnionFind, components, strong_components

DEFAULT_TARGET = 200
BALANCE = 4.0
"""No group grows beyond this multiple of the mean time and bytes, unless one op alone does."""

_CAPS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, BALANCE)
_HELD = 4.0  # bytes may run ahead of time: a chain of cheap ops on large activations has no good cut inside
_ABSORB = 1.25  # a heavy op may take light neighbours in, up to this multiple of itself
_LAUNCH_S, _FLOPS, _BYTES_PER_S = 5e-6, 1e13, 1e12


@dataclass(frozen=True, eq=False)
class Grouping:
    """The result of `coarsen`. Axes: N ops, C clusters, G groups.

    Attributes:
        op_cluster: int32 [N].
        cluster_group: int32 [C]; clusters and groups are numbered by their first op.
        names: G unique names, from module paths.
        modules: Per group the module paths of its forward ops.
    """

    op_cluster: NDArray[np.int32]
    cluster_group: NDArray[np.int32]
    names: tuple[str, ...]
    modules: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        self.op_cluster.setflags(write=False)
        self.cluster_group.setflags(write=False)

    @cached_property
    def op_group(self) -> NDArray[np.int32]:
        """int32 [N], the group of every op."""
        return self.cluster_group[self.op_cluster]

    @property
    def num_clusters(self) -> int:
        return len(self.cluster_group)

    @property
    def num_groups(self) -> int:
        return len(self.names)


def coarsen(graph: OpGraph, target: int = DEFAULT_TARGET, cost: NDArray[np.float64] | None = None) -> Grouping:
    """Groups the ops of a graph.

    Args:
        graph: The captured step.
        target: Largest number of groups; the result is close to it when the graph has that many separate parts.
        cost: float64 [N] seconds per op, by which groups are balanced; default a plain estimate from FLOPs and bytes.

    Returns:
        The grouping. With at most `target` forward ops, each is a group of its own with its backward and update.

    Raises:
        InputError: `target` is not positive, or the graph has no forward op.
    """
    whole_number(target, "coarsen: target", 1)
    if not (graph.op_phase == FORWARD).any():
        raise InputError("coarsen: the graph has no forward op to group")
    seconds = _plain_cost(graph) if cost is None else np.asarray(cost, dtype=np.float64)
    if seconds.shape != (graph.num_ops,) or not (np.isfinite(seconds) & (seconds >= 0)).all():
        raise InputError("coarsen: cost must be one finite non-negative number per op")
    anchor = op_anchors(graph)
    contraction = _Contraction(graph, anchor, seconds, target)
    contraction.run()
    return _finish(graph, anchor, contraction)


def _plain_cost(graph: OpGraph) -> NDArray[np.float64]:
    work = np.maximum(graph.op_flops / _FLOPS, graph.op_bytes / _BYTES_PER_S) + _LAUNCH_S
    return np.where(np.array(graph.op_kind) == "view", 0.0, work)


class _Contraction:
    """Contracts atoms until at most `target` groups are left."""

    def __init__(self, graph: OpGraph, anchor: NDArray[np.int32], seconds: NDArray[np.float64], target: int) -> None:
        self.target = target
        atom, knots = atoms(graph, anchor, seconds, BALANCE / target)
        forward = np.flatnonzero(graph.op_phase == FORWARD)
        values, inverse = np.unique(atom[forward], return_inverse=True)
        label = np.zeros(graph.num_ops, dtype=np.int32)
        label[forward] = inverse
        self.label = label  # forward op -> node of the contraction graph; nodes are numbered by their first op
        source, end, size, is_forward = anchor_graph(graph, anchor, label)
        # Where forward and backward edges together are cyclic, backward edges are left to the final check of the tasks.
        component = strong_components(len(values), source, end)
        keep = is_forward | (component[source] != component[end])
        self.dag = ContractionGraph(len(values), source[keep].tolist(), end[keep].tolist(), size[keep].tolist())
        self.tree = ModuleHierarchy(graph.op_module[op] for op in forward.tolist())
        self.module = self.tree.common(inverse, len(values))
        time = np.zeros(len(values))
        np.add.at(time, label[anchor], seconds)
        held = np.zeros(len(values))
        np.add.at(held, label[anchor], held_bytes(graph, anchor))
        scale = [total if total > 0 else 1.0 for total in (time.sum(), held.sum())]
        tied_a, tied_b = parameter_ties(graph, anchor)
        group = components(
            len(values), np.concatenate([label[tied_a], label[knots[0]]]), np.concatenate([label[tied_b], label[knots[1]]])
        )
        self.groups = UnionFind()
        for node, root in enumerate(group.tolist()):
            self.groups.union(root, node)
        # Per group: share of all time, share of all bytes, and the heaviest atom in either.
        sums, peaks = np.zeros((2, 2, len(values)))
        for row, share in enumerate((time / scale[0], held / scale[1])):
            np.add.at(sums[row], group, share)
            np.maximum.at(peaks[row], group, share)
        self.time, self.held = sums.tolist()
        self.peak_time, self.peak_held = peaks.tolist()
        self.num_groups = len(np.unique(group))
        self.loose_views = loose_views(graph, label)
        self.cap = 0.0

    def group(self, node: int) -> int:
        return self.groups.find(node)

    def run(self) -> None:
        # Clusters of one group cannot be placed apart, and nodes without time and bytes (views of inputs) are no decision.
        self.dag.contract_edges(self.dag.edges(), self.rank, self.undecided, lambda *nodes: self.merged(*nodes) and False)
        for node, reader in self.loose_views:
            a, b = self.dag.find(node), self.dag.find(reader)
            if a != b and self.undecided(a, b) and not self.dag.successors[a] and not self.dag.predecessors[a]:
                self.merged(a, b, self.dag.merge(a, b)[0])
        for multiple in _CAPS:
            self.cap = multiple / self.target
            if self.num_groups > self.target:
                self.dag.contract_edges(self.dag.edges(), self.rank, self.admit, self.merged)
        self.merge_intervals()

    def rank(self, a: int, b: int) -> int:
        return self.tree.depth[self.tree.lowest_common(self.module[a], self.module[b])]

    def undecided(self, a: int, b: int) -> bool:
        g, h = self.group(a), self.group(b)
        return g == h or any(self.time[group] == self.held[group] == 0.0 for group in (g, h))

    def admit(self, a: int, b: int) -> bool:
        return self.fits(self.group(a), self.group(b), self.cap)

    def fits(self, g: int, h: int, cap: float) -> bool:
        if g == h:
            return True
        time, held = self.time[g] + self.time[h], self.held[g] + self.held[h]
        held_cap = min(_HELD * cap, BALANCE / self.target)
        return time <= max(cap, _ABSORB * max(self.peak_time[g], self.peak_time[h])) and held <= max(
            held_cap, _ABSORB * max(self.peak_held[g], self.peak_held[h])
        )

    def merged(self, a: int, b: int, keep: int) -> bool:
        self.module[keep] = self.tree.lowest_common(self.module[a], self.module[b])
        g, h = self.group(a), self.group(b)
        if g != h:
            g, h = min(g, h), max(g, h)
            self.groups.union(g, h)
            self.time[g] += self.time[h]
            self.held[g] += self.held[h]
            self.peak_time[g] = max(self.peak_time[g], self.peak_time[h])
            self.peak_held[g] = max(self.peak_held[g], self.peak_held[h])
            self.num_groups -= 1
        return self.num_groups <= self.target

    def merge_intervals(self) -> None:
        """Merges neighbours of topological orders as a last resort; deepest common module first, then the lightest pair."""
        while self.num_groups > self.target:
            pairs = list(itertools.pairwise(self.dag.depth_first_order()))
            fit = [(a, b) for a, b in pairs if self.fits(self.group(a), self.group(b), BALANCE / self.target)] or pairs
            taken: set[int] = set()
            for a, b in sorted(fit, key=lambda pair: (-self.rank(*pair), self.weight(*pair))):
                if taken.isdisjoint((a, b)):
                    taken |= {a, b}
                    if self.merged(a, b, self.dag.merge(a, b)[0]):
                        return

    def weight(self, a: int, b: int) -> float:
        """Returns shares of all time and bytes that two nodes have together."""
        return sum(self.time[group] + self.held[group] for group in sorted({self.group(a), self.group(b)}))


def _finish(graph: OpGraph, anchor: NDArray[np.int32], contraction: _Contraction) -> Grouping:
    """Makes the tasks acyclic in every phase, numbers clusters and groups by their first op, and names them."""
    dag = contraction.dag
    root = np.array([dag.find(node) for node in range(len(contraction.module))], dtype=np.int32)
    group_of_root = np.array([contraction.group(node) for node in range(len(root))], dtype=np.int32)
    op_cluster = root[contraction.label[anchor]]
    op_group = group_of_root[op_cluster]
    while True:
        joined = merge_cyclic_tasks(graph, op_cluster)
        if joined is None:
            break
        op_cluster = joined
    # Clusters that were merged join their groups: ops, clusters and groups as nodes of one graph.
    count, ops = graph.num_ops, np.arange(graph.num_ops, dtype=np.int32)
    joined_by = np.concatenate([op_cluster + count, op_group + 2 * count]).astype(np.int32)
    op_group = components(3 * count, np.concatenate([ops, ops]), joined_by)[:count]
    forward = np.flatnonzero(graph.op_phase == FORWARD)
    op_cluster, first_op = _renumber(op_cluster, forward)
    op_group, _ = _renumber(op_group, forward)
    names, modules = unique_names(graph, op_group)
    return Grouping(op_cluster, op_group[first_op].astype(np.int32), names, modules)


def merge_cyclic_tasks(graph: OpGraph, op_cluster: NDArray[np.int32]) -> NDArray[np.int32] | None:
    """Merges clusters whose tasks (cluster and phase) wait for each other; None when the tasks are acyclic."""
    producer = graph.tensor_producer[graph.edge_tensor]
    produced = producer >= 0
    task = op_cluster.astype(np.int64) * 4 + graph.op_phase
    values, task = np.unique(task, return_inverse=True)
    source, target = task[producer[produced]].astype(np.int32), task[graph.consumers[produced]].astype(np.int32)
    other = source != target
    component = strong_components(len(values), source[other], target[other])
    if len(np.unique(component)) == len(values):
        return None
    cluster = (values // 4).astype(np.int32)
    count = int(cluster.max()) + 1
    first = np.full(len(values), -1, dtype=np.int32)
    first[component[::-1]] = cluster[::-1]
    return components(count, first[component], cluster)[op_cluster]


def _renumber(value: NDArray[np.int32], forward: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Returns numbers values 0, 1, ... by the first forward op that has them; also returns that op."""
    values, first = np.unique(value[forward], return_index=True)
    order = np.argsort(first, kind="stable")
    number = np.zeros(int(value.max()) + 1, dtype=np.int32)
    number[values[order]] = np.arange(len(values), dtype=np.int32)
    return number[value], forward[first[order]]
