"""Step 1b of ParDNN, LFLAM: primaries get a device each, secondaries go where their traffic is unless that unbalances the load.

A secondary is looked at within its span, from the expected finish of the last parent of its first node to the expected start
of the first child of its last node. Fenwick trees over levels (distinct expected starts) answer how much work each device, and
no device yet, has in a span. Time O(V log^2 V) with a fixed number of devices.

Locality: a cluster whose whole traffic is with one device (and, where communication dominates, one that has more than its
share with one device) goes there if the work still open in the span can make up for it, if no imbalance appears or grows
there, or if its traffic outweighs the work concerned. Repeated, because a mapped cluster settles the traffic of its neighbours.
Load: what is left goes, by falling criticality, where work in the span plus traffic with all other devices is least, ties to
the device of most traffic.

ParDNN maps nodes; a plan places groups, whose ops must share a device: a variable and the ops that update it in the paper,
which co-locates them at the end; a forward op, its backward ops, parameters and update in captured models. A group's nodes
vote: each with its time for its own device, and each edge to another group with its transfer time for the device of the other
end.

Axes: S clusters, K devices in use, L levels, V nodes.
"""

# Compiled functions take their types from their arguments.
# mypy: disable-error-code="no-untyped-def, assignment"
from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlplace.compiled import entry, inner
from rlplace.placement.common.evaluate import Assignment
from rlplace.placement.published.pardnn.nodegraph import Edges, NodeGraph
from rlplace.placement.published.pardnn.slicing import Clusters
from rlplace.problem import Problem
from rlplace.problem.contract import merged_edges

HIGH_CCR = 10.0
"""From this ratio of communication to computation on, a cluster with more than a K-th of its traffic at one device counts as
local there."""


class ClusterCosts(NamedTuple):
    """Clusters, and what they cost."""

    time_s: Any  # float64 [S, K]
    size: Any  # float64 [S], footprints in bytes
    start: Any  # int64 [S], first level of the span
    end: Any  # int64 [S], level after its last
    own: Any  # float64 [S], the cluster's own work in the span
    near: Any  # `Edges` to neighbouring clusters, with the seconds of the traffic in both directions
    total: Any  # float64 [S], all traffic of a cluster
    member_ptr: Any  # int64 [S + 1]
    member: Any  # int32 [V]
    level: Any  # int64 [V]
    node_s: Any  # float64 [V, K]
    weight: Any  # float64 [V]
    ticks: Any  # float64 [L + 1], starts of the levels in seconds, and the end of the step
    distance: Any  # float64 [K, K], what traffic between two devices costs relative to its mean


class Mapping(NamedTuple):
    """Devices of clusters, and what follows from them."""

    chosen: Any  # int32 [S], -1 where open
    room: Any  # float64 [K] bytes
    traffic: Any  # float64 [S, K], seconds with what is mapped
    trees: Any  # float64 [K, L + 1], Fenwick trees over levels of the work mapped to each device
    open_tree: Any  # float64 [L + 1], one of the work not mapped yet


@inner
def _add(tree, index, value):
    """Adds to one level of a Fenwick tree."""
    i = index + 1
    while i < len(tree):
        tree[i] += value
        i += i & -i


@inner
def _sum(tree, end):
    """Returns the sum over the levels before `end`."""
    total, i = 0.0, end
    while i > 0:
        total += tree[i]
        i -= i & -i
    return total


@inner
def _span(tree, start, end):
    """Returns the sum over the levels from `start` up to `end`."""
    return _sum(tree, end) - _sum(tree, start)


@inner(forceinline=True)  # records are passed by value
def _assign(cluster, device, c, s):
    """Maps a cluster: its work moves from the open tree to the device's, and its neighbours' traffic goes there."""
    member, level, node_s, weight, near = c.member, c.level, c.node_s, c.weight, c.near
    traffic, tree, open_tree, others, seconds = s.traffic, s.trees[device], s.open_tree, near.node, near.cost
    s.chosen[cluster] = device
    s.room[device] -= c.size[cluster]
    for i in range(c.member_ptr[cluster], c.member_ptr[cluster + 1]):
        node = member[i]
        _add(tree, level[node], node_s[node, device])
        _add(open_tree, level[node], -weight[node])
    for k in range(near.ptr[cluster], near.ptr[cluster + 1]):
        traffic[others[k], device] += seconds[k]


@entry
def map_all(sequence, rounds, most_communicating, work_share, c, s):
    """Fills ``s.chosen``: locality first, then load balancing.

    sequence: int32, the open clusters by falling criticality.
    work_share: how much work in the span counts beside traffic when load is balanced; below 0: by what the cluster adds.
    c: The `ClusterCosts`. s: The `Mapping`, with devices that are settled beforehand.
    """
    # Each access to a field of a record inside of a loop would count references.
    chosen, room, traffic, trees, open_tree = s
    time_s, size, starts, ends, own, total = c.time_s, c.size, c.start, c.end, c.own, c.total
    level, weight, ticks, distance, num_devices = c.level, c.weight, c.ticks, c.distance, len(trees)
    for node in range(len(level)):
        _add(open_tree, level[node], weight[node])
    for cluster in range(len(chosen)):
        if chosen[cluster] >= 0:
            _assign(cluster, chosen[cluster], c, s)
    work = np.zeros(num_devices)
    for _ in range(rounds):
        mapped = 0
        for cluster in sequence:
            if chosen[cluster] >= 0:
                continue
            best = 0
            for device in range(1, num_devices):
                if traffic[cluster, device] > traffic[cluster, best]:
                    best = device
            gain, start, end = traffic[cluster, best], starts[cluster], ends[cluster]
            if gain <= 0.0 or time_s[cluster, best] == np.inf or size[cluster] > room[best]:
                continue
            whole = gain >= total[cluster] * (1.0 - 1e-9)
            if not whole and not (most_communicating and gain > total[cluster] / num_devices):
                continue
            most, least, summed = 0.0, np.inf, 0.0
            for device in range(num_devices):
                work[device] = _span(trees[device], start, end)
                most, least, summed = max(most, work[device]), min(least, work[device]), summed + work[device]
            free = max(0.0, _span(open_tree, start, end) - own[cluster])
            seconds = time_s[cluster, best]
            loaded = work[best] + seconds
            slack = 1e-9 * (loaded + summed + free)
            # (a) What is still open in the span can fill the other devices up to the new load of this one.
            absorbs = summed + seconds + free >= num_devices * loaded - slack
            # (b) This device does not become the most loaded one, or the loads lie closer together than before.
            low = loaded
            for device in range(num_devices):
                if device != best:
                    low = min(low, work[device])
            balanced = loaded <= most + slack or max(most, loaded) - low < most - least - slack
            # (c) The traffic is more than all work that the cluster could be in the way of.
            outweighs = gain > max(seconds, work[best], free) + slack
            if absorbs or balanced or outweighs:
                _assign(cluster, best, c, s)
                mapped += 1
        if mapped == 0:
            break
    for cluster in sequence:
        if chosen[cluster] >= 0:
            continue
        best, lowest, roomiest, start, end = -1, np.inf, -1, starts[cluster], ends[cluster]
        for device in range(num_devices):
            if time_s[cluster, device] < np.inf and (roomiest < 0 or room[device] > room[roomiest]):
                roomiest = device
        for device in range(num_devices):
            if time_s[cluster, device] == np.inf or (size[cluster] > room[device] and device != roomiest):
                continue
            cost = _span(trees[device], start, end)
            if work_share < 0.0:
                # A device that is busy throughout the span is held up by all of the cluster's time, an idle one by none.
                cost = min(1.0, cost / max(ticks[end] - ticks[start], 1e-30)) * time_s[cluster, device]
            else:
                cost = work_share * (cost + time_s[cluster, device])
            for other in range(num_devices):
                cost += traffic[cluster, other] * distance[device, other]
            tie = 1e-9 * lowest if best >= 0 else 0.0
            if cost < lowest - tie or (
                best >= 0 and cost <= lowest + tie and traffic[cluster, device] > traffic[cluster, best]
            ):
                best, lowest = device, cost
        if best >= 0:
            _assign(cluster, best, c, s)


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
        clusters: Clusters by `slice_graph`.
        work_share: Weight of the work in the span beside traffic when load is balanced, above 0; the paper's rule is 1,
            and less keeps together what exchanges much. None: instead of that work the cluster's own time counts, as far as
            the device is busy in the span.
        room_bytes: float64 [K], footprints that devices can take while others can; default no limit.

    Returns:
        int32 [S], index into the devices in use; -1 where there is none.
    """
    count, devices = clusters.num_clusters, len(graph.devices)
    work = float(graph.weight_s.sum())
    most_communicating = work > 0 and float(graph.cost_s.sum()) / work >= HIGH_CCR
    ticks, level = np.unique(clusters.top_s, return_inverse=True)
    start, end = (np.searchsorted(ticks, time).astype(np.int64) for time in spans(graph, clusters))
    time_s = np.zeros((count, devices))
    np.add.at(time_s, clusters.cluster, graph.time_s)
    inside = (level >= start[clusters.cluster]) & (level < end[clusters.cluster])
    device = np.full(count, -1, dtype=np.int32)
    device[: clusters.primaries] = np.arange(clusters.primaries)
    only = np.isfinite(time_s).sum(axis=1) == 1
    device[only] = np.isfinite(time_s[only]).argmax(axis=1)
    near, total = cluster_graph(graph, clusters), np.zeros(count)
    np.add.at(total, near.node, near.cost)
    costs = ClusterCosts(
        time_s=time_s,
        size=np.bincount(clusters.cluster, weights=graph.footprint_bytes, minlength=count),
        start=start,
        end=end,
        own=np.bincount(clusters.cluster[inside], weights=graph.weight_s[inside], minlength=count),
        near=near,
        total=total,
        member_ptr=clusters.member_ptr,
        member=clusters.member,
        level=level.astype(np.int64),
        node_s=graph.time_s,
        weight=graph.weight_s,
        ticks=np.append(ticks, float((clusters.top_s + graph.weight_s).max())),
        distance=graph.distance,
    )
    room = np.full(devices, np.inf) if room_bytes is None else room_bytes.astype(np.float64)
    trees = np.zeros((devices, len(ticks) + 1)), np.zeros(len(ticks) + 1)
    mapping = Mapping(device, room, np.zeros((count, devices)), *trees)
    rounds = max(1, int(np.ceil(np.log2(max(graph.num_nodes, 2)))))
    sequence = np.flatnonzero(device < 0).astype(np.int32)
    map_all(sequence, rounds, most_communicating, -1.0 if work_share is None else work_share, costs, mapping)
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


def cluster_graph(graph: NodeGraph, clusters: Clusters) -> Edges:
    """Returns the traffic between clusters in both directions; a tensor counts once per reading cluster."""
    source, target = clusters.cluster[graph.source].astype(np.int64), clusters.cluster[graph.target].astype(np.int64)
    apart = np.flatnonzero(source != target)
    count = clusters.num_clusters
    _, first = np.unique(graph.parcel[apart] * count + target[apart], return_index=True)
    edge = apart[first]
    ends = source[edge], target[edge]
    row, column, cost = merged_edges(np.concatenate(ends), np.concatenate(ends[::-1]), count, np.tile(graph.cost_s[edge], 2))
    return Edges(np.searchsorted(row, np.arange(count + 1)).astype(np.int64), column.astype(np.int32), cost)


def group_devices(problem: Problem, graph: NodeGraph, clusters: Clusters, device: NDArray[np.int32]) -> Assignment:
    """Returns int32 [G], device of each group, by the votes of its nodes.

    Args:
        problem: The problem.
        graph: One of the problem's graphs.
        clusters: The graph cut into clusters.
        device: int32 [S], from `map_clusters`; -1 for clusters that no device in use can run.
    """
    node = device[clusters.cluster]
    count, groups = len(graph.devices), problem.num_groups
    votes = np.zeros((groups, count))
    placed = node >= 0
    seconds = graph.time_s[placed, node[placed]]
    np.add.at(votes, (graph.group[placed], node[placed]), seconds)
    source, target = graph.group[graph.source], graph.group[graph.target]
    for here, there, end in ((source, target, graph.target), (target, source, graph.source)):
        counts = (here != there) & (node[end] >= 0)
        np.add.at(votes, (here[counts], node[end][counts]), graph.cost_s[counts])
    # Groups whose nodes agree stay where mapping put them, however much traffic calls them elsewhere.
    low, high = np.full(groups, count, dtype=np.int32), np.full(groups, -1, dtype=np.int32)
    np.minimum.at(low, graph.group[placed], node[placed])
    np.maximum.at(high, graph.group[placed], node[placed])
    used = list(graph.devices)
    votes[~problem.group_allowed[:, used]] = -np.inf
    column = np.where(low == high, low, votes.argmax(axis=1))
    # Groups without nodes, or that can go to none of these devices, go to the first one they may use, the least filled one.
    result = np.array(used, dtype=np.int32)[column]
    lost = np.flatnonzero((high < 0) | ~problem.group_allowed[np.arange(groups), result])
    if len(lost):
        load = np.bincount(
            np.delete(result, lost), weights=np.delete(problem.resident_bytes, lost), minlength=problem.num_devices
        )
        for group in lost:
            result[group] = int(np.where(problem.group_allowed[group], load, np.inf).argmin())
            load[result[group]] += float(problem.resident_bytes[group])
    return result
