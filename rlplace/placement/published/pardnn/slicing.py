"""Step 1a of ParDNN: cutting the graph into paths.

The K heaviest paths, each taken out before the next one is looked for, become the primary clusters; everything else falls into
secondary clusters by following, from the most critical unvisited node on, the child on the longest way to the end. Time
O(K (V + E)).

Nodes that may not go to every device in use stay out of primaries and become clusters of their own.

Step 1b of ParDNN, LFLAM: primaries get a device each, secondaries go where their traffic is unless that unbalances the load.

A secondary is looked at within its span, from the expected finish of the last parent of its first node to the expected start
of the first child of its last node. Fenwick trees over levels (distinct expected starts) answer how much work each device, and
no device yet, has in a span. Time O(V log^2 V) with a fixed number of devices.

Locality: a cluster whose whole traffic is with one device (and, where communication dominates, one that has more than its
share with one device) goes there if the work still open in the span can make up for it, if no imbalance appears or grows
there, or if its traffic outweighs the work concerned. Repeated, because a mapped cluster settles the traffic of its neighbours.
Load: what is left goes, by falling criticality, where work in the span plus traffic with all other devices is least, ties to
the device of most traffic.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.placement.published.pardnn.nodegraph import NodeGraph


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
    from rlplace.placement.published.pardnn import kernels

    cluster, bottom = np.full(graph.num_nodes, -1, dtype=np.int32), np.zeros(graph.num_nodes)
    barred = graph.restricted
    wanted = len(graph.devices) if count is None else count
    primaries = int(kernels.heaviest_paths(graph.order, graph.weight_s, *graph.out, barred, wanted, cluster, bottom))
    if room_bytes is not None:
        for path in range(primaries):
            nodes = graph.order[cluster[graph.order] == path]
            cluster[nodes[np.cumsum(graph.footprint_bytes[nodes]) > room_bytes[path]]] = -1
    top, bottom = node_levels(graph, cluster)
    # Most critical first; among equally critical nodes the first one, so that a path is not entered in its middle.
    starts = np.lexsort((np.arange(graph.num_nodes), top, -_rounded(top + bottom))).astype(np.int32)
    number = int(kernels.greedy_paths(starts, *graph.out, barred, bottom, cluster, primaries))
    return finish_clusters(graph, cluster, primaries, number)


def finish_clusters(graph: NodeGraph, cluster: NDArray[np.int32], primaries: int, number: int) -> Clusters:
    """Levels of a clustered graph, and its secondaries renumbered by criticality, the highest level of their nodes."""
    top, bottom = node_levels(graph, cluster)
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


def node_levels(graph: NodeGraph, cluster: NDArray[np.int32]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns float64 [V] top levels and float64 [V] bottom levels in seconds, with edges inside clusters at no cost."""
    from rlplace.placement.published.pardnn import kernels

    top, bottom = np.zeros(graph.num_nodes), np.zeros(graph.num_nodes)
    kernels.levels(graph.order, graph.weight_s, *graph.out, cluster, top, bottom)
    return top, bottom


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


def cut_long_primary(graph: NodeGraph, clusters: Clusters) -> Clusters:
    """Gives every short primary a contiguous chunk of the longest one, for thin graphs that must spread their memory.

    A primary is short when it has less than half of the longest one's work divided by the number of primaries. Chunks are
    equal shares of the forward work of the longest primary, each with the same share of its backward work from the end on, so
    that activations are saved where they are read; the longest keeps the first share.
    """
    count = len(graph.devices)
    cluster = clusters.cluster.copy()
    cluster[cluster >= clusters.primaries] += count - clusters.primaries  # primaries that found no node are the shortest
    weight = np.bincount(cluster, weights=graph.weight_s, minlength=count)[:count]
    longest = int(weight.argmax())
    short = [p for p in range(count) if p != longest and weight[p] < 0.5 * weight[longest] / count]
    if not short:
        return clusters
    nodes = graph.order[cluster[graph.order] == longest]
    share = np.zeros(len(nodes), dtype=np.int64)
    for backward in (False, True):
        part = np.flatnonzero(graph.backward[nodes] == backward)
        seconds = graph.weight_s[nodes[part]]
        done = (np.cumsum(seconds) - 0.5 * seconds) / max(float(seconds.sum()), 1e-30)
        done = 1.0 - done if backward else done
        share[part] = np.clip((done * (len(short) + 1)).astype(np.int64), 0, len(short))
    cluster[nodes] = np.array([longest, *short], dtype=np.int32)[share]
    return finish_clusters(graph, cluster, count, clusters.num_clusters + count - clusters.primaries)


def _rounded(level_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """Levels to nine digits of the highest one, so that sums in another order are still equal."""
    scale = float(level_s.max(initial=0.0))
    return np.round(level_s / scale, 9) if scale > 0 else level_s


HIGH_CCR = 10.0
"""From this ratio of communication to computation on, a cluster with more than a K-th of its traffic at one device counts as
local there."""


def map_clusters(
    graph: NodeGraph,
    clusters: Clusters,
    *,
    work_share: float | None = 1.0,
    room_bytes: NDArray[np.float64] | None = None,
) -> NDArray[np.int32]:
    """Maps clusters to devices.

    Args:
        graph: The graph; primary p goes to its p-th device.
        clusters: Clusters by `rlplace.placement.published.pardnn.slicing.slice_graph`.
        work_share: Weight of the work in the span beside traffic when load is balanced, above 0; the paper's rule is 1,
            and less keeps together what exchanges much. None: instead of that work the cluster's own time counts, as far as
            the device is busy in the span.
        room_bytes: float64 [K], footprints that devices can take while others can; default no limit.

    Returns:
        int32 [S], index into the devices in use; -1 where there is none.
    """
    from rlplace.placement.published.pardnn import kernels

    count, devices = clusters.num_clusters, len(graph.devices)
    work = float(graph.weight_s.sum())
    most_communicating = work > 0 and float(graph.cost_s.sum()) / work >= HIGH_CCR
    ticks, level = np.unique(clusters.top_s, return_inverse=True)
    span_start, span_end = (np.searchsorted(ticks, time) for time in spans(graph, clusters))
    time_s = np.zeros((count, devices))
    np.add.at(time_s, clusters.cluster, graph.time_s)
    inside = (level >= span_start[clusters.cluster]) & (level < span_end[clusters.cluster])
    own = np.bincount(clusters.cluster[inside], weights=graph.weight_s[inside], minlength=count)
    device = np.full(count, -1, dtype=np.int32)
    device[: clusters.primaries] = np.arange(clusters.primaries)
    only = np.isfinite(time_s).sum(axis=1) == 1
    device[only] = np.isfinite(time_s[only]).argmax(axis=1)
    near_ptr, near, near_cost = cluster_graph(graph, clusters)
    total = np.zeros(count)
    np.add.at(total, near, near_cost)
    room = np.full(devices, np.inf) if room_bytes is None else room_bytes.astype(np.float64)
    size = np.bincount(clusters.cluster, weights=graph.footprint_bytes, minlength=count)
    rounds = max(1, int(np.ceil(np.log2(max(graph.num_nodes, 2)))))
    ends = np.append(ticks, float((clusters.top_s + graph.weight_s).max()))
    kernels.map_clusters_kernel(
        device, np.flatnonzero(device < 0).astype(np.int32), rounds, most_communicating, graph.distance,
        -1.0 if work_share is None else work_share, ends, np.zeros((devices, len(ticks) + 1)), np.zeros(len(ticks) + 1),
        span_start.astype(np.int64), span_end.astype(np.int64), time_s, own, total, np.zeros((count, devices)), room, size,
        clusters.member_ptr, clusters.member, level.astype(np.int64), graph.time_s, graph.weight_s, near_ptr, near, near_cost,
    )  # fmt: skip
    return device


def spans(graph: NodeGraph, clusters: Clusters) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns float64 [S] start and float64 [S] end of every cluster's span in seconds, as the module docstring defines it."""
    finish = clusters.top_s + graph.weight_s
    last_parent = np.zeros(graph.num_nodes)
    np.maximum.at(last_parent, graph.target, finish[graph.source])
    first_child = np.full(graph.num_nodes, float((finish).max(initial=0.0)))
    np.minimum.at(first_child, graph.source, clusters.top_s[graph.target])
    # Primaries may have lost all their nodes; what they get then is never looked at.
    last = graph.num_nodes - 1
    head, tail = clusters.member[np.minimum(clusters.member_ptr[:-1], last)], clusters.member[clusters.member_ptr[1:] - 1]
    return last_parent[head], first_child[tail]


def cluster_graph(graph: NodeGraph, clusters: Clusters) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.float64]]:
    """Traffic between clusters in both directions, by row; a tensor counts once per reading cluster.

    Returns:
        int64 [S + 1] offsets, int32 neighbours and float64 seconds.
    """
    source, target = clusters.cluster[graph.source].astype(np.int64), clusters.cluster[graph.target].astype(np.int64)
    apart = np.flatnonzero(source != target)
    count = clusters.num_clusters
    _, first = np.unique(graph.parcel[apart] * count + target[apart], return_index=True)
    edge = apart[first]
    row = np.concatenate([source[edge], target[edge]])
    column = np.concatenate([target[edge], source[edge]])
    key, inverse = np.unique(row * count + column, return_inverse=True)
    cost = np.bincount(inverse, weights=np.tile(graph.cost_s[edge], 2), minlength=len(key)).astype(np.float64)
    return np.searchsorted(key // count, np.arange(count + 1)).astype(np.int64), (key % count).astype(np.int32), cost
