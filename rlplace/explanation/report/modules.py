"""The model as a tree of modules with the groups as leaves, and the edges between groups."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from rlplace.plan import PlacementPlan
from rlplace.problem import FORWARD, UPDATE, Problem

MAX_CHILDREN = 64
"""A module with more children gets ranges of them in between, so that no level of the tree is too wide to read."""

OWN = "other ops"
"""Label of the node for groups that are directly in a module, where they are many."""

_FEW = 3
_NUMBER = re.compile(r"#\d+$")
_FEWEST_BLOCKS = 6


@dataclass(frozen=True, eq=False)
class ReportTree:
    """Modules and groups. Axes: V nodes, G groups.

    Attributes:
        parent: V node numbers, -1 for the root, which is node 0; parents come before their children.
        label: V names for display, without the parent's.
        node_of_group: G leaves.
        block: G categories for colours: the part of the model that the group is in.
        block_names: Names of the categories.
        own: Nodes that hold the groups of a module that are in none of its modules.
        order: int64 [G], position of each group in the forward pass, by which siblings are sorted.
    """

    parent: tuple[int, ...]
    label: tuple[str, ...]
    node_of_group: tuple[int, ...]
    block: tuple[int, ...]
    block_names: tuple[str, ...]
    own: tuple[int, ...]
    order: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class GroupEdges:
    """Traffic between groups in one pass. Axis: E pairs of groups, the first feeds the second in the forward pass.

    Attributes:
        source, target: int32 [E], groups of each pair.
        forward_bytes: int64 [E], activations that forward ops read.
        backward_bytes: int64 [E], gradients that return to the source.
    """

    source: NDArray[np.int32]
    target: NDArray[np.int32]
    forward_bytes: NDArray[np.int64]
    backward_bytes: NDArray[np.int64]


def module_tree(problem: Problem, plan: PlacementPlan, order: NDArray[np.int64]) -> ReportTree:
    """Returns the tree of a problem's groups, by the module paths of the plan or the problem, else by the groups' names.

    Args:
        problem: The problem.
        plan: A plan for it.
        order: int64 [G], see `forward_order`.
    """
    count = problem.num_groups
    if plan.groups is not None and len(plan.groups) == count:
        modules = [tuple(group.get("modules", ())) for group in plan.groups]
        ops = [tuple(group.get("ops", ())) for group in plan.groups]
    else:
        modules, ops = (list(known or ((),) * count) for known in (problem.group_modules, problem.group_ops))
    return tree_of(problem.name, problem.group_names, order, modules, ops)


def tree_of(
    name: str,
    groups: Sequence[str],
    order: NDArray[np.int64],
    modules: Sequence[Sequence[str]],
    ops: Sequence[Sequence[str]],
) -> ReportTree:
    """Returns the tree of groups.

    Args:
        name: Label of the root.
        groups: G names.
        order: int64 [G], position of each group in the forward pass.
        modules: G lists of modules; where one is empty, the group's name is its path.
        ops: G lists of ops.
    """
    paths, leaves = _paths(groups, modules, ops)
    children: dict[tuple[str, ...], dict[str, None]] = {(): {}}
    members: dict[tuple[str, ...], list[int]] = {}
    first: dict[tuple[str, ...], int] = {}  # position of a module's first group in the forward pass
    for group, path in enumerate(paths):
        for depth in range(len(path)):
            children.setdefault(path[:depth], {})[path[depth]] = None
            children.setdefault(path[: depth + 1], {})
            first[path[: depth + 1]] = min(first.get(path[: depth + 1], 1 << 62), int(order[group]))
        members.setdefault(path, []).append(group)
    build = _Build(order)
    stack: list[tuple[tuple[str, ...], int, str]] = [((), -1, name)]
    while stack:
        path, parent, label = stack.pop()
        while len(children[path]) == 1 and path not in members and path:  # a module that only wraps another one
            (inside,) = children[path]
            path, label = (*path, inside), f"{label}.{inside}"
        own, inner = members.get(path, []), children[path]
        if len(own) == 1 and not inner and parent >= 0:
            build.leaf(own[0], parent, label)
            continue
        node = build.add(parent, label)
        tail = path[-1] if path else ""  # a bare number says nothing without its list
        labels = {(*path, name): f"{tail}.{name}" if tail and name.isdigit() else name for name in inner}
        items: list[tuple[int, int, tuple[str, ...], str]] = []
        if inner and len(own) > _FEW:
            build.own.append(build.add(node, OWN))
            for chunk, under in build.ranges(build.own[-1], sorted((int(order[g]), g, (), leaves[g]) for g in own)):
                for _, group, _, name in chunk:
                    build.leaf(group, under, name)
        else:
            items = [(int(order[group]), group, (), leaves[group]) for group in own]
        items += [(first[key], -1, key, name) for key, name in labels.items()]
        for chunk, under in build.ranges(node, sorted(items)):
            for _, group, key, name in chunk:
                if group >= 0:
                    build.leaf(group, under, name)
                else:
                    stack.append((key, under, name))
    return build.tree(paths)


class _Build:
    """Nodes so far. Parents are numbered before their children."""

    def __init__(self, order: NDArray[np.int64]) -> None:
        self.order = order
        self.parent: list[int] = []
        self.label: list[str] = []
        self.own: list[int] = []
        self.node_of_group = [0] * len(order)

    def add(self, parent: int, label: str) -> int:
        self.parent.append(parent)
        self.label.append(label)
        return len(self.parent) - 1

    def leaf(self, group: int, parent: int, label: str) -> None:
        self.node_of_group[group] = self.add(parent, label)

    def ranges(self, node: int, items: list) -> list[tuple[list, int]]:
        """Returns the items of a node, divided into parts with a node each where there are too many."""
        if len(items) <= MAX_CHILDREN:
            return [(items, node)]
        parts = min(MAX_CHILDREN, -(-len(items) // MAX_CHILDREN))
        size = -(-len(items) // parts)
        ranges = []
        for begin in range(0, len(items), size):
            part = items[begin : begin + size]
            under = self.add(node, f"{part[0][3]} to {part[-1][3]}" if len(part) > 1 else part[0][3])
            ranges += self.ranges(under, part)
        return ranges

    def tree(self, paths: Sequence[tuple[str, ...]]) -> ReportTree:
        depth = next((d for d in range(1, 32) if len({path[:d] for path in paths}) >= _FEWEST_BLOCKS), 32)
        if all(not path for path in paths):  # no modules are known: stretches of the model
            count = min(8, max(1, len(paths)))
            names = tuple(f"part {i + 1} of {count}" for i in range(count))
            position = np.argsort(np.argsort(self.order, kind="stable"), kind="stable")
            block = tuple((position * count // max(1, len(paths))).tolist())
        else:
            number: dict[tuple[str, ...], int] = {}
            for group in np.argsort(self.order, kind="stable").tolist():
                number.setdefault(paths[group][:depth], len(number))
            block = tuple(number[path[:depth]] for path in paths)
            names = tuple(".".join(path) or "several modules" for path in number)
        nodes = (tuple(self.parent), tuple(self.label), tuple(self.node_of_group))
        return ReportTree(*nodes, block, names, tuple(self.own), self.order)


def forward_order(problem: Problem) -> NDArray[np.int64]:
    """Returns int64 [G], the position of each group's first forward op in a topological order; groups without ops come last."""
    order = np.full(problem.num_groups, problem.num_ops, dtype=np.int64)
    position = np.argsort(problem.topological_order)
    for ops in (np.arange(problem.num_ops), np.flatnonzero(problem.op_phase == FORWARD)):  # forward ops have the last word
        order[problem.op_group[ops]] = problem.num_ops
        np.minimum.at(order, problem.op_group[ops], position[ops])
    return order


def _paths(
    groups: Sequence[str], modules: Sequence[Sequence[str]], ops: Sequence[Sequence[str]]
) -> tuple[list[tuple[str, ...]], list[str]]:
    """Returns per group the path that its modules have in common, empty where nothing is known, and its own label."""
    paths, labels = [], []
    for name, own, inside in zip(groups, modules, ops, strict=True):
        if own:
            split = [[part for part in str(module).split(".") if part] for module in own]
            path = tuple(parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, zip(*split, strict=False)))
        else:
            whole = tuple(part for part in _NUMBER.sub("", name).split(".") if part)
            path = whole if len(whole) > 1 else ()
        label = name.rpartition(".")[2] if path else name
        if inside and path:
            first = str(inside[0]).rpartition("/")[2] or name
            label = first if len(inside) == 1 else f"{first} + {len(inside) - 1}"
        paths.append(path)
        labels.append(label)
    return paths, labels


def group_edges(problem: Problem) -> GroupEdges:
    """Returns the edges between different groups, in the direction of the forward pass."""
    source, target = problem.edge_source_group.astype(np.int64), problem.op_group[problem.consumers].astype(np.int64)
    size = problem.tensor_bytes[problem.edge_tensor]
    phase = problem.op_phase[problem.consumers]
    producer = problem.tensor_producer[problem.edge_tensor]
    made_by = np.where(producer >= 0, problem.op_phase[np.maximum(producer, 0)], FORWARD)
    forward = (phase == FORWARD) | (made_by == FORWARD)  # an activation, also one that another group's backward reads
    kept = (source != target) & (phase != UPDATE)
    low, high = np.where(forward, source, target)[kept], np.where(forward, target, source)[kept]
    key, where = np.unique(low * problem.num_groups + high, return_inverse=True)
    ahead, back = np.zeros(len(key), dtype=np.int64), np.zeros(len(key), dtype=np.int64)
    np.add.at(ahead, where[forward[kept]], size[kept][forward[kept]])
    np.add.at(back, where[~forward[kept]], size[kept][~forward[kept]])
    groups = max(1, problem.num_groups)
    return GroupEdges((key // groups).astype(np.int32), (key % groups).astype(np.int32), ahead, back)
