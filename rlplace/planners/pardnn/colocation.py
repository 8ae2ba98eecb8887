"""From node clusters to group devices.

ParDNN maps nodes; a plan places groups, whose ops must share a device: a variable and the ops that update it in the paper,
which co-locates them at the end; a forward op, its backward ops, parameters and update in captured models. A group's nodes
vote: each with its time for its own device, and each edge to another group with its transfer time for the device of the other
end.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlplace.planners.common.evaluate import Assignment
from rlplace.planners.pardnn.nodegraph import NodeGraph
from rlplace.planners.pardnn.slicing import Clusters
from rlplace.problem import Problem


def group_devices(problem: Problem, graph: NodeGraph, clusters: Clusters, device: NDArray[np.int32]) -> Assignment:
    """int32 [G], devices of the problem.

    Args:
        problem: The problem.
        graph: One of its graphs.
        clusters: The cut graph.
        device: int32 [S], from `rlplace.planners.pardnn.mapping.map_clusters`; -1 for clusters that can go to no device in use.
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
