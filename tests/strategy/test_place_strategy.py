"""From a model to its whole strategy, in Python and on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch import nn

import rlplace
from rlplace.cli.main import main
from rlplace.errors import InputError
from rlplace.graph.opgraph import OpGraph
from rlplace.plan.strategy import Strategy
from rlplace.zoo import load_model

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
    assert rivals[0]["step_time_s"] == predicted.step_time_s == min(r["step_time_s"] for r in rivals if r["step_time_s"])
    assert len({rival["kind"] for rival in rivals}) > 3
    assert all(Strategy.from_dict(rival["strategy"]).batch == 32 for rival in rivals)
    plan.save(tmp_path / "x.plan.json")
    assert rlplace.PlacementPlan.load(tmp_path / "x.plan.json").strategy == plan.strategy


def test_calls_make_it_the_same_every_time(plan: rlplace.PlacementPlan, gpt2: tuple[nn.Module, dict]) -> None:
    module, inputs = gpt2
    again = rlplace.place(module, CLUSTER, example_inputs=inputs, batch=32, calls=80, time_limit_s=None)
    assert again.to_dict() == plan.to_dict()
    other = rlplace.place(module, CLUSTER, example_inputs=inputs, batch=16, calls=80, time_limit_s=None)
    assert other.problem != plan.problem  # another question


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
    for target, how, reason in (
        (graph, {"space": "tensor=1"}, "give batch, too"),
        (graph, {"batch": 0}, "batch must be a whole number from 1"),
        (graph, {"batch": 32, "planner": "metis"}, "a whole strategy is found by the planner 'strategy'"),
        (graph, {"batch": 32, "global_batch": 32}, "leave global_batch, batch_curve"),
        (graph, {"batch": 30}, "use a batch of 28|use a batch of 32"),
        (problem, {"batch": 32}, "a problem's groups are placed one by one"),
    ):
        with pytest.raises(InputError, match=reason):
            rlplace.place(target, None if target is problem else CLUSTER, **how)


def test_the_verb_says_it_and_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "x.plan.json"
    words = ["place", GPT2, "--cluster", CLUSTER, "--seq", "64", "--space", "auto", "--global-batch", "32"]
    words += ["--calls", "60"]
    assert main([*words, "--out", str(out)]) == 0
    said = capsys.readouterr().out.splitlines()
    plan = rlplace.PlacementPlan.load(out)
    assert plan.strategy is not None
    assert said[0].endswith(f"on {len(plan.strategy.devices)} devices") or said[0].startswith("one device")
    assert "for 32 samples a step" in said[1]
    assert any(line.startswith("data parallel") for line in said)
    assert main([*words, "--json"]) == 0
    assert Strategy.from_dict(json.loads(capsys.readouterr().out)["strategy"]).batch == 32


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--space", "tensor"], "expected KEY=VALUE"),
        (["--space", "auto", "--microbatches", "2"], "--microbatches belongs to --space placement"),
        (["--space", "auto", "--planner", "metis"], "--planner metis places groups"),
        (["--calls", "3"], "--calls counts strategies"),
    ],
)
def test_options_that_do_not_go_together(words: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["place", GPT2, "--cluster", CLUSTER, "--seq", "64", *words]) == 2
    assert reason in capsys.readouterr().err
