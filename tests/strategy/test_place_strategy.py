"""From a model to its whole strategy, in Python and on the command line; never behind planners that answer at once."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest
from torch import nn

import rlplace
from rlplace.cli.main import main
from rlplace.cluster.parse import parse
from rlplace.errors import InputError, RlplaceError
from rlplace.model.graph.opgraph import OpGraph
from rlplace.model.zoo import load_model
from rlplace.placement import NEEDS_SPLIT, OF_STRATEGIES, ONE_SHOT
from rlplace.plan.strategy import Strategy
from rlplace.strategy.drafts import KINDS
from rlplace.strategy.search.efficiency import BatchCurve
from rlplace.strategy.search.plan import plan_strategy

GPT2 = "hf:gpt2,n_layer=4,n_embd=256,n_head=4,vocab_size=1024"
CLUSTER = "a100-80g:4"


@pytest.fixture(scope="module")
def gpt2() -> tuple[nn.Module, dict]:
    loaded = load_model(GPT2, batch=4, seq=64, dtype="fp32")
    return loaded.module, loaded.example_inputs


@pytest.fixture(scope="module")
def plan(gpt2: tuple[nn.Module, dict]) -> rlplace.PlacementPlan:
    module, inputs = gpt2
    return rlplace.place(module, CLUSTER, example_inputs=inputs, batch=32, calls=80, time_limit_s=None)


@pytest.fixture(scope="module")
def graph(gpt2: tuple[nn.Module, dict]) -> OpGraph:
    return rlplace.capture(*gpt2)


@pytest.mark.slow
def test_a_model_gets_a_whole_strategy(plan: rlplace.PlacementPlan, tmp_path: Path) -> None:
    assert plan.strategy is not None and plan.strategy.batch == 32
    blocks = [block for stage in plan.strategy.stages for block in stage.blocks]
    assert {f"transformer.h.{number}" for number in range(4)} <= set(blocks)
    predicted = plan.predicted
    assert predicted.feasible and predicted.samples_per_s == pytest.approx(32 / predicted.step_s)
    assert predicted.parts is not None and sum(predicted.parts.values()) == pytest.approx(predicted.step_s)
    assert len(predicted.peak_memory_bytes) == 4
    rivals = predicted.strategies
    assert rivals[0]["strategy"] == plan.strategy.to_dict()
    assert rivals[0]["step_time_s"] == predicted.step_time_s <= 1.01 * min(r["step_time_s"] for r in rivals if r["step_time_s"])
    assert len({rival["kind"] for rival in rivals}) > 3
    assert all(Strategy.from_dict(rival["strategy"]).batch == 32 for rival in rivals if rival["strategy"])
    plan.save(tmp_path / "x.plan.json")
    assert rlplace.PlacementPlan.load(tmp_path / "x.plan.json").strategy == plan.strategy


def test_a_limit_that_captures_used_up_leaves_an_answer_checked_op_by_op(graph: OpGraph) -> None:
    answer = plan_strategy(graph, parse(CLUSTER), 16, time_limit_s=1e-3, began_s=time.monotonic() - 100.0).predicted
    assert answer.feasible and answer.executor != "blocks" and not answer.extra["complete"]
    assert set(KINDS) <= {entry["kind"] for entry in answer.strategies}


def test_what_was_refused_once_is_no_cheaper_the_second_time(graph: OpGraph) -> None:
    """Stages of unlike degrees would run micro-batches that were not captured; each is refused, not only the first."""
    assert plan_strategy(graph, parse(CLUSTER), 16, calls=2000).predicted.feasible


def test_the_first_three_are_unlike(plan: rlplace.PlacementPlan) -> None:
    first = [Strategy.from_dict(entry["strategy"]).pipelines[0] for entry in plan.predicted.strategies[:3]]
    axes = ("tensor", "context")
    degrees = {
        (len(one.device_sets), frozenset((len(s.devices), *map(s.axis, axes), s.axis("shard") > 1) for s in one.stages))
        for one in first
    }
    assert len(degrees) == 3


def test_a_graph_keeps_its_micro_batch(graph: OpGraph) -> None:
    plan = rlplace.place(graph, CLUSTER, batch=32, calls=40)
    assert plan.strategy is not None
    assert {size for pipeline in plan.strategy.pipelines for size in pipeline.microbatch} == {4}


def test_a_space_is_kept(graph: OpGraph) -> None:
    plan = rlplace.place(graph, CLUSTER, batch=32, calls=40, space="pipeline=2 shard=1")
    assert plan.strategy is not None
    assert len(plan.strategy.pipelines[0].device_sets) == 2
    assert all(stage.axis("shard") == 1 for stage in plan.strategy.stages)
    same = rlplace.place(graph, CLUSTER, batch=32, calls=40, space=rlplace.Space(pipeline=(2,), shard=(1,)))
    assert same.strategy == plan.strategy


def test_what_cannot_be_asked_is_refused(graph: OpGraph) -> None:
    problem = rlplace.price(graph, CLUSTER)
    curve = BatchCurve(points=((8, 1),))
    for target, how, reason in (
        (graph, {"batch": 0}, "batch must be a whole number from 1"),
        (graph, {"space": "auto", "planner": "metis"}, "planner metis places groups one by one and knows no strategies"),
        (graph, {"space": "auto", "agent": "mine"}, "agent belongs to placements"),
        (graph, {"space": "placement", "planner": "strategy"}, "planner strategy places no groups"),
        (graph, {"planner": "heft", "batch_curve": curve}, "a batch curve chooses among whole strategies"),
        (graph, {"planner": "heft", "batch": 32}, "the graph has 4 samples, 32 are asked for"),
        (graph, {"planner": "heft", "microbatches": 3}, "microbatches is for whole strategies"),
        (problem, {"schedule": "1f1b"}, "schedule is for whole strategies"),
        (graph, {"space": "microbatch=4", "microbatch": 2}, "microbatch stands twice"),
        (graph, {"batch": 30}, "use a batch of 4 or a multiple of it"),
        (graph, {"batch": 32, "space": "tensor=3"}, "relax tensor=3 first"),
        (problem, {"batch": 32}, "a problem's groups are placed one by one"),
        (problem, {"space": "auto"}, "a problem's groups are placed one by one"),
    ):
        with pytest.raises(InputError, match=reason):
            rlplace.place(target, None if target is problem else CLUSTER, **how)


@pytest.mark.slow
def test_which_question_is_asked(graph: OpGraph) -> None:
    """Planners that place groups, and options of theirs, ask for placements; all else for strategies, by who can answer."""
    for how in ({"planner": "heft"}, {"space": "placement", "planner": "best"}):
        plan = rlplace.place(graph, CLUSTER, **how)
        assert plan.strategy is None and len(plan.device_of_group) and plan.planner == how["planner"]
    for planner in ("agent", "best", "strategy"):
        plan = rlplace.place(graph, CLUSTER, planner=planner, calls=5)
        assert plan.strategy is not None and plan.planner == "strategy"
        assert plan.strategy.batch == 16  # the graph's own 4 samples a device


def test_pase_cuts_ops_and_nothing_else(graph: OpGraph) -> None:
    """One stage, one pass a step, the batch over copies and layers over a tensor group: what the paper can say."""
    plan = rlplace.place(graph, CLUSTER, batch=8, planner="pase", calls=20, space="tensor=2")
    assert plan.planner == "pase" and plan.strategy is not None
    (pipeline,) = plan.strategy.pipelines
    (stage,) = pipeline.stages
    assert dict(stage.mesh) == {"replicate": 2, "tensor": 2} and pipeline.microbatches == (1,) and not stage.recompute
    with pytest.raises(InputError, match="planner pase has pipeline=1 only"):
        rlplace.place(graph, CLUSTER, batch=8, planner="pase", space="pipeline=1,2")
    with pytest.raises(InputError, match="planner pase places no groups"):
        rlplace.place(graph, CLUSTER, planner="pase", space="placement")


def test_what_is_fixed_is_kept(graph: OpGraph) -> None:
    plan = rlplace.place(graph, CLUSTER, batch=32, calls=40, microbatches=4, schedule="1f1b", space="pipeline=2")
    assert plan.strategy is not None
    (pipeline,) = plan.strategy.pipelines
    assert (pipeline.microbatch, pipeline.microbatches, pipeline.schedule) == ((4,), (4,), "1f1b")


def test_rivals_are_named_with_their_reason(graph: OpGraph) -> None:
    """Whether or not they can run, fit or are allowed."""
    said = rlplace.place(graph, CLUSTER, batch=32, calls=60, space="tensor=1").predicted.strategies
    kinds = {entry["kind"]: entry for entry in reversed(said)}
    assert kinds["tensor parallel"]["reason"] == "left out by the space"
    assert all(entry["step_time_s"] is not None or entry["reason"] or entry["over_bytes"] for entry in said)
    (uniform,) = [entry for entry in said if entry["uniform"]]
    assert uniform["step_time_s"] >= said[0]["step_time_s"]
    alone = {
        entry["kind"]: entry["reason"] for entry in rlplace.place(graph, "a100-80g:1", batch=32, calls=9).predicted.strategies
    }
    assert alone == {"one device": None, **dict.fromkeys(KINDS[1:], "needs two devices")}


@pytest.mark.slow
def test_a_batch_curve_chooses_the_batch(gpt2: tuple[nn.Module, dict]) -> None:
    """Where epochs do not rise a larger batch wins, where they rise with the batch the smallest does."""
    module, inputs = gpt2
    arguments = {"example_inputs": inputs, "batch": 4, "calls": 90, "time_limit_s": None}
    level = rlplace.place(module, CLUSTER, batch_curve=BatchCurve(points=((4, 10),)), **arguments)
    steep = rlplace.place(module, CLUSTER, batch_curve=BatchCurve(points=((4, 10), (8, 30), (16, 90))), **arguments)
    assert level.strategy is not None and steep.strategy is not None
    assert (level.strategy.batch, steep.strategy.batch) == (16, 4)
    for plan in (level, steep):
        tried = plan.predicted.extra["batches"]
        assert [entry["batch"] for entry in tried] == [4, 8, 16]
        best = min(tried, key=lambda entry: entry["epochs"] * entry["step_time_s"] / entry["batch"])
        assert best["batch"] == plan.strategy.batch
        assert best["step_time_s"] == pytest.approx(plan.predicted.step_time_s, rel=0.01)  # the plan's is that of the ops


@pytest.mark.slow
def test_the_verb_says_it_and_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "x.plan.json"
    words = ["place", GPT2, "--cluster", CLUSTER, "--seq", "64", "--batch", "32", "--calls", "60"]
    assert main([*words, "--out", str(out)]) == 0
    said = capsys.readouterr().out.splitlines()
    plan = rlplace.PlacementPlan.load(out)
    assert plan.strategy is not None
    assert said[0].endswith(f"on {len(plan.strategy.devices)} devices") or said[0].startswith("one device")
    assert "for 32 samples a step" in said[1]
    assert any(line.startswith("data parallel") for line in said)
    assert main([*words, "--json"]) == 0
    assert Strategy.from_dict(json.loads(capsys.readouterr().out)["strategy"]).batch == 32


MODELS = (
    "hf:gpt2,n_layer=3,n_embd=128,n_head=4,vocab_size=512",
    "hf:t5,num_layers=2,num_decoder_layers=2,d_model=64,d_ff=128,vocab_size=256",
    "zoo:inception",
    "zoo:lstm",
    "zoo:mlp",
    "zoo:moe_toy",
    "zoo:nasnet",
)
CLUSTERS = ("a100-80g:4", "a100-80g:2+t4:2", "rtx4090:2", "v100:4", "h100:2x2,ib=400g")


MORE = [pytest.mark.long]  # a minute each


@pytest.mark.slow
@pytest.mark.parametrize("seed", [pytest.param(seed, marks=MORE) for seed in range(4)])
def test_the_default_answer_is_never_behind_a_planner_that_answers_at_once(seed: int) -> None:
    rng = random.Random(seed)
    model, cluster, batch = rng.choice(MODELS), rng.choice(CLUSTERS), rng.choice((4, 8))
    loaded = load_model(model, batch=batch, seq=32)

    module = {"target": loaded.module, "example_inputs": loaded.example_inputs, "loss": loaded.loss}
    graph = {"target": rlplace.capture(loaded.module, loaded.example_inputs, loss=loaded.loss)}

    def step_s(model: dict[str, object], **options: object) -> float:
        try:
            plan = rlplace.place(cluster=cluster, batch=batch, time_limit_s=None, **model, **options)
        except RlplaceError:
            return float("inf")
        figures = plan.predicted if plan.strategy is not None else plan.predicted.op_level or plan.predicted
        return figures.step_s

    answer_s = step_s(module, calls=300)
    asked = dict.fromkeys((*ONE_SHOT, *NEEDS_SPLIT), graph) | {name: {**module, "calls": 300} for name in OF_STRATEGIES}
    behind = {name: answer_s / found for name, given in asked.items() if (found := step_s(given, planner=name)) < answer_s}
    assert answer_s < float("inf") and all(ratio < 1 + 1e-9 for ratio in behind.values()), (model, cluster, batch, behind)
