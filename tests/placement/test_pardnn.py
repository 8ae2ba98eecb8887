"""ParDNN: the paper's example cluster by cluster, parts of the method, the memory step."""

import itertools
from dataclasses import replace

import networkx as nx
import numpy as np
import pytest

from rlplace.placement import get_planner
from rlplace.placement.published.pardnn import place_clusters
from rlplace.placement.published.pardnn.mapping import map_clusters, spans
from rlplace.placement.published.pardnn.memory import balance_residents, limits, peak_bytes, reduce_peaks
from rlplace.placement.published.pardnn.nodegraph import folded_graph, op_graph
from rlplace.placement.published.pardnn.slicing import bind_groups, cut_long_primary, slice_graph
from rlplace.problem.build import TensorSpec, build_problem
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


@pytest.mark.parametrize("seed", range(8))
def test_sweep_equals_the_simulators_peaks(seed):
    problem = random_problem(seed, 30, 3, training=seed % 2 == 0, shared_parameters=2, shape=("branchy", "layered")[seed % 2])
    devices = np.random.default_rng(seed).integers(0, 3, 30).astype(np.int32)
    line = simulate(problem, devices)
    np.testing.assert_array_equal(peak_bytes(problem, devices, line), line.peak_memory_bytes)


def h1_cases():
    return [
        (random_problem(3, 240, 4, shape="wavefront", width=4, shared_parameters=4), 0.9),  # like unrolled recurrent layers
        (random_problem(1, 300, 4, shape="branchy", width=8), 0.8),
        (random_problem(2, 300, 4, width=12), 0.96),
    ]


@pytest.mark.parametrize("case", range(3))
def test_h1_stays_within_nine_tenths_at_every_event_and_moves_few_nodes(case, run=simulate):
    problem, tight = h1_cases()[case]
    graph, clusters = cut(problem)
    devices = place_clusters(problem, graph, clusters)

    def run_of(assignment):
        return run(problem, assignment)

    before = peak_bytes(problem, devices, run_of(devices)).max()
    memory_bytes = int(tight * before / 0.9)
    limited = replace(problem, devices=tuple(replace(d, memory_bytes=memory_bytes) for d in problem.devices))
    assert before > limits(limited).max()
    relieved = reduce_peaks(limited, devices, run_of)
    assert (peak_bytes(limited, relieved, run_of(relieved)) <= 0.9 * memory_bytes).all()
    assert 0 < (relieved != devices)[problem.op_group].mean() <= 0.15
    if run is simulate:
        assert (simulate(limited, relieved).peak_memory_bytes <= 0.9 * memory_bytes).all()


def test_h1_frees_the_cheapest_bytes():
    # Both groups of device 0 read the tensor of device 1 late; x alone keeps its own copy alive and is enough, y is dearer.
    problem = build_problem(
        "two_readers",
        time_s=[[1.0] * 2, [1.0] * 2, [5.0] * 2, [9.0] * 2],
        tensors=[TensorSpec(0, 60, [2]), TensorSpec(1, 60, [3])],
        memory_bytes=[100, 100],
        bandwidth_bytes_per_s=1e3,
    )
    relieved = reduce_peaks(problem, np.array([1, 0, 0, 0], dtype=np.int32), lambda d: simulate(problem, d), reserve=0.0)
    assert relieved.tolist() == [1, 0, 1, 0]
    assert (peak_bytes(problem, relieved, simulate(problem, relieved)) <= 100).all()


def test_h2_balances_resident_and_produced_bytes():
    problem = build_problem(
        "residents",
        time_s=[[1.0] * 2] * 6,
        tensors=[TensorSpec(0, 5, [1]), TensorSpec(3, 5, [4])],
        memory_bytes=[1000] * 2,
        resident_bytes=[10] * 6,
    )
    devices = balance_residents(problem, np.array([0, 0, 0, 0, 0, 1], dtype=np.int32))
    resident, produced = np.bincount(devices, minlength=2) / 6, np.bincount(devices[[0, 3]], minlength=2) / 2
    assert (np.abs(resident + produced - 1.0) <= 1 / 6 + 1e-9).all()


def test_long_primaries_are_cut_into_chunks():
    problem = random_problem(4, 30, 3, shape="chain")
    graph = folded_graph(problem, [0, 1, 2])
    clusters = slice_graph(graph)
    chunks = cut_long_primary(graph, clusters)
    assert clusters.primaries < chunks.primaries == 3
    shares = [graph.weight_s[chunks.members(p)].sum() / graph.weight_s.sum() for p in range(chunks.primaries)]
    assert max(shares) < 0.5


def test_chunks_keep_backward_ops_beside_their_forward_ops():
    problem = random_problem(5, 40, 4, shape="chain")
    graph = op_graph(problem, range(4))
    chunks = cut_long_primary(graph, slice_graph(graph))
    forward, backward = chunks.cluster[0:120:3], chunks.cluster[1:120:3]
    assert len(set(forward.tolist())) >= 3
    assert (forward == backward).mean() > 0.7


def test_chains_of_groups_leave_primaries_without_nodes():
    problem = random_problem(1, 500, 8, shape="chain", memory_factor=2.0)
    assert get_planner("pardnn")(problem).predicted.feasible
