"""The verbs that take a plan, given one with a whole strategy."""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path

import pytest

import rlplace
from rlplace.plan.strategy import uniform_words
from tests.cli.command import run

MODEL = "hf:gpt2,n_layer=2,n_embd=64,n_head=2,vocab_size=512"
ASKED = ["place", MODEL, "--cluster", "a100-80g:2", "--batch", "8", "--seq", "32", "--calls", "40"]
ASKED += ["--time-limit", "300"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds a.plan.json, a pipeline, b.plan.json, fully sharded, and unlike.plan.json, two devices with unlike parts."""
    from rlplace.cli.main import main

    folder = tmp_path_factory.mktemp("plans")
    for name, space in (("a", "pipeline=2"), ("b", "shard=2 recompute=full")):
        assert main([*ASKED, "--space", space, "--out", str(folder / f"{name}.plan.json")]) == 0
    data = json.loads((folder / "b.plan.json").read_text())
    blocks = data["strategy"]["stages"][0]["blocks"]
    few = [{"stages": [{"blocks": blocks, "devices": [device]}], "microbatch": [size]} for device, size in ((0, 6), (1, 2))]
    data["strategy"] = {"batch": 8, "pipelines": few}
    (folder / "unlike.plan.json").write_text(json.dumps(data))
    return folder


@pytest.mark.slow
def test_simulate_gives_what_was_predicted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = rlplace.PlacementPlan.load(folder / "a.plan.json")
    code, out, _ = run(capsys, "simulate", folder / "a.plan.json", "--json", "--trace", folder / "a.trace.json")
    said = json.loads(out)
    assert code == 0
    assert said["step_time_s"] == plan.predicted.step_time_s
    assert said["peak_memory_bytes"] == list(plan.predicted.peak_memory_bytes)
    events = json.loads((folder / "a.trace.json").read_text())["traceEvents"]
    ends = [event["ts"] + event["dur"] for event in events if event["ph"] == "X"]
    assert max(ends) == pytest.approx(1e6 * plan.predicted.step_s, rel=1e-6)
    assert any(event["name"].startswith("transformer.h.0.") for event in events)
    code, out, _ = run(capsys, "simulate", folder / "a.plan.json", "--cluster", "v100:2")
    assert code == 0
    assert out.splitlines()[0].startswith("2 pipeline stages")
    assert float(out.split("step time ")[1].split(" ms")[0]) > 1e3 * plan.predicted.step_s
    code, _, err = run(capsys, "simulate", folder / "a.plan.json", "--cluster", "v100:4")
    assert code == 2
    assert "the plan is for 2 devices" in err


@pytest.mark.slow
def test_diff_says_which_words_differ(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = (rlplace.PlacementPlan.load(folder / f"{name}.plan.json") for name in "ab")
    code, out, _ = run(capsys, "diff", folder / "a.plan.json", folder / "b.plan.json", "--json")
    said = json.loads(out)
    assert code == 0
    assert [said[side]["step_time_s"] for side in ("first", "second")] == [a.predicted.step_s, b.predicted.step_s]
    assert {"stages", "recompute"} <= {word["name"] for word in said["words"]}
    text = run(capsys, "diff", folder / "a.plan.json", folder / "a.plan.json")[1]
    assert text.startswith("two whole strategies, 8 samples a step")
    assert text.rstrip().endswith("the strategies say the same")
    text = run(capsys, "diff", folder / "b.plan.json", folder / "unlike.plan.json")[1]
    assert "pipelines beside it" in text and "1 of 2 on 1" in text


@pytest.mark.slow
def test_the_effect_of_a_word_is_that_of_the_strategy_with_it(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = json.loads((folder / "b.plan.json").read_text())
    del data["strategy"]["stages"][0]["recompute"]
    (tmp_path / "c.plan.json").write_text(json.dumps(data))
    said = json.loads(run(capsys, "diff", folder / "b.plan.json", tmp_path / "c.plan.json", "--json")[1])
    (word,) = said["words"]
    assert (word["name"], word["second"]) == ("recompute", f"none of {len(data['strategy']['stages'][0]['blocks'])}")
    assert word["effect_s"] == said["second"]["step_time_s"] - said["first"]["step_time_s"] < 0


@pytest.mark.slow
def test_diff_sets_a_strategy_beside_a_placement(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    placed = tmp_path / "p.plan.json"
    words = "--cluster a100-80g:2 --batch 4 --seq 32 --space placement --planner single --out".split()
    assert run(capsys, "place", MODEL, *words, placed)[0] == 0
    code, out, _ = run(capsys, "diff", folder / "a.plan.json", placed)
    assert code == 0
    assert out.startswith("a whole strategy against a placement of groups, 8 and 4 samples a step")
    plan = rlplace.PlacementPlan.load(placed)
    assert f"{plan.predicted.step_s * 1e3:.3f}  other samples" in out


@pytest.mark.slow
def test_a_model_is_explained_by_the_strategy_that_place_answers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["explain", MODEL, "--cluster", "a100-80g:2", "--batch", "8", "--seq", "32", "--space", "shard=2 recompute=full"]
    code, out, err = run(capsys, *words, "--time-limit", "60", "--no-what-if")  # it ends when all was tried
    plan = rlplace.PlacementPlan.load(folder / "b.plan.json")
    assert code == 0 and plan.strategy is not None, err
    assert (code, out.splitlines()[0]) == (0, uniform_words(plan.strategy))
    assert "fullest device" in out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a", "b", "unlike"])
def test_report_draws_the_step_that_was_predicted(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    plan = rlplace.PlacementPlan.load(folder / f"{name}.plan.json")
    said = json.loads(run(capsys, "simulate", folder / f"{name}.plan.json", "--json")[1])
    page = tmp_path / "x.html"
    assert run(capsys, "report", folder / f"{name}.plan.json", "--out", page)[0] == 0
    text = page.read_text()
    data = json.loads(text.split('id="data">')[1].split("</script>")[0])
    assert data["step_s"] == pytest.approx(said["step_time_s"], rel=1e-12)
    unit, tick = data["memory_unit_bytes"], data["tick_s"]
    for curve, device, peak in zip(data["memory"], data["devices"], said["peak_memory_bytes"], strict=True):
        assert max(accumulate(curve["size"])) * unit == pytest.approx(device["peak_bytes"], abs=unit)
        assert device["peak_bytes"] == peak
    ends, at = [], 0
    for row in data["rows"]:
        span = range(at, at + row["boxes"])
        assert all(data["boxes"]["gap"][box] >= -1 for box in span), row["name"]  # rounding
        ends.append(sum(data["boxes"]["gap"][box] + data["boxes"]["length"][box] for box in span) * tick)
        at = span.stop
    assert max(ends) == pytest.approx(data["step_s"], rel=1e-6)
    assert plan.predicted.strategies[0]["words"] in text
    parts = plan.predicted.parts or {}
    most = max(parts, key=lambda part: parts[part])
    assert most == "compute" and f"Bounded by computing: {100 * parts[most] / sum(parts.values()):.1f} % computing" in text


def test_compare_asks_strategies_and_planners_for_the_same_step(capsys: pytest.CaptureFixture[str]) -> None:
    names = "strategy,one device,data parallel,tensor parallel,single"
    words = [MODEL, "--cluster", "a100-80g:2", "--seq", "32", "--batch", "8", "--calls", "40", "--planners", names, "--json"]
    code, out, _ = run(capsys, "compare", *words)
    data = json.loads(out)
    rows = {row["planner"]: row for row in data["rows"]}
    assert code == 0
    assert list(rows) == ["best", *names.split(",")]
    assert [info["samples"] for info in data["problems"]] == [8]
    assert rows["one device"]["step_time_s"] == pytest.approx(rows["single"]["step_time_s"], rel=1e-6)
    assert rows["strategy"]["step_time_s"] <= min(rows[kind]["step_time_s"] for kind in ("one device", "data parallel"))
    assert (rows["data parallel"]["replicas"], rows["tensor parallel"]["status"]) == (2, "ok")


@pytest.mark.slow
def test_the_search_says_how_far_it_is_and_what_it_plans_for(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    code, _, err = run(capsys, "place", "zoo:mlp", "--calls", "70")
    assert code == 0
    assert "no --cluster: planning for this machine, 1 x " in err
    code, _, err = run(capsys, "place", "zoo:mlp", "--cluster", "a100-80g:4", "--calls", "70")
    assert code == 0 and err.startswith("planning for 4 x a100-80g\n")
    told = [part for part in err.replace("\x1b[K", "").split("\r") if "strategies simulated" in part]
    assert [int(part.split()[0]) for part in told[:2]] == [32, 64] and "the best takes" in told[-1]
    assert err.endswith("\r\x1b[K"), "the line is cleared in the end"
    monkeypatch.setattr("sys.stderr.isatty", lambda: False, raising=False)
    assert "strategies simulated" not in run(capsys, "place", "zoo:mlp", "--cluster", "a100-80g:4", "--calls", "70")[2]


@pytest.mark.slow
@pytest.mark.parametrize("space", ["auto", "placement"])
def test_with_calls_and_a_seed_the_plan_is_the_same_to_the_bit(capsys, tmp_path, space):
    arguments = ("zoo:mlp", "--cluster", "a100-80g:4", "--space", space, "--calls", "150", "--seed", "3")
    texts = []
    for name in "ab":
        path = tmp_path / f"{name}.plan.json"
        assert run(capsys, "place", *arguments, "--out", str(path))[0] == 0
        texts.append(path.read_bytes())
    assert texts[0] == texts[1]
