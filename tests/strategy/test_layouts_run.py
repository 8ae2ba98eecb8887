"""The tensor layout that is priced is the one that runs: for models of many types the words agree, module by module."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlplace.cluster.parse import parse
from rlplace.errors import InputError
from rlplace.model.capture.capture import capture
from rlplace.model.zoo import load_model
from rlplace.plan.strategy import Strategy
from rlplace.runtime.strategy.facts import facts_of
from rlplace.runtime.strategy.why_not import judge, why_not
from rlplace.strategy.blocks.price import PricedBlocks
from rlplace.strategy.costs import Cut
from rlplace.strategy.search.plan import plan_strategy
from rlplace.strategy.search.space import Space

SMALL = "num_hidden_layers=1,hidden_size=64,intermediate_size=128,num_attention_heads=8"
MODELS = (
    "hf:gpt2,n_layer=1,n_embd=64,n_head=8",
    f"hf:llama,{SMALL},num_key_value_heads=8",
    f"hf:mixtral,{SMALL},num_key_value_heads=8",
    f"hf:qwen3,{SMALL},num_key_value_heads=8",
    f"hf:gemma,{SMALL},num_key_value_heads=8,head_dim=8",
    f"hf:bert,{SMALL}",
    f"hf:vit,{SMALL}",
    f"hf:gpt_neox,{SMALL}",
    f"hf:phi,{SMALL}",
    "hf:opt,num_hidden_layers=1,hidden_size=64,ffn_dim=128,num_attention_heads=8,word_embed_proj_dim=64",
    "hf:bart,encoder_layers=1,decoder_layers=1,d_model=64,encoder_ffn_dim=128,decoder_ffn_dim=128,encoder_attention_heads=8,"
    "decoder_attention_heads=8",
    "hf:gptj,n_layer=1,n_embd=128,n_head=8,rotary_dim=8",
    "hf:t5,num_layers=1,d_model=64,d_ff=128,num_heads=8,d_kv=8",
)


def asked(spec):
    model = load_model(spec, batch=2, seq=16)
    graph = capture(model.module, model.example_inputs, loss=model.loss)
    return graph, facts_of(model.module, model.example_inputs, model.loss, graph)


@pytest.mark.slow
@pytest.mark.parametrize("spec", MODELS, ids=[spec.split(",")[0][3:] for spec in MODELS])
def test_priced_words_are_those_that_run(spec):
    graph, facts = asked(spec)
    _, runs = judge(facts)
    assert runs and {"column", "row"} <= set(runs.values())
    blocks = PricedBlocks(graph, "a100-80g:8", only=runs)
    for degree in (2, 4, 8):
        cut = Cut(graph.samples, degree)
        assert blocks.why_not(cut) is None, degree
        words = {path: word for own in blocks.modules(cut).values() for path, word in own.items()}
        assert {path for path, word in runs.items() if word != "vocabulary"} <= set(words)
        assert all(word != "local" for word in words.values())


def test_a_layout_that_the_runtime_has_not_is_refused():
    graph, facts = asked(MODELS[1])
    _, runs = judge(facts)
    turned = dict(runs) | {"model.layers.0.self_attn.o_proj": "column"}
    reason = PricedBlocks(graph, "a100-80g:2", only=turned).why_not(Cut(graph.samples, 2))
    assert reason == "model.layers.0.self_attn.o_proj would be priced as row and run as column; plan with tensor=1"
    more = dict(runs) | {"model.norm": "column"}
    assert "model.norm would be priced as whole and run as column" in PricedBlocks(graph, "a100-80g:2", only=more).why_not(
        Cut(graph.samples, 2)
    )


def test_a_plan_carries_its_layouts_and_another_model_refuses_them():
    graph, facts = asked(MODELS[1])
    judged, runs = judge(facts)
    plan = plan_strategy(
        graph, parse("a100-80g:2"), graph.samples, space=Space.parse("tensor=2"), why_not=judged, only=runs, calls=20
    )
    (stage,) = plan.strategy.stages
    assert stage.tensor["model.layers.0.mlp.down_proj"] == "row" and stage.tensor["model.layers.0.mlp.up_proj"] == "column"
    assert Strategy.from_dict(plan.strategy.to_dict()) == plan.strategy and why_not(plan.strategy, facts) is None
    other = replace(facts, tensor=replace(facts.tensor, layouts={**facts.tensor.layouts, "model.layers.0.mlp.up_proj": "row"}))
    assert "lays model.layers.0.mlp.up_proj out as 'column', this runtime as row" in why_not(plan.strategy, other)
    more = replace(facts, tensor=replace(facts.tensor, layouts={**facts.tensor.layouts, "model.layers.0.mlp.gate": "column"}))
    assert "leaves model.layers.0.mlp.gate whole" in why_not(plan.strategy, more)
    with pytest.raises(InputError, match="tensor"):
        plan_strategy(
            graph, parse("a100-80g:2"), graph.samples, space=Space.parse("tensor=2 replicate=1"), why_not=judged, calls=20,
            only=dict(runs) | {"model.norm": "column"},
        )  # fmt: skip
