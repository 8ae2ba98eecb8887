"""Job files for torchtitan: every field is one of its schema, and what it cannot say is refused by name."""

import json
import tomllib
from pathlib import Path

import pytest

import rlplace
from rlplace.errors import InputError
from tests.runtime.export.test_script import plan_of
from tests.runtime.strategy import native_cases
from tests.runtime.strategy.native_cases import LLAMA, chain, flat

pytest.importorskip("transformers")

SCHEMA = json.loads((Path(__file__).parent / "torchtitan_6404b932.json").read_text())
SIZES = (
    "hidden_size=256,num_hidden_layers=6,num_attention_heads=16,num_key_value_heads=16,intermediate_size=768,vocab_size=2000"
)
DEBUG = f"hf:llama,{SIZES}"
SIX = ("model.embed_tokens", *(f"model.layers.{n}" for n in range(6)), "model.norm", "lm_head")
HALVES = [(0, 1), (2, 3)]


@pytest.fixture(autouse=True)
def six_layers(monkeypatch):
    monkeypatch.setitem(native_cases.BLOCKS, "llama", SIX)


def job(strategy, model=DEBUG, **graph):
    return tomllib.loads(rlplace.export(plan_of(model, strategy, {"optimizer": "adamw", **graph}), "torchtitan"))


def check_fields(found):
    kinds = {"str": str, "int": int, "float": float, "bool": bool, "list": list}
    for section, values in found.items():
        for key, value in values.items():
            wanted = SCHEMA[section][key]
            assert value in wanted if isinstance(wanted, list) else type(value) is kinds[wanted], (section, key, value)


def test_full_sharding_over_copies():
    six = {"recompute": {block: "full" for block in SIX[2:7:2]}}
    found = job(flat("llama", {"replicate": 2, "shard": 2}, 3, batch=16, **six), autocast="bf16")
    check_fields(found)
    assert found["training"] == {
        "local_batch_size": 1, "global_batch_size": 16, "seq_len": 8, "enable_cpu_offload": False,
        "mixed_precision_param": "bfloat16",
    }  # fmt: skip
    degrees = {key.removesuffix("_degree"): value for key, value in found["parallelism"].items() if key.endswith("_degree")}
    assert degrees.pop("data_parallel_replicate") == degrees.pop("data_parallel_shard") == 2
    assert set(degrees.values()) == {1}
    assert found["parallelism"]["fsdp_reshard_after_forward"] == "always"
    assert found["activation_checkpoint"] == {"mode": "selective", "selective_ac_option": "2"}
    assert found["model"] == {"name": "llama3", "flavor": "debugmodel"}


@pytest.mark.parametrize(("level", "word"), [(1, "never"), (2, "never"), (3, "always")])
def test_only_level_three_gathers_again(level, word):
    found = job(flat("llama", {"shard": 4}, level, batch=4))
    assert found["parallelism"]["fsdp_reshard_after_forward"] == word


@pytest.mark.parametrize(
    ("schedule", "places"), [("1f1b", HALVES), ("interleaved_1f1b", HALVES * 2), ("zbv", [*HALVES, *HALVES[::-1]])]
)
def test_a_pipeline_names_its_parts(schedule, places):
    found = job(chain("llama", places, schedule, mesh={"shard": 2}, sharding=1, batch=16, microbatch=2, recompute="full"))
    check_fields(found)
    parts = found["parallelism"]
    assert parts["pipeline_parallel_degree"] == 2 and parts["pipeline_parallel_microbatch_size"] == 2
    assert found["training"]["local_batch_size"] == 8 and found["training"]["global_batch_size"] == 16
    assert [part for held in parts["module_fqns_per_model_part"] for part in held] == [
        "tok_embeddings", *(f"layers.{n}" for n in range(6)), "norm", "output",
    ]  # fmt: skip
    assert len(parts["module_fqns_per_model_part"]) == len(places)
    assert found["activation_checkpoint"] == {"mode": "full"}


def test_a_big_one_is_a_flavor():
    eight = "hf:llama,num_key_value_heads=8,intermediate_size=14336,vocab_size=128256"
    blocks = ("model.embed_tokens", *(f"model.layers.{n}" for n in range(32)), "model.norm", "lm_head")
    strategy = flat("llama", {"shard": 2, "tensor": 2}, 2, sequence_parallel=True)
    strategy["stages"][0]["blocks"] = list(blocks)
    found = job(strategy, eight)
    check_fields(found)
    assert found["model"]["flavor"] == "8B" and found["parallelism"]["tensor_parallel_degree"] == 2


REFUSED = {
    "no llama": (flat("llama", {"shard": 4}, 3), {"model": "hf:gpt2"}, "no model like hf:gpt2"),
    "no flavor": (flat("llama", {"shard": 4}, 3), {"model": DEBUG.replace("256", "128")}, "8B is hidden_size=4096"),
    "sequence": (flat("llama", {"tensor": 4}, 0), {}, "splits the sequence"),
    "copies beside": (flat("llama", {"replicate": 2, "tensor": 2}, 0, sequence_parallel=True), {}, "combines whole copies"),
    "once a step": (flat("llama", {"shard": 4}, 1), {}, "after every micro-batch"),
    "some offloaded": (flat("llama", {"shard": 4}, 3, offload="all"), {}, "everything or nothing"),
    "some recomputed": (flat("llama", {"shard": 4}, 3, recompute={LLAMA[1]: "full"}), {}, "every n-th"),
    "unlike": (flat("llama", {"shard": 4}, 1) | {"microbatches": [1, 3, 2, 2]}, {}, "the same micro-batches"),
    "momentum": (flat("llama", {"shard": 4}, 3), {"optimizer": "momentum"}, "not momentum"),
    "pure bf16": (flat("llama", {"shard": 4}, 3), {"dtype": "bf16"}, "keeps weights in float32"),
    "order": (chain("llama", [(2, 3), (0, 1)], "1f1b", mesh={"shard": 2}, sharding=1), {}, "in another order"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_cannot_say_is_refused(name):
    strategy, given, reason = REFUSED[name]
    with pytest.raises(InputError, match=reason):
        job(strategy, **given)


def test_a_placement_is_no_strategy():
    plan = plan_of(DEBUG, flat("llama", {"shard": 4}, 3))
    with pytest.raises(InputError, match="places groups"):
        rlplace.export(plan.__class__("0" * 64, "heft", 0, [0]), "torchtitan")
