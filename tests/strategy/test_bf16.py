"""Plans in bf16 for cards without units for it: the answer says so, and what fp16 would take."""

from __future__ import annotations

import re

import pytest

import rlplace
from rlplace.cli.main import main
from rlplace.cluster.parse import parse
from rlplace.cluster.presets import KINDS
from rlplace.model.graph.opgraph import OpGraph
from rlplace.model.zoo import load_model
from rlplace.plan import PlacementPlan
from rlplace.strategy.search.plan import plan_strategy
from rlplace.strategy.search.space import Space

GPT2 = "hf:gpt2,n_layer=2,n_embd=512,n_head=4,vocab_size=512"


def captured(**how: str) -> OpGraph:
    loaded = load_model(GPT2, batch=8, seq=128)
    return rlplace.capture(loaded.module, loaded.example_inputs, **how)


def plan_of(graph: OpGraph, cluster: str, space: str = "") -> PlacementPlan:
    return plan_strategy(graph, parse(cluster), 32, calls=30, space=Space.parse(space))


def notes(plan: PlacementPlan) -> list[str]:
    return list(plan.predicted.extra.get("notes", ()))


def test_which_kinds_have_no_bfloat16() -> None:
    """Volta and Turing; every kind that has float16 and came later has it."""
    assert {name for name, kind in KINDS.items() if "bfloat16" not in kind.peak_flops} == {"v100", "t4", "titan-rtx"}


@pytest.mark.parametrize("option", ["dtype", "autocast"])
def test_the_answer_says_what_fp16_takes(option: str) -> None:
    """As much as the model captured in fp16 takes with the same strategy."""
    (note,) = notes(
        plan := plan_of(captured(**{option: "bf16"}), "v100:4", "pipeline=1 tensor=1 shard=1 replicate=4 recompute=none")
    )
    assert note.startswith("v100: no bfloat16 units") and f"--{option} fp16 plans for it" in note
    other = plan_of(captured(**{option: "fp16"}), "v100:4", "pipeline=1 tensor=1 shard=1 replicate=4 recompute=none")
    assert other.strategy == plan.strategy and not notes(other)
    said = re.search(r"takes (.*) ms, (.*) times as fast", note)
    assert said is not None and float(said[1]) == pytest.approx(1e3 * other.predicted.step_s, abs=1e-3)
    assert float(said[2]) == pytest.approx(plan.predicted.step_s / other.predicted.step_s, abs=0.01)
    assert float(said[2]) > 1.2


def test_cards_with_units_need_no_note() -> None:
    graph = captured(dtype="bf16")
    assert not notes(plan_of(graph, "a100-80g:4")) and not notes(plan_of(captured(), "v100:4"))
    only = plan_of(graph, "a100-80g:2+t4:2")
    assert only.strategy is not None
    kinds = {parse("a100-80g:2+t4:2").devices[device].kind for device in only.strategy.devices}
    assert bool(notes(only)) is ("t4" in kinds)


def test_placements_say_it_too(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["place", GPT2, "--cluster", "t4:2", "--planner", "heft", "--batch", "4", "--seq", "32", "--autocast", "bf16"]
    assert main(words) == 0
    assert "note: t4: no bfloat16 units" in capsys.readouterr().out
