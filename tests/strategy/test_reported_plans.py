"""Symptoms that users of other tools have reported about plans; those about runs are in runtime/strategy/test_reported."""

from __future__ import annotations

import pytest

import rlplace
from rlplace.errors import InputError
from rlplace.model.graph.opgraph import OpGraph
from rlplace.model.zoo import load_model

pytest.importorskip("transformers")
ASK = {"calls": 20, "time_limit_s": None, "batch": 15}


@pytest.fixture(scope="module")
def graph() -> OpGraph:
    """A decoder whose sizes are powers of two, with two heads of keys and values."""
    sizes = "num_hidden_layers=2,hidden_size=32,intermediate_size=64,num_attention_heads=4,num_key_value_heads=2,vocab_size=64"
    loaded = load_model(f"hf:llama,{sizes}", batch=1, seq=16, dtype="fp32")
    return rlplace.capture(loaded.module, loaded.example_inputs)


def test_a_tensor_degree_above_the_heads_of_keys_and_values_is_refused_by_name(graph: OpGraph) -> None:
    """torchtitan #4016: a recipe cuts two heads of keys and values over eight devices, and there are too few heads for that."""
    with pytest.raises(InputError, match=r"relax tensor=8 first \(tensor degree 8 does not divide the 2 .*heads"):
        rlplace.place(graph, "a100-80g:8", space="tensor=8", **{**ASK, "batch": 1})


@pytest.mark.parametrize("devices", [3, 15])
def test_cards_in_a_number_that_divides_nothing_share_the_model(graph: OpGraph, devices: int) -> None:
    """LMOps #65: three A100 or fifteen A10, and no size of the model is a multiple of them."""
    plan = rlplace.place(graph, f"a100-80g:{devices}", space=f"shard={devices} pipeline=1", **ASK)
    assert plan.strategy is not None and plan.predicted.feasible
    assert plan.strategy.stages[0].mesh == {"shard": devices}
    with pytest.raises(InputError, match=r"tensor degree 3 does not divide the 2 .*heads"):
        rlplace.place(graph, f"a100-80g:{devices}", space="tensor=3", **ASK)
