"""networkx graphs become problems, and problems networkx graphs."""

from __future__ import annotations

from typing import Any

import networkx as nx
import numpy as np
import pytest

from rlplace.cluster import Cluster
from rlplace.errors import InputError
from rlplace.problem import Problem
from rlplace.problem.generate import random_problem
from rlplace.simulator import simulate


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


def test_problems_survive_the_trip(cluster: Cluster) -> None:
    problem = random_problem(0, 12, 2, training=False)
    again = Problem.from_networkx(problem.to_networkx(), cluster)
    assert again.op_names == problem.op_names and again.group_names == problem.group_names
    assert again.time_s.tobytes() == problem.time_s.tobytes()
    assert again.resident_bytes.tolist() == problem.resident_bytes.tolist()
    edges = [
        {
            (int(p.tensor_producer[t]), c, int(p.tensor_bytes[t]))
            for t, c in zip(p.edge_tensor, p.consumers.tolist(), strict=True)
        }
        for p in (problem, again)
    ]
    assert edges[0] == edges[1]
    assert sorted(np.diff(again.consumer_ptr)) == sorted(np.diff(problem.consumer_ptr))


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"time_s": "fast"}, "time_s is not a number"),
        ({"time_s": float("nan")}, "time_s is not a number"),
        ({"time_s": None}, "null on every device"),
        ({"time_s": [1.0]}, "time_s has 1 values"),
        ({"time_s": 1.0, "phase": "sideways"}, "phase 'sideways'"),
        ({"time_s": 1.0, "resident_bytes": 1.5}, "resident_bytes.*not a whole number"),
        ({"time_s": 1.0, "temporary_bytes": float("nan")}, "temporary_bytes.*not a whole number"),
        ({"time_s": 1.0, "device": 2}, "device.*0..1"),
    ],
)
def test_bad_attributes_are_refused(cluster: Cluster, node: dict[str, Any], message: str) -> None:
    graph = nx.DiGraph()
    graph.add_node("a", **node)
    with pytest.raises(InputError, match=message):
        Problem.from_networkx(graph, cluster)


def test_cyclic_graphs_and_owner_tensors_are_refused(cluster: Cluster) -> None:
    graph = nx.DiGraph([("a", "b"), ("b", "a")])
    nx.set_node_attributes(graph, 1.0, "time_s")
    with pytest.raises(InputError, match="cyclic"):
        Problem.from_networkx(graph, cluster)
    with pytest.raises(InputError, match="empty"):
        Problem.from_networkx(nx.DiGraph(), cluster)
    with pytest.raises(InputError, match="owner tensors"):
        random_problem(0, 12, 2, shared_parameters=1).to_networkx()
