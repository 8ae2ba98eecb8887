"""Strategies that torch's parts cannot run, or would silently run wrong, are refused with the reason."""

import subprocess
import sys

import pytest

from rlplace.plan.strategy import Strategy
from rlplace.runtime.strategy.fact_records import Conduct, ContextFacts, ModelFacts, TensorFacts
from rlplace.runtime.strategy.why_not import why_not
from tests.runtime.strategy.native_cases import BLOCKS, beside, chain, flat

SHARED, HALVES = {"mesh": {"shard": 2}, "sharding": 1}, [(0, 1), (2, 3)]
SHARDED, TENSOR = flat("llama", {"shard": 4}, 1), flat("llama", {"tensor": 4}, 0)
STAGED = chain("llama", HALVES, "1f1b", **SHARED)
TURN = chain("llama", [*HALVES, *HALVES[::-1]], "zbv", microbatches=4, microbatch=1, **SHARED)
UNLIKE = chain("llama", [(0, 1), (2,)], "1f1b", mesh=[{"replicate": 2}, {}], sharding=0)
SEQUENCE = flat("llama", {"tensor": 4}, 0, sequence_parallel=True)
SPREAD = flat("llama", {"shard": 4}, 1, expert=2)
COPIES = {"batch": 16, "stages": [{"blocks": ["a"], "devices": [0, 1], "mesh": {"replicate": 2}}], "microbatch": [8]}
AGAIN = {**COPIES, "stages": [{**COPIES["stages"][0], "mesh": {"shard": 2}, "sharding": 3, "recompute": {"a": "full"}}]}


def facts_of(conduct=None, blocks=BLOCKS["llama"], **facts):
    return ModelFacts(blocks, conduct=None if conduct is None else Conduct(**conduct), **facts)


def reason(data, facts, torch_version="2.13.0"):
    return why_not(Strategy.from_dict(data), facts, torch_version)


@pytest.mark.parametrize(
    ("data", "facts"),
    [
        (flat("llama", {"shard": 4}, 3), facts_of()),
        (flat("llama", {"replicate": 2, "shard": 2}, 1, recompute="full"), facts_of()),
        (flat("llama", {"shard": 4}, 2, offload="all"), facts_of()),
        (STAGED, facts_of()),
        (SPREAD, facts_of(experts=8)),
        (TURN, facts_of()),
        (UNLIKE, facts_of()),
        (chain("llama", HALVES, "1f1b", mesh=[{"replicate": 2}, {"shard": 2}], sharding=[0, 1]), facts_of(no_samples="why")),
        (SHARDED, facts_of(no_cut="why")),
        (COPIES, ModelFacts(hooked=("a",))),
        (STAGED | {"stages": [STAGED["stages"][0] | {"expert": 2}, STAGED["stages"][1]]}, None),
        (COPIES | {"buffers": "replica"}, facts_of({"written": ("mean",)}, ())),
        (COPIES, facts_of({"reduction": ""}, ())),
        (COPIES | {"couple": "gather"}, facts_of({"reduction": ""}, ())),
    ],
)
def test_runs(data, facts):
    assert reason(data, facts) is None


PARTS, RING, HEADS = (
    flat("llama", {"context": 4}, 0, batch=2, **how) for how in ({}, {"context_method": "ring"}, {"context_method": "heads"})
)


def of_attention(**facts):
    return ModelFacts(context=ContextFacts(**facts))


REFUSED = [
    (PARTS, of_attention(no_context="why"), "no context parallelism: why"),
    (PARTS, of_attention(positions=20), "20 positions cannot be cut into 8 parts"),
    (RING, of_attention(no_ring="no way around"), "no way around; plan with another"),
    (HEADS, of_attention(heads=6), "context 4 does not divide 6 heads"),
    (HEADS, of_attention(heads=12, shared=(3,)), "context 4 neither divides 3 heads of keys"),
    (flat("llama", {"context": 4}, 0, batch=2), ModelFacts(batch_norm=True), "written by parts of the positions"),
    (chain("llama", HALVES, "1f1b", mesh={"context": 2}, sharding=0), of_attention(no_stages="why"), "in a pipeline: why"),
    (chain("llama", HALVES, "1f1b", mesh=[{"context": 2}, {"shard": 2}], sharding=[0, 1]), None, "unlike context degrees"),
    (flat("llama", {"branch": 4}, 0, batch=2), None, "the axis branch is not run"),
    (SPREAD, facts_of(no_experts="no module has"), "no module has"),
    (SPREAD, facts_of(experts=3), "does not divide 3"),
    (SPREAD, facts_of(branches=True, skips=True), "processes that wait for tokens"),
    (SPREAD | {"microbatches": [1, 3, 2, 2]}, None, "each other's tokens"),
    (flat("llama", {"shard": 4}, 1, expert=2, offload="all"), None, "spread experts in host memory"),
    (flat("llama", {"shard": 2, "tensor": 2}, 1, expert=2, sequence_parallel=True), None, "take the whole sequence"),
    (flat("llama", {"tensor": 4}, 0, expert=2), None, "all of context x tensor; give expert 4"),
    (flat("llama", {"shard": 2, "tensor": 2}, 1, expert=2), facts_of(experts=4, listed="a.experts"), "without tensor groups"),
    (
        chain("llama", [*HALVES, *HALVES[::-1]], "zbv", microbatches=4, microbatch=1, expert=2, **SHARED),
        facts_of(experts=4, listed="a.experts"),
        "routers of a.experts twice",
    ),
    (flat("llama", {"shard": 4}, 1, offload="optimizer"), None, "optimizer state alone"),
    (flat("llama", {"replicate": 4}, 0, offload="all"), None, "CPUOffloadPolicy"),
    (chain("llama", HALVES, "1f1b", offload="all", **SHARED), None, "offload in a pipeline"),
    (chain("llama", HALVES[::-1], "1f1b", **SHARED), None, "order of the chain"),
    (
        chain("deep", HALVES * 4, "interleaved_zero_bubble", microbatches=4, microbatch=1, **SHARED), None,
        "loses weight gradients",
    ),
    (UNLIKE | {"microbatches": [5, 3]}, None, "micro-batches of one size"),
    (chain("llama", HALVES, "interleaved_zero_bubble", recompute="selective", **SHARED), None, "selectively once"),
    (UNLIKE, facts_of(no_samples="why"), "unlike data degrees: why"),
    (flat("llama", {}, 0, devices=[0], recompute="full"), ModelFacts(batch_norm=True), "twice"),
    (STAGED, facts_of(no_cut="why"), "cannot be cut into stages: why"),
    (STAGED, facts_of(blocks=(*BLOCKS["llama"], "lm_tail")), "no stage names the block lm_tail"),
    (TENSOR, facts_of(tensor=TensorFacts("why")), "no tensor-parallel layout: why"),
    (TENSOR, facts_of(tensor=TensorFacts(parts=6)), "does not divide 6"),
    (SEQUENCE, ModelFacts(tensor=TensorFacts(no_sequence="why")), "no sequence parallelism: why"),
    (COPIES, facts_of({"written": ("mean",)}), "writes mean by the samples"),
    (COPIES | {"batch": 8, "microbatch": [4]}, facts_of({"indivisible": "IndexError: out"}), "cannot be divided"),
    (COPIES | {"couple": "gather", "batch": 32, "microbatches": [2]}, ModelFacts(), "microbatches=1"),
    (COPIES | {"couple": "gather"}, ModelFacts(no_gather="why"), "--couple gather: why"),
    (COPIES, ModelFacts(subclass="w (Float8Tensor)"), "w (Float8Tensor) is no plain tensor"),
    (AGAIN, facts_of({"toggles": ("w",)}), "changes requires_grad of w"),
    (AGAIN, facts_of({"differentiates": True}), "computes gradients itself"),
    *((plan, facts_of({"sparse": ("w",)}), "gradient of w is sparse") for plan in (AGAIN, COPIES, TENSOR)),
    (AGAIN, facts_of({"counters": ("steps",)}), "steps would be written twice"),
    (AGAIN, ModelFacts(backward_hooks=("a",)), "would call the hooks of a on other activations"),
    (AGAIN, ModelFacts(handed="a is handed a DynamicCache"), "use_cache = False"),
]  # fmt: skip


@pytest.mark.parametrize(("data", "facts", "words"), REFUSED, ids=[words for *_, words in REFUSED])
def test_refuses(data, facts, words):
    assert words in reason(data, facts)


ASIDE = beside(flat("llama", {"shard": 2}, 3, devices=(0, 1)), flat("llama", {"tensor": 2}, 0, devices=(2, 3), batch=3))


@pytest.mark.parametrize(
    ("facts", "options", "words"),
    [
        (facts_of(), {}, None),
        (facts_of(), {"release": True}, "without --release-gradients"),
        (facts_of(), {"couple": "gather"}, "replicas of one"),
        (facts_of(batch_norm=True), {}, "running statistics of its own"),
        (facts_of(sync_norm=True), {}, "running statistics of its own"),
        (facts_of({"sparse": ("w",)}), {}, "the gradient of w is sparse"),
        (facts_of({"toggles": ("w",)}), {}, "changes requires_grad of w"),
        (facts_of({"indivisible": "IndexError: out"}), {}, "cannot be divided"),
        (facts_of({"written": ("mean",)}), {}, "writes mean by the samples"),
        (facts_of(tensor=TensorFacts(no_tensor="why")), {}, "no tensor-parallel layout: why"),
        *((facts_of(), {"optimizer": name}, "drift apart") for name in ("muon", "adamw8bit", "adamw-bf16")),
    ],
)
def test_unlike_pipelines(facts, options, words):
    found = why_not(Strategy.from_dict(ASIDE), facts, "2.13.0", **options)
    assert found is None if words is None else words in found


STAGE = {"blocks": ["a"], "devices": [0, 1, 2, 3], "mesh": {"replicate": 4}, "tables": {"a": "rows"}}
WHOLE, WIDE = {"blocks": ["b"], "devices": [4, 5, 6, 7], "mesh": {"replicate": 4}}, {"replicate": 2, "shard": 2}
CANNOT_DIVIDE = [
    ({"mesh": {"shard": 4}, "sharding": 3}, {}, {}, None),
    ({}, {"optimizer": "sparse-adam"}, {"tables": {"a": None}, "conduct": Conduct(sparse=("a.weight",))}, None),
    ({}, {}, {"conduct": Conduct(sparse=("a.weight", "b.weight"))}, "the gradient of b.weight is sparse"),
    ({}, {}, {"tables": {"a": "has max_norm"}}, "the table a cannot be divided: it has max_norm"),
    ({}, {}, {"tables": {"b": None}}, "it is no module torch.nn.Embedding or EmbeddingBag"),
    ({"mesh": {"replicate": 2, "tensor": 2}}, {}, {}, "divided tables with a tensor group"),
    ({"mesh": {"replicate": 2, "context": 2}}, {}, {}, "divided tables with a context group"),
    ({"mesh": WIDE, "sharding": 1, "expert": 2}, {}, {}, "divided tables with spread experts"),
    ({"mesh": {"shard": 4}, "sharding": 3, "offload": {"a": "all"}}, {}, {}, "divided tables with offload"),
    ({"mesh": {"shard": 4}, "sharding": 1}, {"release": True}, {}, "divided tables with --release-gradients"),
    ({}, {"couple": "gather"}, {}, "divided tables with --couple gather"),
    ({}, {"optimizer": "adafactor"}, {}, "divided tables have parts"),
    ({}, {}, {"skips": True}, "may call unlike modules"),
    ({}, {}, {"branches": True}, "may call unlike modules"),
]


@pytest.mark.parametrize(("stage", "options", "facts", "words"), CANNOT_DIVIDE)
def test_divided_tables(stage, options, facts, words):
    data = 2 if {"tensor", "context"} & stage.get("mesh", {}).keys() else 4
    plan = {"batch": 4 * data, "microbatch": [4], "stages": [STAGE | stage]}
    found = why_not(Strategy.from_dict(plan), ModelFacts(**facts), "2.13.0", **options)
    assert found is None if words is None else words in found


def test_divided_tables_are_one_stage_of_alike_replicas():
    staged = {"batch": 16, "microbatch": [2], "microbatches": [2], "schedule": "1f1b", "stages": [STAGE, WHOLE]}
    assert "divided tables with a pipeline" in reason(staged, None)
    uneven = {"batch": 16, "microbatch": [2] * 4, "microbatches": [1, 1, 2, 4], "stages": [STAGE]}
    assert "wait for each other's ids" in reason(uneven, None)


def test_unlike_pipelines_keep_gradients_on_their_devices():
    part = flat("llama", {"shard": 2}, 3, devices=(0, 1), offload="all")
    assert "host memory" in reason(beside(part, flat("llama", {}, 0, devices=(2,))), facts_of())


def test_old_versions_of_torch_are_refused():
    assert "torch 2.13" in reason(TURN, None, "2.12.1+cpu")
    assert "older than 2.11" in reason(SHARDED, None, "2.10.0")


def test_it_is_asked_without_torch():
    code = "import sys; import rlplace.runtime.strategy.why_not; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)
    assert done.stdout.strip() == "False"
