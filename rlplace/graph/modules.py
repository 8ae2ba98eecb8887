"""Module paths as a tree: common ancestors for coarsening, and names for groups."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from rlplace.graph.opgraph import FORWARD, OpGraph

_DOMINANT = 0.75
"""A group is named after the deepest module that holds this share of its work."""


class ModuleTree:
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
        """Deepest module that contains both."""
        while a != b:
            if self.depth[a] >= self.depth[b]:
                a = self.parent[a]
            else:
                b = self.parent[b]
        return a

    def common(self, label: NDArray[np.int64], count: int) -> list[int]:
        """Per label the deepest module that contains all ops with that label."""
        module_of_label = [-1] * count
        for node, item in zip(self.node, label.tolist(), strict=True):
            module_of_label[item] = node if module_of_label[item] < 0 else self.lowest_common(module_of_label[item], node)
        return module_of_label

    def nearest(self, path: str) -> int:
        """Index of the first op whose module shares the longest path with `path`."""
        wanted = path.split(".")

        def shared(node: int) -> int:
            pairs = zip(wanted, self.paths[node].split("."), strict=False)
            return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

        return max(range(len(self.node)), key=lambda op: shared(self.node[op]))


def unique_names(graph: OpGraph, op_group: NDArray[np.int32]) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Names and module paths of groups.

    A group is named after the deepest module that holds three quarters of its work (FLOPs plus bytes); "#2", "#3", ... tell
    groups of one module apart, in the order of their first ops.

    Args:
        graph: The graph.
        op_group: int32 [N].

    Returns:
        G unique names, and per group the module paths of its forward ops in order of first use.
    """
    forward = np.flatnonzero(graph.op_phase == FORWARD)
    tree = ModuleTree(graph.op_module[op] for op in forward.tolist())
    work = (graph.op_flops + graph.op_bytes + 1.0)[forward].tolist()
    count = int(op_group.max()) + 1
    shares: list[dict[int, float]] = [{} for _ in range(count)]
    modules: list[dict[str, None]] = [{} for _ in range(count)]
    for node, group, amount in zip(tree.node, op_group[forward].tolist(), work, strict=True):
        modules[group].setdefault(tree.paths[node])
        share = shares[group]
        share[node] = share.get(node, 0.0) + amount
    names: list[str] = []
    seen: dict[str, int] = {}
    for share in shares:
        base = _dominant(tree, share) or "model"
        seen[base] = seen.get(base, 0) + 1
        names.append(base if seen[base] == 1 else f"{base}#{seen[base]}")
    return tuple(names), tuple(tuple(paths) for paths in modules)


def _dominant(tree: ModuleTree, share: dict[int, float]) -> str:
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
