"""Directed graphs given as arrays of edges: entries by key, successor lists, topological orders, components, disjoint sets."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from rlplace.problem.problem import Problem


def grouped(keys: NDArray[Any], entries: NDArray[Any], count: int) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Returns entries by key, in their order: those of key k are ``entries[ptr[k] : ptr[k + 1]]``.

    Args:
        keys: Integer [E], below `count`.
        entries: [E].
        count: Number of keys.

    Returns:
        int64 [count + 1] offsets, and the entries.
    """
    ptr = np.concatenate([[0], np.cumsum(np.bincount(keys, minlength=count))]).astype(np.int64)
    return ptr, entries[np.argsort(keys, kind="stable")]


def successor_lists(source: NDArray[Any], target: NDArray[Any], count: int) -> tuple[list[int], list[int]]:
    """Returns successors of all nodes as (`following`, `starts`): those of node i are ``following[starts[i] : starts[i + 1]]``.

    Args:
        source: Integer [E], where each edge starts.
        target: Integer [E], where it ends; the successors of a node keep the order of its edges.
        count: Number of nodes.
    """
    starts, following = grouped(source, target, count)
    return following.tolist(), starts.tolist()


def topological_order(
    source: NDArray[Any], target: NDArray[Any], count: int, *, key: NDArray[Any] | None = None, depth_first: bool = False
) -> tuple[list[int], int | None]:
    """Sorts nodes by Kahn's algorithm; ready nodes leave in order of discovery, so the result is deterministic.

    Args:
        source: Integer [E], where each edge starts.
        target: Integer [E], where it ends.
        count: Number of nodes.
        key: [N]; the ready node with the least key leaves first instead, the lower number on ties.
        depth_first: The node that became ready last leaves first instead; of those that become ready together, the lowest.

    Returns:
        The nodes that could be ordered, and the first node that waits on a cycle, or None.
    """
    if depth_first:
        descending = np.argsort(-target, kind="stable")
        source, target = source[descending], target[descending]
    elif key is not None:  # nodes in order of their keys, so that the least number leaves first
        by_key = np.argsort(key, kind="stable")
        rank = np.empty(count, dtype=np.int64)
        rank[by_key] = np.arange(count)
        source, target = rank[source], rank[target]
    following, starts = successor_lists(source, target, count)
    missing = np.bincount(target, minlength=count).tolist()
    ready: Any = deque(node for node in range(count) if missing[node] == 0)
    take, put = ready.popleft, ready.append
    if depth_first:
        ready.reverse()
        take = ready.pop
    elif key is not None:
        ready = list(ready)
        take, put = partial(heappop, ready), partial(heappush, ready)
    order = []
    while ready:
        node = take()
        order.append(node)
        for successor in following[starts[node] : starts[node + 1]]:
            missing[successor] -= 1
            if missing[successor] == 0:
                put(successor)
    stuck = None if len(order) == count else next(node for node in range(count) if missing[node] > 0)
    if key is None or depth_first:
        return order, stuck
    return by_key[order].tolist(), None if stuck is None else int(by_key[stuck])


def strong_components(count: int, source: NDArray[Any], target: NDArray[Any]) -> NDArray[np.int32]:
    """Returns int32 [count], the smallest node of the strongly connected component of each node."""
    return _smallest_members(count, source, target, "strong")


def components(count: int, a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.int32]:
    """Returns int32 [count], the smallest node of the component of each node, with edges (a, b)."""
    return _smallest_members(count, a, b, "weak")


def _smallest_members(count: int, a: NDArray[Any], b: NDArray[Any], connection: str) -> NDArray[np.int32]:
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    graph = coo_array((np.ones(len(a), dtype=np.int8), (a, b)), shape=(count, count))
    _, label = connected_components(graph.tocsr(), connection=connection)
    _, first, inverse = np.unique(label, return_index=True, return_inverse=True)
    return first[inverse].astype(np.int32)


class UnionFind:
    """Disjoint sets that are joined one pair at a time; a node that was never joined is a set of its own."""

    def __init__(self) -> None:
        self._parent: dict[Any, Any] = {}

    def find(self, node: Any) -> Any:
        """Returns the set's representative."""
        parent = self._parent
        root = node
        while (above := parent.get(root, root)) != root:
            root = above
        while (above := parent.get(node, node)) != root:
            parent[node] = root
            node = above
        return root

    def union(self, kept: Any, gone: Any) -> None:
        """Joins two sets; the representative of the first is that of both."""
        self._parent[self.find(gone)] = self.find(kept)


def reach(problem: Problem, op: int, *, backwards: bool) -> NDArray[np.bool_]:
    """Returns the strict descendants of an op, or its strict ancestors when `backwards`: bool [N]."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import breadth_first_order

    ends = problem.op_edges
    edges = csr_array((np.ones(len(ends[0]), dtype=np.int8), ends[::-1] if backwards else ends), shape=(problem.num_ops,) * 2)
    reached = np.zeros(problem.num_ops, dtype=bool)
    reached[breadth_first_order(edges, op, return_predecessors=False)[1:]] = True  # the op itself comes first
    return reached


def longest_ways(problem: Problem, weight: Sequence[float], *, backwards: bool) -> list[Any]:
    """Returns per op the largest sum of weights, one an op, of a chain of ops that leads to it, or of one that it leads to."""
    source, target = problem.op_edges[::-1] if backwards else problem.op_edges
    before, starts = successor_lists(target, source, problem.num_ops)
    ways: list[Any] = [0] * problem.num_ops
    for op in problem.topological_order[:: -1 if backwards else 1].tolist():
        ways[op] = max((ways[other] + weight[other] for other in before[starts[op] : starts[op + 1]]), default=0)
    return ways
