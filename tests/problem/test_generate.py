"""Generated problems, toys, and problems from networkx."""

from __future__ import annotations

from typing import Any

import networkx as nx
import numpy as np
import pytest

from rlplace.cluster import Cluster
from rlplace.errors import InputError
from rlplace.problem import BACKWARD, FORWARD, UPDATE, Problem
from rlplace.problem.generate import random_problem
from rlplace.simulator import simulate

SHAPES = ("layered", "branchy", "chain")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("groups", [1, 2, 5, 33, 200])
def test_random_problems_have_the_size_asked_for(shape: str, groups: int) -> None:
    problem = random_problem(0, groups, 3, shape=shape)
    assert (problem.num_groups, problem.num_devices, problem.num_ops) == (groups, 3, 3 * groups)
    assert np.bincount(problem.op_phase).tolist() == [groups, groups, 0, groups]
    assert random_problem(0, groups, 3, shape=shape, training=False).num_ops == groups


@pytest.mark.parametrize("shape", SHAPES)
def test_equal_arguments_give_equal_problems_and_other_seeds_other_ones(shape: str) -> None:
    options = {"shape": shape, "unlike": True, "memory_factor": 1.2, "hosts": 2, "shared_parameters": 2, "null_fraction": 0.2}
    first, again, other = (random_problem(seed, 20, 4, **options).fingerprint for seed in (7, 7, 8))  # type: ignore[arg-type]
    assert first == again != other


@pytest.mark.parametrize("shape", SHAPES)
def test_forward_graphs_are_connected_and_mirrored_backward(shape: str) -> None:
    problem = random_problem(1, 40, 2, shape=shape)
    edges = set()
    for tensor, consumer in zip(problem.edge_tensor.tolist(), problem.consumers.tolist(), strict=True):
        edges.add((int(problem.tensor_producer[tensor]), consumer))
    phase, group = problem.op_phase, problem.op_group
    forward = {(group[a], group[b]) for a, b in edges if phase[a] == FORWARD == phase[b]}
    backward = {(group[b], group[a]) for a, b in edges if phase[a] == BACKWARD == phase[b]}
    assert forward == backward
    assert {(3 * g, 3 * g + 1) for g in range(40)} <= edges  # a saved activation
    assert {(3 * g + 1, 3 * g + 2) for g in range(40)} <= edges and phase[2] == UPDATE
    assert {target for _, target in forward} >= set(range(10, 40))  # all but the first layer have inputs
    if shape == "chain":
        assert {(g, g + 1) for g in range(39)} <= forward


def test_options_do_what_they_say() -> None:
    plain = random_problem(2, 30, 4)
    assert all(device.memory_bytes is None for device in plain.devices) and plain.links.channels is None
    assert (plain.time_s == plain.time_s[:, :1]).all()
    rich = random_problem(
        2, 30, 4, unlike=True, memory_factor=2.0, hosts=2, shared_parameters=5, null_fraction=0.3, comm_ratio=0.1
    )
    anywhere = rich.time_s[rich.op_allowed.all(axis=1)]
    assert {1.0} < set((anywhere / anywhere.min(axis=1)[:, None]).ravel()) <= {1.0, 2.0, 4.0}
    assert 0 < (~rich.group_allowed).sum() < 30 and rich.group_allowed.any(axis=1).all()
    assert (rich.tensor_owner >= 0).sum() == 5
    channels = rich.links.effective_channels
    assert set(channels[0][2]) & set(channels[1][3]) and not set(channels[0][1]) & set(channels[0][2])
    assert set(channels[0][2]) & set(channels[1][3]) == set(channels[0][2])
    assert not set(channels[0][2]) & set(channels[2][0])
    limits = [device.memory_bytes or 0 for device in rich.devices]
    assert limits[1] == pytest.approx(2 * limits[0]) and min(limits) >= rich.resident_bytes.max()
    heavy = random_problem(2, 30, 4, comm_ratio=10.0)
    assert heavy.tensor_bytes.mean() > 50 * rich.tensor_bytes.mean()


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(InputError, match="did you mean 'branchy'"):
        random_problem(0, shape="brancy")
    for options in ({"num_groups": 0}, {"num_devices": 0}, {"hosts": 5}, {"width": 0}):
        with pytest.raises(InputError):
            random_problem(0, **options)


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    return Cluster.preset("a100-80g:2")


def test_a_drawn_graph_can_be_placed(cluster: Cluster) -> None:
    graph = nx.DiGraph()
    graph.add_node("a", time_s=1.0, group="left")
    graph.add_node("b", time_s=[2.0, None], group="left", resident_bytes=7, temporary_bytes=3, kind="linear")
    graph.add_node("c", time_s=3.0, phase="backward", device=1)
    graph.add_edge("a", "b", bytes=5, tensor="x")
    graph.add_edge("a", "c", bytes=5, tensor="x")
    problem = Problem.from_networkx(graph, cluster, name="drawn")
    assert problem.group_names == ("left", "c") and problem.resident_bytes.tolist() == [7, 0]
    assert problem.num_tensors == 1 and problem.consumers.tolist() == [1, 2]  # one tensor, sent once per device
    assert problem.group_device.tolist() == [-1, 1] and problem.op_kind == ("", "linear", "")
    line = simulate(problem, [0, 1])
    assert line.feasible and line.end_s[1] == 3.0 and len(line.transfer_tensor) == 1


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"time_s": "fast"}, "node 'a': time_s: expected a number"),
        ({"time_s": float("nan")}, "time_s: NaN is not a number"),
        ({"time_s": None}, "null on every device"),
        ({"time_s": [1.0]}, "time_s: expected 2 values, found 1"),
        ({"time_s": 1.0, "phase": "sideways"}, "node 'a': phase: unknown phase 'sideways'"),
        ({"time_s": 1.0, "resident_bytes": 1.5}, "node 'a': resident_bytes: expected a whole number"),
        ({"time_s": 1.0, "temporary_bytes": float("nan")}, "node 'a': temporary_bytes: expected a whole number"),
        ({"time_s": 1.0, "device": 2}, "device.*-1..1"),
        ({"time_s": 10**400}, "too large"),
        ({"time_s": float("inf")}, "inf is not in 0"),
        ({"time_s": 1.0, "phase": np.array([1, 2])}, "phase"),
        ({"time_s": 1.0, "temporary_bytes": 10**5000}, "temporary_bytes"),
    ],
)
def test_bad_attributes_are_refused(cluster: Cluster, node: dict[str, Any], message: str) -> None:
    graph = nx.DiGraph()
    graph.add_node("a", **node)
    with pytest.raises(InputError, match=message):
        Problem.from_networkx(graph, cluster)


def test_cyclic_and_empty_graphs_are_refused(cluster: Cluster) -> None:
    graph = nx.DiGraph([("a", "b"), ("b", "a")])
    nx.set_node_attributes(graph, 1.0, "time_s")
    with pytest.raises(InputError, match="cyclic"):
        Problem.from_networkx(graph, cluster)
    with pytest.raises(InputError, match="empty"):
        Problem.from_networkx(nx.DiGraph(), cluster)
    for wrong in (5, nx.Graph()):
        with pytest.raises(InputError, match="directed"):
            Problem.from_networkx(wrong, cluster)
    for other in ("l4:2", None):
        with pytest.raises(InputError, match="expected a Cluster"):
            Problem.from_networkx(graph, other)


def pair(**edge: Any) -> nx.MultiDiGraph:
    graph = nx.MultiDiGraph()
    graph.add_nodes_from("ab", time_s=1e-3)
    graph.add_edge("a", "b", **edge)
    return graph


@pytest.mark.parametrize("edge", [{"bytes": "5"}, {"tensor": [1]}, {"tensor": {}}])
def test_bad_edges_are_refused(cluster: Cluster, edge: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(edge))):
        Problem.from_networkx(nx.DiGraph(pair(**edge)), cluster)


def test_parallel_edges_of_a_multigraph_are_tensors_of_their_own(cluster: Cluster) -> None:
    for name, sizes in ({}, [3, 4]), ({"tensor": "x"}, [4]):
        graph = pair(bytes=3, **name)
        graph.add_edge("a", "b", bytes=4, **name)
        problem = Problem.from_networkx(graph, cluster)
        assert problem.tensor_bytes.tolist() == sizes and problem.consumers.tolist() == [1] * len(sizes)
