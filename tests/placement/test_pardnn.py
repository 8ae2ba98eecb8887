"""ParDNN: the paper's example cluster by cluster, parts of the method."""

import itertools

import networkx as nx
import numpy as np
import pytest

from rlplace.placement import get_planner
from rlplace.placement.published.pardnn.mapping import map_clusters, spans
from rlplace.placement.published.pardnn.nodegraph import folded_graph, op_graph
from rlplace.placement.published.pardnn.slicing import bind_groups, slice_graph
from rlplace.problem.generate import random_problem
from rlplace.simulator import simulate
from tests.toys import pardnn_example

NAMES = "ABCDEFGHIJKLMNOPQ"


def names(nodes):
    return "".join(NAMES[node] for node in nodes)


def test_the_papers_example_cluster_by_cluster():
    problem = pardnn_example()
    graph = op_graph(problem, [0, 1])
    clusters = slice_graph(graph)
    found = [names(clusters.members(c)) for c in range(clusters.num_clusters)]
    assert found == ["ABEIMOPQ", "CGJK", "H", "N", "F", "DL"]
    assert map_clusters(graph, clusters).tolist() == [0, 1, 1, 0, 0, 0]
    plan = get_planner("pardnn")(problem)
    assert names(np.flatnonzero(plan.device_of_group == plan.device_of_group[0])) == "ABDEFILMNOPQ"
    assert plan.predicted.step_time_s == 13.0
    assert simulate(problem, [0] * 17).step_time_s == 17.0


def test_levels_of_the_papers_example():
    graph = op_graph(pardnn_example(), [0, 1])
    alone = slice_graph(graph, 0)  # without primaries every first path is a longest one
    assert names(alone.members(0)) == "ABEIMOPQ"
    clusters = slice_graph(graph)
    start, end = spans(graph, clusters)
    assert (start[2], end[2]) == (3.0, 6.0)  # H: from the end of C to the start of J
    assert (start[3], end[3]) == (10.0, 13.0)  # N: from the end of M to the start of Q


def cut(problem, devices=None):
    graph = op_graph(problem, range(problem.num_devices) if devices is None else devices)
    return graph, slice_graph(graph)


@pytest.mark.parametrize("seed", range(4))
def test_clusters_are_disjoint_paths_and_the_first_is_a_longest_one(seed):
    problem = random_problem(seed, 40, 3, shape=("layered", "branchy")[seed % 2], shared_parameters=seed)
    graph, clusters = cut(problem)
    assert np.sort(clusters.member).tolist() == list(range(graph.num_nodes))
    edges = set(zip(graph.source.tolist(), graph.target.tolist(), strict=True))
    for index in range(clusters.num_clusters):
        nodes = clusters.members(index).tolist()
        assert all(pair in edges for pair in itertools.pairwise(nodes))
    weighted = nx.DiGraph()
    weighted.add_nodes_from(range(graph.num_nodes))
    for source, target, cost in zip(graph.source.tolist(), graph.target.tolist(), graph.cost_s.tolist(), strict=True):
        known = weighted.get_edge_data(source, target, {"weight": 0.0})["weight"]
        weighted.add_edge(source, target, weight=max(known, cost + graph.weight_s[source]))
    longest = nx.dag_longest_path_length(weighted)
    first = clusters.members(0)
    length = sum(weighted.edges[pair]["weight"] for pair in itertools.pairwise(first.tolist()))
    assert length == pytest.approx(longest)


def test_groups_are_bound_to_one_cluster():
    graph, clusters = cut(random_problem(1, 40, 3))
    bound = bind_groups(graph, clusters)
    assert all(len(set(bound.cluster[graph.group == group])) == 1 for group in range(40))
    assert bound.primaries == clusters.primaries


def test_restricted_nodes_stay_alone_and_go_where_they_may():
    problem = random_problem(2, 40, 3, null_fraction=0.4)
    graph, clusters = cut(problem)
    sizes = np.bincount(clusters.cluster)
    assert graph.restricted.any() and (sizes[clusters.cluster[graph.restricted]] == 1).all()
    device = map_clusters(graph, clusters)[clusters.cluster]
    assert np.isfinite(graph.time_s[np.arange(graph.num_nodes), device]).all()


def test_room_keeps_footprints_apart():
    problem = random_problem(3, 60, 2, memory_factor=1.6)
    graph = folded_graph(problem, [0, 1])
    room = problem.memory_limit_bytes
    clusters = slice_graph(graph, room_bytes=room)
    device = map_clusters(graph, clusters, room_bytes=room)[clusters.cluster]
    assert (np.bincount(device, weights=graph.footprint_bytes, minlength=2) <= room).all()


def test_chains_of_groups_leave_primaries_without_nodes():
    problem = random_problem(1, 500, 8, shape="chain", memory_factor=2.0)
    assert get_planner("pardnn")(problem).predicted.feasible
