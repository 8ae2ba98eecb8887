"""Public functions with arguments of the wrong kind: one line that says what was expected."""

from __future__ import annotations

from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from torch import nn

import rlplace
from rlplace import Cluster, InputError, Problem
from rlplace.problem.generate import random_problem

CLUSTER = Cluster.preset("l4:2")


def pair(node: dict[str, Any] | None = None, edge: dict[str, Any] | None = None, kind: Any = nx.DiGraph) -> Any:
    graph = kind()
    graph.add_node("a", **{"time_s": 1e-3, **(node or {})})
    graph.add_node("b", time_s=2e-3)
    graph.add_edge("a", "b", **(edge or {}))
    return graph


@pytest.mark.parametrize(
    ("graph", "words"),
    [
        (5, "directed"), (pair(kind=nx.Graph), "directed"), (nx.DiGraph(), "empty"),
        (pair({"time_s": 10**400}), "in range"), (pair({"time_s": float("inf")}), "in range"), (pair({"time_s": None}), "null"),
        (pair({"phase": np.array([1, 2])}), "phase"), (pair({"phase": [1]}), "phase"),
        (pair({"temporary_bytes": 10**5000}), "temporary_bytes"), (pair(edge={"bytes": "5"}), "bytes"),
        (pair(edge={"tensor": [1]}), "tensor"), (pair(edge={"tensor": {}}), "tensor"),
    ],
)  # fmt: skip
def test_graphs(graph: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        Problem.from_networkx(graph, CLUSTER)


def test_parallel_edges_of_a_multigraph_are_tensors_of_their_own() -> None:
    graph = pair(edge={"bytes": 3}, kind=nx.MultiDiGraph)
    graph.add_edge("a", "b", bytes=4)
    problem = Problem.from_networkx(graph, CLUSTER)
    assert problem.tensor_bytes.tolist() == [3, 4] and problem.consumers.tolist() == [1, 1]
    graph = pair(edge={"bytes": 3, "tensor": "x"}, kind=nx.MultiDiGraph)
    graph.add_edge("a", "b", bytes=4, tensor="x")
    assert Problem.from_networkx(graph, CLUSTER).tensor_bytes.tolist() == [4]


@pytest.mark.parametrize("cluster", ["l4:2", None, 5])
def test_networkx_needs_a_cluster(cluster: Any) -> None:
    with pytest.raises(InputError, match="expected a Cluster"):
        Problem.from_networkx(pair(), cluster)


def test_capture_price_and_place() -> None:
    graph = rlplace.capture(nn.Linear(2, 2), torch.zeros(2, 2), loss=torch.sum)
    assert rlplace.price(graph, "l4:2").num_devices == 2
    problem = random_problem(0, num_groups=4, num_devices=2)
    wrong: list[Any] = [
        lambda: rlplace.capture(5, torch.zeros(2)),  # type: ignore[arg-type]
        lambda: rlplace.capture(nn.Linear, torch.zeros(2)),  # type: ignore[arg-type]
        lambda: rlplace.capture(nn.Linear(2, 2), torch.zeros(2, 2), loss=5),  # type: ignore[arg-type]
        lambda: rlplace.price(problem, CLUSTER),  # type: ignore[arg-type]
        lambda: rlplace.price(graph, 5),  # type: ignore[arg-type]
        lambda: rlplace.price(graph, CLUSTER, groups="x"),  # type: ignore[arg-type]
        lambda: rlplace.price(graph, CLUSTER, groups=0),
        lambda: rlplace.place(graph, 5, planner="best"),  # type: ignore[arg-type]
        lambda: rlplace.place(problem, planner="random", seed=-1),
        lambda: rlplace.place(problem, planner="random", seed="x"),  # type: ignore[arg-type]
        lambda: rlplace.simulate(problem, [0] * 4, order=[5, 6]),  # type: ignore[list-item]
        lambda: rlplace.simulate(problem, [0] * 4, order="xy"),
        lambda: rlplace.simulate(problem, [0] * 4, order=[["a", 1], []]),  # type: ignore[list-item]
        lambda: Cluster.preset(5),  # type: ignore[arg-type]
    ]
    for call in wrong:
        with pytest.raises(InputError) as raised:
            call()
        assert len(str(raised.value)) < 300 and "\n" not in str(raised.value)
