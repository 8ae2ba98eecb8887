"""Start of coarsening: the ops that go together before anything is contracted.

An *anchor* is the forward op that an op goes with; an *atom* is a set of anchors that one cluster must hold.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.model.graph.opgraph import BUFFER, FORWARD, GRADIENT, PARAMETER, UPDATE, OpGraph
from rlplace.problem.contract import merged_edges
from rlplace.problem.order import components, strong_components


def picked(graph: OpGraph, ops: NDArray[Any]) -> dict[str, Any]:
    """Returns the fields that have an entry an op (sizes of named dimensions apart), of these ops."""
    names = (item.name for item in dataclasses.fields(graph) if item.name.startswith("op_") and item.name != "op_dims")
    fields = {name: values for name in names if (values := getattr(graph, name)) is not None}
    numbers = ops.tolist()
    return {key: tuple(row[op] for op in numbers) if isinstance(row, tuple) else row[ops] for key, row in fields.items()}


_DOMINANT = 0.75
"""A group is named after the deepest module that holds this share of its work."""


class ModuleHierarchy:
    """The modules that ops run in. Node 0 is the root module.

    Attributes:
        node: Tree node per op, in the order given.
        depth: Depth per tree node, 0 for the root.
        parent: Parent per tree node.
    """

    def __init__(self, paths: Iterable[str]) -> None:
        self._number: dict[str, int] = {"": 0}
        self.parent, self.depth = [0], [0]
        self.paths = [""]
        self.node = [self._add(path) for path in paths]

    def _add(self, path: str) -> int:
        known = self._number.get(path)
        if known is not None:
            return known
        parent = self._add(path.rpartition(".")[0])
        number = self._number[path] = len(self.parent)
        self.parent.append(parent)
        self.depth.append(self.depth[parent] + 1)
        self.paths.append(path)
        return number

    def lowest_common(self, a: int, b: int) -> int:
        """Returns the deepest module that contains both."""
        while a != b:
            if self.depth[a] >= self.depth[b]:
                a = self.parent[a]
            else:
                b = self.parent[b]
        return a

    def common(self, label: NDArray[np.int64], count: int) -> list[int]:
        """Returns per label the deepest module that contains all ops with that label."""
        module_of_label = [-1] * count
        for node, item in zip(self.node, label.tolist(), strict=True):
            module_of_label[item] = node if module_of_label[item] < 0 else self.lowest_common(module_of_label[item], node)
        return module_of_label

    def nearest(self, path: str) -> int:
        """Returns index of the first op whose module shares the longest path with `path`."""
        wanted = path.split(".")

        def shared(op: int) -> int:
            pairs = zip(wanted, self.paths[self.node[op]].split("."), strict=False)
            return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

        return max(range(len(self.node)), key=shared)


def unique_names(graph: OpGraph, op_group: NDArray[np.int32]) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Returns names and module paths of groups.

    A group is named after the deepest module that holds three quarters of its work (FLOPs plus bytes); groups of one
    module are numbered "#2", "#3", ... in the order of their first ops.

    Args:
        graph: The graph.
        op_group: int32 [N].

    Returns:
        G unique names, and per group the module paths of its forward ops in order of first use.
    """
    forward = np.flatnonzero(graph.op_phase == FORWARD)
    tree = ModuleHierarchy(graph.op_module[op] for op in forward.tolist())
    work = (graph.op_flops + graph.op_bytes + 1.0)[forward].tolist()
    count = int(op_group.max()) + 1
    shares: list[dict[int, float]] = [{} for _ in range(count)]  # by module, in order of first use
    for node, group, amount in zip(tree.node, op_group[forward].tolist(), work, strict=True):
        shares[group][node] = shares[group].get(node, 0.0) + amount
    names: list[str] = []
    seen: Counter[str] = Counter()
    for share in shares:
        base = _dominant(tree, share) or "model"
        seen[base] += 1
        names.append(base if seen[base] == 1 else f"{base}#{seen[base]}")
    return tuple(names), tuple(tuple(tree.paths[node] for node in share) for share in shares)


def _dominant(tree: ModuleHierarchy, share: dict[int, float]) -> str:
    total: dict[int, float] = {}
    for node, amount in share.items():
        while True:
            total[node] = total.get(node, 0.0) + amount
            if node == 0:
                break
            node = tree.parent[node]
    wanted = _DOMINANT * total[0]
    best = max((node for node, amount in total.items() if amount >= wanted), key=lambda node: (tree.depth[node], -node))
    return tree.paths[best]


_BLOB = 0.05  # of all time: however many groups are wanted, smaller knots become one cluster

Pairs = tuple[NDArray[np.int32], NDArray[np.int32]]


def op_anchors(graph: OpGraph) -> NDArray[np.int32]:
    """Returns int32 [N], the forward op that each op goes with; an update goes with the first op that reads its parameter."""
    anchor = graph.op_forward.copy()
    forward = np.flatnonzero(graph.op_phase == FORWARD)
    reader = np.full(len(graph.parameters), -1, dtype=np.int64)
    producer, first = graph.tensor_producer, graph.consumer_ptr[:-1]
    for role in (GRADIENT, PARAMETER):  # readers of a parameter come before ops that only make its gradient
        for tensor in np.flatnonzero(graph.tensor_role == role)[::-1].tolist():
            op = int(producer[tensor])
            if role == PARAMETER and graph.consumer_ptr[tensor + 1] > first[tensor]:
                op = int(graph.consumers[first[tensor]])
            if op >= 0 and anchor[op] >= 0:
                reader[graph.tensor_parameter[tensor]] = anchor[op]
    updates = np.flatnonzero(graph.op_phase == UPDATE)
    anchor[updates] = reader[graph.op_parameter[updates]]
    orphans = updates[anchor[updates] < 0]
    if len(orphans):
        tree = ModuleHierarchy(graph.op_module[op] for op in forward.tolist())
        for op in orphans.tolist():  # nothing reads the parameter: beside the module that holds it
            module = graph.parameters[graph.op_parameter[op]].name.rpartition(".")[0]
            anchor[op] = forward[tree.nearest(module)]
    return anchor


def parameter_ties(graph: OpGraph, anchor: NDArray[np.int32]) -> Pairs:
    """Pairs of forward ops that must share a device because they read, or make gradients for, one trainable parameter."""
    trainable = np.array([p.trainable for p in graph.parameters], dtype=bool)
    role, parameter = graph.tensor_role, graph.tensor_parameter
    held = (role == PARAMETER) | (role == GRADIENT)
    tied = held & trainable[np.maximum(parameter, 0)] if len(trainable) else np.zeros_like(held)
    edges = tied[graph.edge_tensor]
    produced = np.flatnonzero(tied & (graph.tensor_producer >= 0))
    updates = np.flatnonzero(graph.op_phase == UPDATE)
    reads = edges & (role[graph.edge_tensor] == PARAMETER)
    ops = np.concatenate([graph.consumers[reads], graph.tensor_producer[produced], updates])
    parameters = np.concatenate([parameter[graph.edge_tensor[reads]], parameter[produced], graph.op_parameter[updates]])
    first = np.full(len(graph.parameters), -1, dtype=np.int32)
    first[parameters[::-1]] = anchor[ops[::-1]]
    pairs = np.unique(np.stack([first[parameters], anchor[ops]], axis=1), axis=0)
    return pairs[:, 0], pairs[:, 1]


def anchor_graph(
    graph: OpGraph, anchor: NDArray[np.int32], label: NDArray[np.int32]
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int64], NDArray[np.bool_]]:
    """Returns distinct edges between labelled anchors: source, target, bytes, and whether a forward op made one of them.

    Backward edges are turned round: contraction that keeps this graph acyclic keeps every phase acyclic.
    """
    producer = graph.tensor_producer[graph.edge_tensor]
    produced = producer >= 0
    a, b = producer[produced], graph.consumers[produced]
    same = graph.op_phase[a] == graph.op_phase[b]
    size = graph.tensor_bytes[graph.edge_tensor[produced]]
    a, b, size = a[same], b[same], size[same]
    forward = graph.op_phase[a] == FORWARD
    source = label[anchor[np.where(forward, a, b)]].astype(np.int64)
    target = label[anchor[np.where(forward, b, a)]].astype(np.int64)
    other = source != target
    source, target, size, forward = source[other], target[other], size[other], forward[other]
    source, target, total, of_forward = merged_edges(source, target, graph.num_ops, size, forward)
    return source.astype(np.int32), target.astype(np.int32), total.astype(np.int64), of_forward > 0


def atoms(
    graph: OpGraph, anchor: NDArray[np.int32], seconds: NDArray[np.float64], limit: float
) -> tuple[NDArray[np.int32], Pairs]:
    """Finds the forward ops that start out in one cluster, so that the forward graph of atoms is acyclic.

    Args:
        graph: The graph.
        anchor: int32 [N], see `op_anchors`.
        seconds: float64 [N].
        limit: Share of all time that a cyclic knot of colocated ops may have and still become one cluster.

    Returns:
        int32 [N], on forward ops a value per atom; and pairs of forward ops that can only be in one group.
    """
    first, second = _same_value_pairs(graph.op_colocate)
    pairs = anchor[first], anchor[second]
    colocated = components(graph.num_ops, *pairs)
    weight = np.zeros(graph.num_ops)
    np.add.at(weight, anchor, seconds)
    limit = max(limit, _BLOB) * weight.sum()
    none = np.zeros(0, dtype=np.int32)
    for forward_only in (False, True):
        source, end, _, forward = anchor_graph(graph, anchor, colocated)
        kept = forward if forward_only else np.ones(len(source), dtype=bool)
        cyclic = strong_components(graph.num_ops, source[kept], end[kept])[colocated]
        members = np.bincount(cyclic, weights=weight)[cyclic]
        alone = np.bincount(colocated, weights=weight, minlength=graph.num_ops)[colocated]
        if not ((members > limit) & (members > alone)).any():
            return components(graph.num_ops, *_same_value_pairs(cyclic)), (none, none)
        # Colocation, or backward edges that do not mirror forward ones, would glue a large part of the model together.
    return np.arange(graph.num_ops, dtype=np.int32), pairs


def _same_value_pairs(value: NDArray[np.int32]) -> Pairs:
    _, first, inverse = np.unique(value, return_index=True, return_inverse=True)
    return first[inverse].astype(np.int32), np.arange(len(value), dtype=np.int32)


def loose_views(graph: OpGraph, label: NDArray[np.int32]) -> list[tuple[int, int]]:
    """Views of inputs and parameters, which no edge joins to anything: each with the next reader of the same storage."""
    views = []
    for tensor in np.flatnonzero(graph.tensor_producer < 0).tolist():
        readers = graph.consumers[graph.consumer_ptr[tensor] : graph.consumer_ptr[tensor + 1]]
        forward = readers[graph.op_phase[readers] == FORWARD].tolist()
        following = None
        for op in reversed(forward):
            if graph.op_kind[op] != "view":
                following = op
            elif following is not None:
                views.append((int(label[op]), int(label[following])))
    return views


def held_bytes(graph: OpGraph, anchor: NDArray[np.int32]) -> NDArray[np.float64]:
    """Returns float64 [N], bytes of parameters at their first reader and of activations at their forward op."""
    held = np.zeros(graph.num_ops)
    activation = (graph.tensor_producer >= 0) & (graph.tensor_role != GRADIENT)
    producers = graph.tensor_producer[activation]
    forward = graph.op_phase[producers] == FORWARD
    np.add.at(held, producers[forward], graph.tensor_bytes[activation][forward])
    seen: set[int] = set()
    for tensor in np.flatnonzero((graph.tensor_role == PARAMETER) | (graph.tensor_role == BUFFER)).tolist():
        index = int(graph.tensor_parameter[tensor])
        start = graph.consumer_ptr[tensor]
        if index in seen or start == graph.consumer_ptr[tensor + 1]:
            continue
        seen.add(index)
        parameter = graph.parameters[index]
        size = parameter.size_bytes + parameter.gradient_bytes + parameter.optimizer_bytes
        held[anchor[graph.consumers[start]]] += size
    return held
