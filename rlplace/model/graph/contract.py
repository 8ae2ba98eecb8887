"""Contraction of a directed acyclic graph that never makes it cyclic.

An edge from a to b may be contracted when it is a's only outgoing or b's only incoming edge: then no second path joins the
two. Neighbouring intervals of a topological order may be merged, whatever the edges.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

import numpy as np

from rlplace.problem.order import UnionFind, topological_order


class ContractionGraph:
    """A directed acyclic graph under contraction.

    Nodes keep their numbers; a contracted set is known by the number that `find` returns for its members.

    Attributes:
        successors: Per live node the live successors with the weights of the edges, such as bytes.
        predecessors: Per live node the live predecessors, likewise.
    """

    def __init__(self, count: int, source: Sequence[int], target: Sequence[int], weight: Sequence[float]) -> None:
        self.successors: list[dict[int, float]] = [{} for _ in range(count)]
        self.predecessors: list[dict[int, float]] = [{} for _ in range(count)]
        self._sets, self._live = UnionFind(), dict.fromkeys(range(count))
        for a, b, size in zip(source, target, weight, strict=True):
            self.successors[a][b] = size
            self.predecessors[b][a] = size

    def find(self, node: int) -> int:
        """Returns the representative of the set that a node is in."""
        return self._sets.find(node)

    def edges(self) -> list[tuple[int, int]]:
        """Returns all live edges, by source and order of first use."""
        return [(a, b) for a in self._live for b in self.successors[a]]

    def live(self) -> list[int]:
        """Returns representatives, in ascending order."""
        return list(self._live)

    def contractible(self, a: int, b: int) -> bool:
        """Returns whether contracting the edge from a to b is safe."""
        return len(self.successors[a]) == 1 or len(self.predecessors[b]) == 1

    def merge(self, a: int, b: int) -> tuple[int, list[tuple[int, int]]]:
        """Merges two live nodes; the caller has made sure that this is safe.

        Returns:
            The representative and the edges that this may have made contractible.
        """
        keep, gone = (a, b) if self._degree(a) >= self._degree(b) else (b, a)
        return keep, self.join(keep, gone)

    def join(self, keep: int, gone: int) -> list[tuple[int, int]]:
        """Merges a live node into another; returns the edges that this may have made contractible."""
        self._sets.union(keep, gone)
        del self._live[gone]
        fresh: list[tuple[int, int]] = []
        for forward, backward in ((self.successors, self.predecessors), (self.predecessors, self.successors)):
            forward[keep].pop(gone, None)
            moved, forward[gone] = forward[gone], {}
            for node, size in moved.items():
                backward[node].pop(gone, None)
                if node == keep:
                    continue
                total = forward[keep].get(node, 0) + size
                forward[keep][node] = backward[node][keep] = total
                if len(backward[node]) == 1:
                    fresh.append((keep, node) if forward is self.successors else (node, keep))
        if len(self.successors[keep]) == 1:
            fresh.append((keep, next(iter(self.successors[keep]))))
        if len(self.predecessors[keep]) == 1:
            fresh.append((next(iter(self.predecessors[keep])), keep))
        return fresh

    def _degree(self, node: int) -> int:
        return len(self.successors[node]) + len(self.predecessors[node])

    def depth_first_order(self) -> list[int]:
        """Returns a topological order of the live nodes that follows chains to their end before it turns to the next branch."""
        edges = np.array(self.edges(), dtype=np.int64).reshape(-1, 2)
        order, _ = topological_order(edges[:, 0], edges[:, 1], len(self.successors), depth_first=True)
        return [node for node in order if node in self._live]

    def levels(self) -> dict[int, int]:
        """Returns the number of edges on the longest path to each live node."""
        missing = {node: len(self.predecessors[node]) for node in self._live}
        order = [node for node, count in missing.items() if count == 0]
        level = dict.fromkeys(order, 0)
        for node in order:
            for after in self.successors[node]:
                level[after] = max(level.get(after, 0), level[node] + 1)
                missing[after] -= 1
                if missing[after] == 0:
                    order.append(after)
        return level

    def contract_edges(
        self,
        edges: Sequence[tuple[int, int]],
        rank: Callable[[int, int], int],
        admit: Callable[[int, int], bool],
        merged: Callable[[int, int, int], bool],
    ) -> bool:
        """Contracts contractible edges, best first, until none is left or `merged` says stop.

        Args:
            edges: Edges to try; those that contraction makes contractible join them.
            rank: Rank of an edge, higher is better; it may only fall as its ends grow. Heavier edges break ties.
            admit: Whether an edge may be contracted now; may only change from true to false.
            merged: Called with (a, b, representative) after each merge; true stops.

        Returns:
            Whether `merged` stopped the contraction.
        """
        heap: list[tuple[int, float, int, int]] = []

        def push(a: int, b: int) -> None:
            size = self.successors[a].get(b)
            if size is not None and self.contractible(a, b):
                heapq.heappush(heap, (-rank(a, b), -size, a, b))

        for a, b in edges:
            push(self.find(a), self.find(b))
        while heap:
            negative_rank, _, a, b = heapq.heappop(heap)
            a, b = self.find(a), self.find(b)
            if b not in self.successors[a] or not self.contractible(a, b):
                continue
            if rank(a, b) < -negative_rank:
                push(a, b)
            elif admit(a, b):
                keep, fresh = self.merge(a, b)
                if merged(a, b, keep):
                    return True
                for edge in fresh:
                    push(*edge)
        return False
