"""The tensor layout that is priced is the one that runs: for models of many types words and collectives agree, one by one."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed import fake_pg
from torch.utils._python_dispatch import TorchDispatchMode

from rlplace.cluster.parse import parse
from rlplace.errors import InputError
from rlplace.model.capture.capture import capture
from rlplace.model.zoo import load_model
from rlplace.plan.strategy import Pipeline, Stage, Strategy
from rlplace.runtime.strategy.blocks import units
from rlplace.runtime.strategy.capture import capture as capture_blocks
from rlplace.runtime.strategy.cut import cut
from rlplace.runtime.strategy.facts import facts_of
from rlplace.runtime.strategy.mesh import AXES, MeshPlace
from rlplace.runtime.strategy.model_layouts import find_layouts, lay_out, stay_parts
from rlplace.runtime.strategy.why_not import judge, why_not
from rlplace.strategy.blocks.blocks import find_blocks
from rlplace.strategy.blocks.price import PricedBlocks
from rlplace.strategy.costs import BACKWARD_PASS, COLLECTIVE_KINDS, FORWARD_PASS, Cut
from rlplace.strategy.layouts.tensor_layout import LayoutSearch, moved_bytes, plain_word
from rlplace.strategy.search.plan import plan_strategy
from rlplace.strategy.search.space import Space

SMALL = "num_hidden_layers=1,hidden_size=64,intermediate_size=128,num_attention_heads=8"
MODELS = (
    "hf:gpt2,n_layer=1,n_embd=64,n_head=8",
    f"hf:llama,{SMALL},num_key_value_heads=8",
    f"hf:mixtral,{SMALL},num_key_value_heads=2",
    f"hf:qwen3,{SMALL},num_key_value_heads=2",
    f"hf:gemma2,{SMALL},num_key_value_heads=4,head_dim=8",
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


WITH_SEQUENCE = ("gpt2", "llama", "qwen3", "gemma2", "bert", "gpt_neox", "phi", "gptj")


def asked(spec, device="meta"):
    model = load_model(spec, batch=2, seq=16, device=device)
    graph = capture(model.module, model.example_inputs, loss=model.loss)
    return model, graph, facts_of(model.module, model.example_inputs, model.loss, graph)


class Sent(TorchDispatchMode):
    """Counts (kind, bytes of the whole tensor) of collectives, by pass."""

    def __init__(self, degree):
        super().__init__()
        self.degree, self.when, self.count = degree, FORWARD_PASS, {FORWARD_PASS: Counter(), BACKWARD_PASS: Counter()}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kind = next((kind for kind in COLLECTIVE_KINDS if kind in func.__name__ and func.namespace == "_c10d_functional"), None)
        if kind is not None:
            self.count[self.when][kind, args[0].nbytes * (self.degree if kind == "all_gather" else 1)] += 1
        return func(*args, **(kwargs or {}))


def sent(spec, degree, sequence_parallel, words):
    """Counts the collectives of a step under a plan's words on one process of a fake group, where nothing arrives."""
    model = load_model(spec, batch=2, seq=16, device="cpu")
    found = dict(units(model.module))
    captured = capture_blocks(model.module, model.example_inputs)
    dist.init_process_group("fake", rank=0, world_size=degree, store=fake_pg.FakeStore())
    try:
        mesh = init_device_mesh("cpu", (1, 1, 1, degree), mesh_dim_names=AXES)
        stage = Stage(tuple(found), tuple(range(degree)), {"tensor": degree}, sequence_parallel=sequence_parallel, tensor=words)
        ranks = {rank: rank for rank in range(degree)}
        place = MeshPlace(mesh, torch.device("cpu"), dict.fromkeys(AXES, 0), (0,), ranks, Pipeline((stage,)))
        lay_out(place, stage, find_layouts(found, captured.calls), found, captured)
        with Sent(degree) as counted:
            output = model.module(**model.example_inputs)
            loss = output.loss if model.loss is None else model.loss(output)
            counted.when = BACKWARD_PASS
            loss.backward()
    finally:
        dist.destroy_process_group()
    return counted.count


IN_CI = ("gpt2", "llama", "qwen3", "vit", "t5")


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(spec, id=kind, marks=[pytest.mark.long] * (kind not in IN_CI))
        for spec, kind in ((spec, spec.split(",")[0][3:]) for spec in MODELS)
    ],
)
def test_what_is_priced_is_what_runs(spec):
    _, graph, facts = asked(spec)
    _, runs = judge(facts)
    assert runs and {"column", "row"} <= set(runs.values())
    blocks, along = PricedBlocks(graph, "a100-80g:8", only=runs), spec.split(",")[0][3:] in WITH_SEQUENCE
    assert (facts.tensor.no_sequence is None) == along or "vit" in spec  # of an odd number of positions
    of_op = find_blocks(graph).of_op
    for sequence_parallel in (False, True)[: 1 + along]:
        for degree in (2, 4, 8):
            way = Cut(graph.samples, degree, sequence_parallel)
            assert blocks.why_not(way) is None, degree
            words = {path: plain_word(word) for own in blocks.modules(way).values() for path, word in own.items()}
            assert {path: word for path, word in words.items() if word not in ("vocabulary", "sequence")} == {
                path: word for path, word in runs.items() if word != "vocabulary"
            }
            layout = LayoutSearch(graph, of_op, runs).layout(degree, sequence_parallel=sequence_parallel)
            priced = {FORWARD_PASS: Counter(), BACKWARD_PASS: Counter()}
            for item in layout.collectives:
                priced[item.when][COLLECTIVE_KINDS[item.kind], moved_bytes(layout, item, graph.tensor_bytes)] += 1
            assert sent(spec, degree, sequence_parallel, dict(layout.modules)) == priced, (degree, sequence_parallel)


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_bytes_between_stages_are_those_that_are_priced(sequence_parallel):
    model, graph, facts = asked(MODELS[0].replace("n_layer=1", "n_layer=3"))
    blocks = PricedBlocks(graph, "a100-80g:8", only=judge(facts)[1])
    captured = capture_blocks(model.module, model.example_inputs)
    stages = [
        {"blocks": [name], "devices": [2 * n, 2 * n + 1], "mesh": {"tensor": 2}, "sequence_parallel": sequence_parallel}
        for n, name in enumerate(blocks.names)
    ]
    strategy = {"batch": 16, "microbatch": [2], "microbatches": [8], "schedule": "1f1b", "stages": stages}
    pipeline = Strategy.from_dict(strategy).pipelines[0]
    assert stay_parts(captured, pipeline, find_layouts(captured.units, captured.calls)) == sequence_parallel
    cuts = cut(captured, [[name] for name in blocks.names])
    sent = [sum(value.nbytes for value in stage.given if value.requires_grad) for stage in cuts]
    priced = blocks.passes(0, Cut(graph.samples, 2, sequence_parallel)).returned_bytes.tolist()
    layers = [n for n, name in enumerate(blocks.names) if ".h." in name]
    assert [sent[n] for n in layers] == [priced[n] for n in layers]
    assert sent[layers[0]] == 2 * 16 * 64 * 4 // (1 + sequence_parallel)


@pytest.mark.slow
def test_a_layout_that_the_runtime_has_not_is_refused():
    _, graph, facts = asked(MODELS[1])
    _, runs = judge(facts)
    turned = dict(runs) | {"model.layers.0.self_attn.o_proj": "column"}
    reason = PricedBlocks(graph, "a100-80g:2", only=turned).why_not(Cut(graph.samples, 2))
    assert reason == "model.layers.0.self_attn.o_proj would be priced as row and run as column; plan with tensor=1"
    more = dict(runs) | {"model.norm": "column"}
    assert "model.norm would be priced as whole and run as column" in PricedBlocks(graph, "a100-80g:2", only=more).why_not(
        Cut(graph.samples, 2)
    )


@pytest.mark.slow
def test_a_plan_carries_its_layouts_and_another_model_refuses_them():
    _, graph, facts = asked(MODELS[1])
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


@pytest.mark.slow
def test_adapters_are_priced_as_they_run():
    """Products that no gradient reaches, before the first adapter, are cut by columns as all others."""
    pytest.importorskip("peft")
    _, graph, facts = asked(f"hf:llama,{SMALL},num_key_value_heads=8,lora.r=16,lora.targets=q_proj+v_proj")
    _, runs = judge(facts)
    assert PricedBlocks(graph, "a100-40g:2", only=runs).why_not(Cut(graph.samples, 2)) is None
