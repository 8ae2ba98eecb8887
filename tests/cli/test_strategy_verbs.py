"""The verbs that take a plan, given one with a whole strategy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import run

import rlplace

MODEL = "hf:gpt2,n_layer=2,n_embd=64,n_head=2,vocab_size=512"
ASKED = ["place", MODEL, "--cluster", "a100-80g:2", "--batch", "4", "--seq", "32", "--global-batch", "8", "--calls", "40"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds a.plan.json, a pipeline, and b.plan.json, fully sharded."""
    from rlplace.cli.main import main

    folder = tmp_path_factory.mktemp("plans")
    for name, space in (("a", "pipeline=2"), ("b", "shard=2 recompute=full")):
        assert main([*ASKED, "--space", space, "--out", str(folder / f"{name}.plan.json")]) == 0
    return folder


def test_simulate_gives_what_was_predicted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = rlplace.PlacementPlan.load(folder / "a.plan.json")
    code, out, _ = run(capsys, "simulate", folder / "a.plan.json", "--json")
    said = json.loads(out)
    assert code == 0
    assert said["step_time_s"] == plan.predicted.step_time_s
    assert said["peak_memory_bytes"] == list(plan.predicted.peak_memory_bytes)
    code, out, _ = run(capsys, "simulate", folder / "a.plan.json", "--cluster", "v100:2")
    assert code == 0
    assert out.splitlines()[0].startswith("2 pipeline stages")
    assert float(out.split("step time ")[1].split(" ms")[0]) > 1e3 * plan.predicted.step_s
    code, _, err = run(capsys, "simulate", folder / "a.plan.json", "--cluster", "v100:4")
    assert code == 2
    assert "the plan is for 2 devices" in err
