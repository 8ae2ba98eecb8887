"""Step 1a of ParDNN: cutting the graph into paths.

The K heaviest paths, each taken out before the next one is looked for, become the primary clusters; everything else falls into
secondary clusters by following, from the most critical unvisited node on, the child on the longest way to the end. Time
O(K (V + E)).

Nodes that may not go to every device in use stay out of primaries and become clusters of their own.
"""

# Compiled functions take their types from their arguments.
# mypy: disable-error-code="no-untyped-def, assignment"
from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.compiled import entry
from rlplace.placement.published.pardnn.nodegraph import NodeGraph


@entry
def levels(order, weight, out, cluster):
    """Returns float64 [V] top levels and float64 [V] bottom levels in seconds; `out` holds the `Edges`, of which those inside
    a cluster (numbers from 0 up) cost nothing.
    """
    ptr, child, edge_s = out
    top, bottom = np.zeros(len(order)), np.zeros(len(order))
    for node in order:
        for k in range(ptr[node], ptr[node + 1]):
            cost = 0.0 if cluster[node] >= 0 and cluster[node] == cluster[child[k]] else edge_s[k]
            top[child[k]] = max(top[child[k]], top[node] + weight[node] + cost)
    for i in range(len(order) - 1, -1, -1):
        node = order[i]
        longest = 0.0
        for k in range(ptr[node], ptr[node + 1]):
            cost = 0.0 if cluster[node] >= 0 and cluster[node] == cluster[child[k]] else edge_s[k]
            longest = max(longest, cost + bottom[child[k]])
        bottom[node] = weight[node] + longest
    return top, bottom


@entry
def heaviest_paths(order, weight, out, barred, count, cluster):
    """Fills `cluster` with the numbers of the heaviest paths, each among the nodes left, up to `count`; returns how many.

    barred: bool [V], nodes that stay out of paths. cluster: int32 [V], -1 everywhere.
    """
    ptr, children, edge_s = out
    num = len(order)
    bottom, following = np.zeros(num), np.empty(num, dtype=np.int32)
    for path in range(count):
        start = -1
        for i in range(num - 1, -1, -1):
            node = order[i]
            if barred[node] or cluster[node] >= 0:
                continue
            longest, next_node = 0.0, -1
            for k in range(ptr[node], ptr[node + 1]):
                child = children[k]
                if barred[child] or cluster[child] >= 0:
                    continue
                # Among equally heavy children the one with the smallest number.
                length = edge_s[k] + bottom[child]
                if next_node < 0 or length > longest or (length == longest and child < next_node):
                    longest, next_node = length, child
            bottom[node], following[node] = weight[node] + longest, next_node
            if start < 0 or bottom[node] > bottom[start] or (bottom[node] == bottom[start] and node < start):
                start = node
        if start < 0:
            return path
        while start >= 0:
            cluster[start] = path
            start = following[start]
    return count


@entry
def greedy_paths(starts, out, barred, bottom, cluster, number):
    """Cuts what is left into paths: from each start on to the unvisited child on the longest way to the end.

    starts: int32 [V], nodes by falling priority. number: of the first path. Returns the number after the last one.
    """
    ptr, children, edge_s = out
    for node in starts:
        if cluster[node] >= 0:
            continue
        alone = barred[node]
        while node >= 0:
            cluster[node] = number
            longest, next_node = -1.0, -1
            if not alone:
                for k in range(ptr[node], ptr[node + 1]):
                    child = children[k]
                    if cluster[child] < 0 and not barred[child] and edge_s[k] + bottom[child] > longest:
                        longest, next_node = edge_s[k] + bottom[child], child
            node = next_node
        number += 1
    return number


@dataclass(frozen=True, eq=False)
class Clusters:
    """A graph cut into paths.

    Attributes:
        cluster: int32 [V]; the primaries are 0 to `primaries` - 1, the secondaries follow by falling criticality.
        primaries: Number of primaries, K unless the graph ran out of nodes.
        member_ptr: int64 [S + 1]; cluster s holds ``member[member_ptr[s]:member_ptr[s + 1]]``.
        member: int32 [V], nodes of each cluster in topological order.
        top_s: float64 [V], longest path to the start of a node, with edges inside clusters at no cost.
    """

    cluster: NDArray[np.int32]
    primaries: int
    member_ptr: NDArray[np.int64]
    member: NDArray[np.int32]
    top_s: NDArray[np.float64]

    @property
    def num_clusters(self) -> int:
        return len(self.member_ptr) - 1

    def members(self, cluster: int) -> NDArray[np.int32]:
        """Returns the nodes of a cluster, in order."""
        return self.member[self.member_ptr[cluster] : self.member_ptr[cluster + 1]]


def slice_graph(graph: NodeGraph, count: int | None = None, room_bytes: NDArray[np.float64] | None = None) -> Clusters:
    """Cuts a graph.

    Args:
        graph: The graph.
        count: K, the number of primaries; default the number of devices in use.
        room_bytes: float64 [K]; the part of a primary that does not fit goes to secondaries. Default: no limit.
    """
    cluster = np.full(graph.num_nodes, -1, dtype=np.int32)
    wanted = len(graph.devices) if count is None else count
    primaries = int(heaviest_paths(graph.order, graph.weight_s, graph.out, graph.restricted, wanted, cluster))
    if room_bytes is not None:
        for path in range(primaries):
            nodes = graph.order[cluster[graph.order] == path]
            cluster[nodes[np.cumsum(graph.footprint_bytes[nodes]) > room_bytes[path]]] = -1
    top, bottom = levels(graph.order, graph.weight_s, graph.out, cluster)
    # Most critical first; among equally critical nodes the first one, so that a path is not entered in its middle.
    starts = np.lexsort((np.arange(graph.num_nodes), top, -_rounded(top + bottom))).astype(np.int32)
    number = int(greedy_paths(starts, graph.out, graph.restricted, bottom, cluster, primaries))
    return finish_clusters(graph, cluster, primaries, number)


def finish_clusters(graph: NodeGraph, cluster: NDArray[np.int32], primaries: int, number: int) -> Clusters:
    """Returns clusters whose secondaries are numbered by criticality, the highest level of their nodes."""
    top, bottom = levels(graph.order, graph.weight_s, graph.out, cluster)
    level = _rounded(top + bottom)
    critical, first = np.zeros(number), np.full(number, np.inf)
    np.maximum.at(critical, cluster, level)
    np.minimum.at(first, cluster, top)
    sequence = np.lexsort((first, -critical))
    rank = np.empty(number, dtype=np.int32)
    rank[sequence[sequence >= primaries]] = np.arange(primaries, number)
    rank[:primaries] = np.arange(primaries)
    cluster = rank[cluster]
    member = np.lexsort((np.argsort(graph.order), cluster)).astype(np.int32)
    ptr = np.searchsorted(cluster[member], np.arange(number + 1)).astype(np.int64)
    return Clusters(cluster, primaries, ptr, member, top)


def bind_groups(graph: NodeGraph, clusters: Clusters) -> Clusters:
    """Puts all nodes of a group into one cluster: a primary if one holds any of them, else that of its heaviest node.

    Clusters are then no paths any more; what is mapped is what a plan can place.
    """
    cluster = clusters.cluster
    first = np.full(int(graph.group.max(initial=-1)) + 1, clusters.num_clusters, dtype=np.int32)
    # Primaries first, then the heaviest, then the first.
    order = np.lexsort((np.arange(graph.num_nodes), -graph.weight_s, cluster >= clusters.primaries))
    _, at = np.unique(graph.group[order], return_index=True)
    first[graph.group[order[at]]] = cluster[order[at]]
    bound = first[graph.group]
    if (bound == cluster).all():
        return clusters
    kept = np.unique(np.concatenate([np.arange(clusters.primaries), bound]))
    return finish_clusters(graph, np.searchsorted(kept, bound).astype(np.int32), clusters.primaries, len(kept))


def _rounded(level_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns levels to nine digits of the highest one, so that sums in another order are still equal."""
    scale = float(level_s.max(initial=0.0))
    return np.round(level_s / scale, 9) if scale > 0 else level_s
