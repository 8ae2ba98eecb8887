"""Files of op graphs and descriptions of inputs."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from torch import nn

import rlplace
from rlplace.errors import InputError
from rlplace.model import OpGraph
from rlplace.model.capture.capture import capture
from rlplace.model.capture.inputs import MAX_PARTS, describe_inputs, described_inputs
from rlplace.model.graph.io import FORMAT, VERSION, graph_from_dict, graph_to_dict


@pytest.fixture(scope="module")
def graph():
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Linear(8, 2))
    return capture(net, torch.empty(4, 8), loss=torch.sum, source={"model": "test"})


@pytest.fixture
def data(graph):
    rest = json.loads(json.dumps(graph_to_dict(graph)))
    assert rest.pop("format") == FORMAT and rest.pop("version") == VERSION
    return rest


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


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(3, 2)

    def forward(self, x, pair, *, scale, more=None, name="a"):
        return (self.dense(x) * scale + pair[0] + more["bias"]).sum() + pair[1][0]


def nested(batch=4):
    inputs = (torch.randn(batch, 3), (torch.randn(batch, 2), [2, None]))
    return Nested(), {
        "x": inputs[0],
        "pair": inputs[1],
        "scale": 0.5,
        "more": {"bias": torch.zeros(2, dtype=torch.float64)},
        "name": "b",
    }


def same(found, expected):
    if isinstance(expected, torch.Tensor):
        return found.is_meta and found.shape == expected.shape and found.dtype == expected.dtype
    if isinstance(expected, dict):
        return type(found) is dict and found.keys() == expected.keys() and all(same(found[k], v) for k, v in expected.items())
    if isinstance(expected, (tuple, list)):
        return type(found) is type(expected) and len(found) == len(expected) and all(map(same, found, expected))
    return type(found) is type(expected) and found == expected


def test_inputs_come_back_from_json_as_meta_tensors():
    _, kwargs = nested()
    args = (torch.ones(2, dtype=torch.bool), 3)
    text = json.dumps(describe_inputs(args, kwargs), allow_nan=False)
    found_args, found_kwargs = described_inputs(json.loads(text))
    assert same(found_args, args)
    assert same(found_kwargs, kwargs)


@pytest.mark.parametrize("value", [object(), float("nan"), float("inf"), {1: 2}, [1] * MAX_PARTS, torch.float32])
def test_what_json_cannot_say_is_not_described(value):
    assert describe_inputs((torch.ones(1), [value]), {}) is None


@pytest.mark.parametrize(
    "damaged",
    [
        None,
        [],
        {"args": []},
        {"args": {}, "kwargs": {}},
        {"args": [3], "kwargs": {}},
        {"args": [{"tensor": [2], "dtype": "int65"}], "kwargs": {}},
        {"args": [{"tensor": [-1], "dtype": "int64"}], "kwargs": {}},
        {"args": [{"tensor": [True], "dtype": "int64"}], "kwargs": {}},
        {"args": [{"tensor": [2], "dtype": "load"}], "kwargs": {}},
        {"args": [{"value": [2]}], "kwargs": {}},
        {"args": [{"tuple": [], "list": []}], "kwargs": {}},
        {"args": [{}], "kwargs": {}},
    ],
)
def test_damaged_descriptions_are_refused(damaged):
    with pytest.raises(InputError, match="inputs"):
        described_inputs(damaged)


def test_capture_price_and_place_keep_the_description_and_the_fingerprint():
    model, inputs = nested()
    graph = rlplace.capture(model, inputs, source={"model": "mine"})
    assert graph.source["model"] == "mine"
    assert same(described_inputs(graph.source["inputs"])[1], inputs)
    problem = rlplace.price(graph, "a100-80g:2")
    plan = rlplace.place(problem, planner="heft")
    assert plan.source["graph"]["inputs"] == graph.source["inputs"]
    for record in (graph, problem):
        assert dataclasses.replace(record, source=None).fingerprint == record.fingerprint


def test_a_plan_for_another_micro_batch_size_describes_that_one():
    model, inputs = nested(batch=8)
    plan = rlplace.place(model, "a100-80g:2", example_inputs=inputs, planner="heft", batch=32)
    _, found = described_inputs(plan.source["graph"]["inputs"])
    assert found["x"].shape == (32, 3)
    assert found["pair"][0].shape == (32, 2)
    assert found["more"]["bias"].shape == (2,)
