"""Step 1b of ParDNN, LFLAM: primaries get a device each, secondaries go where their traffic is unless that unbalances the load.

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

import numpy as np
from numpy.typing import NDArray

from rlplace.planners.pardnn.nodegraph import NodeGraph
from rlplace.planners.pardnn.slicing import Clusters

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
        clusters: From `rlplace.planners.pardnn.slicing.slice_graph`.
        work_share: How much the work in the span counts beside traffic when load is balanced, above 0; the paper's rule is 1,
            and less keeps together what exchanges much. None: instead of that work the cluster's own time counts, as far as
            the device is busy in the span.
        room_bytes: float64 [K], footprints that devices can take while others can; default no limit.

    Returns:
        int32 [S], index into the devices in use; -1 where there is none.
    """
    from rlplace.planners.pardnn import kernels

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
    """float64 [S] start and float64 [S] end of every cluster's span in seconds, as the module docstring defines it."""
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
