"""Tokens of experts, counted: against the model's own routers, and from the command to the price."""

import json

import numpy as np
import pytest
import torch

from rlplace.cost.table import CostTable
from rlplace.errors import InputError
from rlplace.measure.experts import count_tokens, imbalance
from rlplace.model.zoo import load_model
from tests.cli.command import run

pytest.importorskip("transformers")

MODEL = (
    "hf:mixtral,num_hidden_layers=2,hidden_size=32,intermediate_size=32,num_attention_heads=2,num_key_value_heads=2,"
    "num_local_experts=8,vocab_size=64,bos_token_id=1,eos_token_id=2"
)


def test_tokens_are_those_of_the_routers():
    torch.manual_seed(0)
    loaded = load_model(MODEL, batch=3, seq=16, device="cpu")
    counts = count_tokens(loaded, torch.device("cpu"))
    with torch.no_grad():
        logits = loaded.module(**loaded.example_inputs, output_router_logits=True).router_logits
    chosen = [layer.topk(2).indices.flatten().bincount(minlength=8).tolist() for layer in logits]
    assert [count.tolist() for count in counts.values()] == chosen and sum(map(sum, chosen)) == 2 * 2 * 3 * 16
    with pytest.raises(InputError, match="stacked weights"):
        count_tokens(load_model("zoo:mlp", batch=2, device="cpu"), torch.device("cpu"))


def test_the_busiest_device_counts_in_every_mixture():
    found = imbalance([np.array([8, 0, 4, 4]), np.array([2, 2, 2, 2])])
    assert found == ((2, 1.0), (4, 1.5))
    table = CostTable({}, imbalance=((4, 1.5), (16, 2.0)))
    assert [table.busiest(degree) for degree in (2, 4, 8, 16, 32)] == [1.5, 1.5, 2.0, 2.0, 2.0]
    assert CostTable.from_dict(table.to_dict()) == table and table.fingerprint != CostTable({}).fingerprint


def test_a_counted_file_prices_plans(capsys, tmp_path):
    path = tmp_path / "tokens.cost.json"
    code, shown, _ = run(capsys, "measure", MODEL, "--experts", "--batch", 2, "--seq", 16, "--device", "cpu", "--out", path)
    table = CostTable.load(path)
    assert code == 0 and [degree for degree, _ in table.imbalance] == [2, 4, 8] and f"--costs {path}" in shown
    words = (MODEL, "--cluster", "h100:8", "--batch", 16, "--seq", 16, "--calls", 4, "--space", "expert=8 shard=8", "--json")
    code, shown, _ = run(capsys, "place", *words, "--costs", path)
    assert code == 0 and json.loads(shown)["source"]["costs"]["path"] == str(path)
