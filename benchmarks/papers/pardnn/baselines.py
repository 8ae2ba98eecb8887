"""The paper's measures of a graph, and its baselines: linear clustering with GLB mapping, and its critical-path heuristic.

Linear clustering (Kim and Browne, 1988) takes the heaviest path of what is left, again and again, until no node is left;
guided load balancing (Radulescu and van Gemund, 1998) then takes clusters by their start and gives each to the device of least
work. The critical-path heuristic (Mayer et al., 2017) puts the critical path on one device and every other node on the device
of least work at that moment. Time O(V (V + E)) and O(V + E).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlplace.placement.common.evaluate import Assignment
from rlplace.placement.published.pardnn.mapping import group_devices
from rlplace.placement.published.pardnn.nodegraph import NodeGraph
from rlplace.placement.published.pardnn.slicing import Clusters, finish_clusters, heaviest_paths, slice_graph
from rlplace.problem import Problem


def linear_clustering(problem: Problem, graph: NodeGraph) -> Assignment:
    """Returns int32 [G], devices of the problem."""
    cluster = np.full(graph.num_nodes, -1, dtype=np.int32)
    barred = np.zeros(graph.num_nodes, dtype=bool)
    number = heaviest_paths(graph.order, graph.weight_s, graph.out, barred, graph.num_nodes, cluster)
    return _least_loaded(problem, graph, finish_clusters(graph, cluster, 0, int(number)), 0)


def critical_path_first(problem: Problem, graph: NodeGraph) -> Assignment:
    """Returns int32 [G], devices of the problem."""
    path = slice_graph(graph, 1)
    single = np.arange(graph.num_nodes, dtype=np.int32) + 1
    single[path.cluster == 0] = 0
    _, cluster = np.unique(single, return_inverse=True)
    return _least_loaded(problem, graph, finish_clusters(graph, cluster.astype(np.int32), 1, int(cluster.max()) + 1), 1)


@dataclass(frozen=True)
class GraphMeasures:
    """The paper's two measures of a graph.

    Attributes:
        parallelism: DoP, total work over the work of the heaviest path (transfers count when the path is chosen).
        communication_ratio: CCR, all edges' transfer times over all nodes' times.
    """

    parallelism: float
    communication_ratio: float


def measures(graph: NodeGraph) -> GraphMeasures:
    """Returns DoP and CCR of a graph."""
    work, cluster = float(graph.weight_s.sum()), np.full(graph.num_nodes, -1, dtype=np.int32)
    barred = np.zeros(graph.num_nodes, dtype=bool)
    heaviest_paths(graph.order, graph.weight_s, graph.out, barred, 1, cluster)
    path = float(graph.weight_s[cluster == 0].sum())
    return GraphMeasures(work / path if path else 1.0, float(graph.cost_s.sum()) / work if work else 0.0)


def _least_loaded(problem: Problem, graph: NodeGraph, clusters: Clusters, given: int) -> Assignment:
    """Clusters by their start, each to the device of least work; the first `given` go to the devices of their numbers."""
    count = clusters.num_clusters
    time_s = np.zeros((count, len(graph.devices)))
    np.add.at(time_s, clusters.cluster, graph.time_s)
    start = np.full(count, np.inf)
    np.minimum.at(start, clusters.cluster, clusters.top_s)
    start[:given] = -1.0
    load = np.zeros(len(graph.devices))
    device = np.full(count, -1, dtype=np.int32)
    for cluster in np.argsort(start, kind="stable"):
        chosen = int(cluster) if cluster < given else int((load + np.where(time_s[cluster] < np.inf, 0.0, np.inf)).argmin())
        if time_s[cluster, chosen] < np.inf:
            device[cluster] = chosen
            load[chosen] += time_s[cluster, chosen]
    return group_devices(problem, graph, clusters, device)
