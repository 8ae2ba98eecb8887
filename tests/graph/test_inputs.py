"""What a graph says about the inputs that it was captured with."""

import dataclasses
import json

import pytest
import torch
from torch import nn

import rlplace
from rlplace.errors import InputError
from rlplace.graph.inputs import MAX_PARTS, describe_inputs, described_inputs, with_samples


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


def test_another_batch_size():
    described = describe_inputs((torch.ones(4, 3), torch.ones(3, 4), 4, [torch.ones(4)], torch.ones(())), {})
    args, _ = described_inputs(with_samples(described, 4, 6))
    assert [tuple(t.shape) for t in (args[0], args[1], args[3][0], args[4])] == [(6, 3), (3, 4), (6,), ()]
    assert args[2] == 4


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
    plan = rlplace.place(model, "a100-80g:2", example_inputs=inputs, planner="heft", global_batch=32)
    _, found = described_inputs(plan.source["graph"]["inputs"])
    samples = 32 // (plan.microbatches * len(plan.replicas or [0]))
    assert found["x"].shape == (samples, 3)
    assert found["pair"][0].shape == (samples, 2)
    assert found["more"]["bias"].shape == (2,)
