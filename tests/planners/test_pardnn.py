"""ParDNN: the paper's example cluster by cluster, parts of the method, the memory step."""

import numpy as np
import pytest

from rlplace.planners import get_planner
from rlplace.planners.pardnn.example import NAMES, paper_example
from rlplace.planners.pardnn.mapping import LOAD, LOCALITY, map_clusters, spans
from rlplace.planners.pardnn.nodegraph import measures, op_graph
from rlplace.planners.pardnn.slicing import slice_graph
from rlplace.simulator import simulate


def names(nodes):
    return "".join(NAMES[node] for node in nodes)


def test_the_papers_example_cluster_by_cluster():
    problem = paper_example()
    graph = op_graph(problem, [0, 1])
    clusters = slice_graph(graph)
    found = [names(clusters.members(c)) for c in range(clusters.num_clusters)]
    assert found == ["ABEIMOPQ", "CGJK", "H", "N", "F", "DL"]
    mapping = map_clusters(graph, clusters)
    assert mapping.device.tolist() == [0, 1, 1, 0, 0, 0]
    assert mapping.reason[2:].tolist() == [LOCALITY, LOAD, LOCALITY, LOAD]
    plan = get_planner("pardnn")(problem)
    assert names(np.flatnonzero(plan.device_of_group == plan.device_of_group[0])) == "ABDEFILMNOPQ"
    assert plan.predicted["step_time_s"] == 13.0
    assert simulate(problem, [0] * 17).step_time_s == 17.0


def test_levels_of_the_papers_example():
    graph = op_graph(paper_example(), [0, 1])
    assert measures(graph).parallelism == 17 / 8
    assert measures(graph).communication_ratio == 24 / 17
    alone = slice_graph(graph, 0)  # without primaries every first path is a longest one
    assert names(alone.members(0)) == "ABEIMOPQ"
    clusters = slice_graph(graph)
    start, end = spans(graph, clusters)
    assert (start[2], end[2]) == (3.0, 6.0)  # H: from the end of C to the start of J
    assert (start[3], end[3]) == (10.0, 13.0)  # N: from the end of M to the start of Q


def test_the_critical_path_with_communication_takes_18():
    from rlplace.planners.pardnn.slicing import node_levels

    graph = op_graph(paper_example(), [0, 1])
    top, bottom = node_levels(graph, np.full(17, -1, dtype=np.int32))
    assert (top + bottom).max() == 18.0 == pytest.approx((top + bottom)[NAMES.index("Q")])
