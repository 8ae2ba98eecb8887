"""Compiled parts of ParDNN's slicing and mapping.

All of it lies in one file, because numba's on-disk cache only notices changes of the file that holds the compiled function.
Graph arguments are those of `rlplace.placement.published.pardnn.nodegraph.NodeGraph`, edges by source (`out_ptr`, `out`,
`out_cost`).
"""

# Compiled functions take their types from their arguments.
# mypy: disable-error-code="no-untyped-def, assignment"
from __future__ import annotations

import numpy as np

from rlplace.compiled import entry, inner


@entry
def levels(order, weight, out_ptr, out, out_cost, cluster, top, bottom):
    """Fills `top` and `bottom` [V]; edges inside a cluster (numbers from 0 up) cost nothing."""
    for i in range(len(order)):
        top[order[i]] = 0.0
    for i in range(len(order)):
        node = order[i]
        for k in range(out_ptr[node], out_ptr[node + 1]):
            cost = 0.0 if cluster[node] >= 0 and cluster[node] == cluster[out[k]] else out_cost[k]
            top[out[k]] = max(top[out[k]], top[node] + weight[node] + cost)
    for i in range(len(order) - 1, -1, -1):
        node = order[i]
        longest = 0.0
        for k in range(out_ptr[node], out_ptr[node + 1]):
            cost = 0.0 if cluster[node] >= 0 and cluster[node] == cluster[out[k]] else out_cost[k]
            longest = max(longest, cost + bottom[out[k]])
        bottom[node] = weight[node] + longest


@entry
def heaviest_paths(order, weight, out_ptr, out, out_cost, barred, count, cluster, bottom):
    """Numbers the nodes of the heaviest paths, each among the nodes that are left, from 0 up to `count`; returns their number.

    barred: bool [V], nodes that stay out of paths. cluster: int32 [V], -1 everywhere.
    """
    num = len(order)
    following = np.empty(num, dtype=np.int32)
    for path in range(count):
        start = -1
        for i in range(num - 1, -1, -1):
            node = order[i]
            if barred[node] or cluster[node] >= 0:
                continue
            longest, next_node = 0.0, -1
            for k in range(out_ptr[node], out_ptr[node + 1]):
                child = out[k]
                if barred[child] or cluster[child] >= 0:
                    continue
                # Among equally heavy children the one with the smallest number.
                length = out_cost[k] + bottom[child]
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
def greedy_paths(starts, out_ptr, out, out_cost, barred, bottom, cluster, number):
    """Cuts what is left into paths: from each start on to the unvisited child on the longest way to the end.

    starts: int32 [V], nodes by falling priority. number: of the first path. Returns the number after the last one.
    """
    for i in range(len(starts)):
        node = starts[i]
        if cluster[node] >= 0:
            continue
        alone = barred[node]
        while node >= 0:
            cluster[node] = number
            longest, next_node = -1.0, -1
            if not alone:
                for k in range(out_ptr[node], out_ptr[node + 1]):
                    child = out[k]
                    if cluster[child] < 0 and not barred[child] and out_cost[k] + bottom[child] > longest:
                        longest, next_node = out_cost[k] + bottom[child], child
            node = next_node
        number += 1
    return number


@inner
def _add(tree, index, value):
    """Adds to one level of a Fenwick tree."""
    i = index + 1
    while i < len(tree):
        tree[i] += value
        i += i & -i


@inner
def _sum(tree, end):
    """Sum over the levels before `end`."""
    total, i = 0.0, end
    while i > 0:
        total += tree[i]
        i -= i & -i
    return total


@inner
def _assign(
    cluster, device, chosen, trees, open_tree, traffic, room, size, member_ptr, member, level, time_s, weight, near_ptr, near,
    near_cost,
):  # fmt: skip
    """Maps a cluster: its work moves from the open tree to the device's, and its neighbours' traffic goes there."""
    chosen[cluster] = device
    room[device] -= size[cluster]
    for i in range(member_ptr[cluster], member_ptr[cluster + 1]):
        node = member[i]
        _add(trees[device], level[node], time_s[node, device])
        _add(open_tree, level[node], -weight[node])
    for k in range(near_ptr[cluster], near_ptr[cluster + 1]):
        traffic[near[k], device] += near_cost[k]


@entry
def map_clusters_kernel(
    chosen, sequence, rounds, most_communicating, distance, work_share, ticks, trees, open_tree, span_start, span_end,
    cluster_time, own_in_span, total, traffic, room, size, member_ptr, member, level, time_s, weight, near_ptr, near, near_cost,
):  # fmt: skip
    """Locality first, then load balancing: fills `chosen` [S].

    chosen: int32 [S], devices of clusters that are settled beforehand, -1 elsewhere.
    sequence: int32, the other clusters by falling criticality.
    distance: float64 [K, K], what traffic between two devices costs relative to its mean.
    work_share: how much work in the span counts beside traffic when load is balanced; below 0: by what the cluster adds.
    ticks: float64 [L + 1], level starts in seconds and the end of the step.
    trees: float64 [K, L + 1], Fenwick trees over levels of the work mapped to each device; zeros.
    open_tree: float64 [L + 1], the same of the work not mapped yet; zeros.
    span_start, span_end: int64 [S], levels. own_in_span: float64 [S], the cluster's own work among them.
    cluster_time: float64 [S, K]. total: float64 [S], all traffic of a cluster. traffic: float64 [S, K], with what is mapped,
    zeros. room: float64 [K] bytes. size: float64 [S], footprints.
    near_ptr, near, near_cost: neighbouring clusters and the traffic with them.
    """
    num_devices = len(trees)
    for node in range(len(level)):
        _add(open_tree, level[node], weight[node])
    for cluster in range(len(chosen)):
        if chosen[cluster] >= 0:
            _assign(
                cluster, chosen[cluster], chosen, trees, open_tree, traffic, room, size, member_ptr, member, level, time_s,
                weight, near_ptr, near, near_cost,
            )  # fmt: skip
    work = np.zeros(num_devices)
    for _ in range(rounds):
        mapped = 0
        for i in range(len(sequence)):
            cluster = sequence[i]
            if chosen[cluster] >= 0:
                continue
            best = 0
            for device in range(1, num_devices):
                if traffic[cluster, device] > traffic[cluster, best]:
                    best = device
            gain = traffic[cluster, best]
            if gain <= 0.0 or cluster_time[cluster, best] == np.inf or size[cluster] > room[best]:
                continue
            whole = gain >= total[cluster] * (1.0 - 1e-9)
            if not whole and not (most_communicating and gain > total[cluster] / num_devices):
                continue
            start, end = span_start[cluster], span_end[cluster]
            most, least, summed = 0.0, np.inf, 0.0
            for device in range(num_devices):
                work[device] = _sum(trees[device], end) - _sum(trees[device], start)
                most, least, summed = max(most, work[device]), min(least, work[device]), summed + work[device]
            free = max(0.0, _sum(open_tree, end) - _sum(open_tree, start) - own_in_span[cluster])
            seconds = cluster_time[cluster, best]
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
                _assign(
                    cluster, best, chosen, trees, open_tree, traffic, room, size, member_ptr, member, level, time_s, weight,
                    near_ptr, near, near_cost,
                )  # fmt: skip
                mapped += 1
        if mapped == 0:
            break
    for i in range(len(sequence)):
        cluster = sequence[i]
        if chosen[cluster] >= 0:
            continue
        start, end = span_start[cluster], span_end[cluster]
        best, lowest, roomiest = -1, np.inf, -1
        for device in range(num_devices):
            if cluster_time[cluster, device] < np.inf and (roomiest < 0 or room[device] > room[roomiest]):
                roomiest = device
        for device in range(num_devices):
            if cluster_time[cluster, device] == np.inf or (size[cluster] > room[device] and device != roomiest):
                continue
            cost = _sum(trees[device], end) - _sum(trees[device], start)
            if work_share < 0.0:
                # A device that is busy throughout the span is held up by all of the cluster's time, an idle one by none.
                cost = min(1.0, cost / max(ticks[end] - ticks[start], 1e-30)) * cluster_time[cluster, device]
            else:
                cost = work_share * (cost + cluster_time[cluster, device])
            for other in range(num_devices):
                cost += traffic[cluster, other] * distance[device, other]
            tie = 1e-9 * lowest if best >= 0 else 0.0
            if cost < lowest - tie or (
                best >= 0 and cost <= lowest + tie and traffic[cluster, device] > traffic[cluster, best]
            ):
                best, lowest = device, cost
        if best < 0:
            continue
        _assign(
            cluster, best, chosen, trees, open_tree, traffic, room, size, member_ptr, member, level, time_s, weight, near_ptr,
            near, near_cost,
        )  # fmt: skip
