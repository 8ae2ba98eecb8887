"""Op graphs as files and as networkx graphs, and what is refused."""

import json

import networkx as nx
import numpy as np
import pytest
import torch
from torch import nn

from rlplace.errors import InputError
from rlplace.graph import OpGraph
from rlplace.graph.capture import capture
from rlplace.graph.io import graph_from_dict, graph_to_dict


@pytest.fixture(scope="module")
def graph():
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Linear(8, 2))
    return capture(net, torch.empty(4, 8), loss=torch.sum, source={"model": "test"})


@pytest.fixture
def data(graph):
    return json.loads(json.dumps(graph_to_dict(graph)))


def test_round_trip(graph, tmp_path):
    path = tmp_path / "x.graph.json"
    graph.save(path)
    again = OpGraph.load(path)
    assert graph_to_dict(again) == graph_to_dict(graph)
    assert again.fingerprint == graph.fingerprint
    assert again.op_dims == graph.op_dims
    assert again.parameters == graph.parameters
    assert again.op_flops.dtype == np.float64 and again.consumers.dtype == np.int32


def test_fingerprint_ignores_name_and_source_only(data):
    first = graph_from_dict(data).fingerprint
    data["name"], data["source"] = "other", {"model": "other"}
    assert graph_from_dict(data).fingerprint == first
    data["ops"]["flops"][0] += 1
    assert graph_from_dict(data).fingerprint != first


def test_networkx(graph):
    exchanged = graph.to_networkx()
    assert exchanged.number_of_nodes() == graph.num_ops
    assert nx.is_directed_acyclic_graph(exchanged)
    first = graph.op_names[0]
    assert exchanged.nodes[first]["flops"] == graph.op_flops[0]
    assert exchanged.nodes[first]["phase"] == "forward"
    update = exchanged.nodes["0.weight/update"]
    assert update["parameter"] == "0.weight"
    total = sum(size for _, _, size in exchanged.edges(data="bytes"))
    made = graph.tensor_producer[graph.edge_tensor] >= 0
    assert total == graph.tensor_bytes[graph.edge_tensor[made]].sum()


def _broken(data, where, value):
    *path, last = where
    target = data
    for key in path:
        target = target[key]
    target[last] = value


@pytest.mark.parametrize(
    ("where", "value", "words"),
    [
        (("ops", "kind", 0), "gem", "did you mean 'gemm'"),
        (("ops", "phase", 0), "forwrad", "did you mean 'forward'"),
        (("ops", "flops", 0), -1.0, r"op_flops\[0\].*outside"),
        (("ops", "flops", 0), 10**400, "too large"),
        (("ops", "bytes", 0), 1.5, r"ops.bytes\[0\]: expected a whole number, found 1.5"),
        (("ops", "forward", 0), 3, "belongs to itself"),
        (("ops", "forward", 0), 1 << 40, r"ops.forward\[0\]: expected a whole number in"),
        (("ops", "name", 0), "", "non-empty"),
        (("ops", "parameter", 0), 0, "update ops, and only they"),
        (("ops", "target"), [], "as long as"),
        (("tensors", "producer", 0), 0, "have no producer"),
        (("tensors", "bytes", 0), -4, "outside"),
        (("tensors", "consumers", 0), [2, 1], "execution order"),
        (("tensors", "consumers", 0), [10**6], "outside"),
        (("tensors", "role", 0), "wieght", r"tensors.role\[0\]: unknown role"),
        (("parameters", 0, "trainable"), False, "not trainable"),
        (("parameters", 0, "size_bytes"), -1, r"parameters\[0\].size_bytes: expected a whole number in 0"),
        (("samples",), 0, "positive"),
        (("op_dims",), {"x": {}}, "op_dims: 'x' is not a key"),
        (("op_dims",), {"1000000": {}}, "does not exist"),
        (("capture",), [], "expected an object"),
    ],
)
def test_refused(data, where, value, words):
    _broken(data, where, value)
    with pytest.raises(InputError, match=words) as caught:
        graph_from_dict(data)
    assert "\n" not in str(caught.value)


def test_duplicate_name_empty_graph_and_missing_key(data):
    data["ops"]["name"][1] = data["ops"]["name"][0]
    with pytest.raises(InputError, match="appears twice"):
        graph_from_dict(data)
    with pytest.raises(InputError, match="graph is empty"):
        empty = {key: [] for key in data["ops"]}
        tensors = {key: [] for key in data["tensors"]}
        graph_from_dict({**data, "ops": empty, "tensors": tensors, "parameters": [], "op_dims": {}})
    del data["tensors"]
    with pytest.raises(InputError, match="'tensors' is missing"):
        graph_from_dict(data)


def test_cycle_and_wrong_order_are_told_apart(graph, data):
    forward = [i for i, phase in enumerate(data["ops"]["phase"]) if phase == "forward"]

    def add_edge(producer, consumer):
        for key, value in (("role", "activation"), ("parameter", -1), ("producer", producer), ("bytes", 0)):
            data["tensors"][key].append(value)
        data["tensors"]["consumers"].append([consumer])

    add_edge(forward[-1], forward[0])
    with pytest.raises(InputError, match="cyclic"):
        graph_from_dict(data)
    data["tensors"] = {key: [] for key in data["tensors"]}
    add_edge(forward[-1], forward[0])
    with pytest.raises(InputError, match="list ops in execution order"):
        graph_from_dict(data)
