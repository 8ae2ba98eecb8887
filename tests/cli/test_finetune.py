"""``rlplace finetune``: sessions with a command that stands for a cluster, and one with a real torchrun."""

import json
import signal
import sys

import pytest

from rlplace.measure.log import read_runs
from rlplace.plan import PlacementPlan
from tests.cli.command import run as command

MODEL = "zoo:mlp,width=64,layers=4"
WORKER = """
import json, sys
from rlplace.cost.timings import PlanTiming, PlanTimings
from rlplace.plan import PlacementPlan

plan = PlacementPlan.load(sys.argv[1])
with open("ran.txt", "a") as file:
    print(plan.fingerprint, file=file)
wide = len({device for stage in plan.strategy.stages for device in stage.devices})
if wide == 2 and len(plan.strategy.stages) == 1:
    sys.exit("RuntimeError: CUDA out of memory")
seconds = 2.0 * plan.predicted.step_time_s
timing = PlanTiming("x", plan.fingerprint, plan.problem, "x", "native", (seconds,) * 3, (), 0.1, None, (10**9, None))
PlanTimings("x", {}, (timing,)).save(sys.argv[2])
"""


@pytest.fixture
def words(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "worker.py").write_text(WORKER)
    launch = f"{sys.executable} worker.py {{plan}} {{timings}}"
    return [
        "finetune", MODEL, "--cluster", "a100-40g:2", "--batch", "32", "--launch", launch, "--log", "lab.runs.jsonl",
        "--time-limit", "1",
    ]  # fmt: skip


@pytest.mark.slow
def test_a_session_and_the_next_one(words, tmp_path, capsys):
    code, out, err = command(capsys, *words, "--runs", "3", "--out", "best.plan.json")
    assert code == 0, err
    runs = read_runs("lab.runs.jsonl")
    assert len(runs) == 3 and len(set((tmp_path / "ran.txt").read_text().split())) == 3
    done = [one for one in runs if one.status == "done"]
    assert all(one.median_s == pytest.approx(2 * one.predicted_s) for one in done)
    best = min(one.median_s for one in done)
    plan = PlacementPlan.load("best.plan.json")
    assert 2 * plan.predicted.step_time_s == pytest.approx(best)
    assert "the best that ran takes" in out and "measured ms" in out and f"{len(runs)}: " in err
    assert [one.reason for one in runs if one.status == "out_of_memory"] == [
        "RuntimeError: CUDA out of memory" for one in runs if one.status == "out_of_memory"
    ]
    code, out, err = command(capsys, *words, "--runs", "1", "--json", "--export-runs", "shared.runs.jsonl")
    assert code == 0 and "3 runs of lab.runs.jsonl are known" in err
    found = json.loads(out)
    assert len(found["runs"]) == 1 and found["step_s"] <= best
    # What was twice as long as priced is expected to take twice as long: the third run knew it.
    assert done[-1].expected_s == pytest.approx(done[-1].median_s, rel=0.25)
    assert len(read_runs("shared.runs.jsonl")) == 4 and "layers" not in (tmp_path / "shared.runs.jsonl").read_text()


@pytest.mark.slow
def test_runs_of_others_count(words, tmp_path, capsys):
    """What another session exported, of a model with other names: every step took twice what was priced."""
    elsewhere = [word.replace("layers=4", "layers=6").replace("lab", "theirs") for word in words]
    code, _, err = command(capsys, *elsewhere, "--runs", "3", "--export-runs", "shared.runs.jsonl")
    assert code == 0, err
    for log, more in (("plain", ()), ("mine", ("--from", "shared.runs.jsonl"))):
        code, _, err = command(capsys, *[word.replace("lab", log) for word in words], *more, "--runs", "1")
        assert code == 0 and ("runs elsewhere tell of this cluster" in err) == bool(more), err
    plain, mine = (read_runs(f"{name}.runs.jsonl")[0] for name in ("plain", "mine"))  # before anything ran here
    ratio = (mine.expected_s / mine.predicted_s) / (plain.expected_s / plain.predicted_s)
    assert ratio > 1.2 and mine.expected_s < mine.median_s  # half way: another cluster may be another
    (tmp_path / "bad.runs.jsonl").write_text("{}\n")
    for file, cluster, said in (
        ("bad", "a100-40g:2", "expected format"),
        ("shared", "l4:2", "nothing of l4: they hold a100-40g"),
    ):
        changed = [cluster if word == "a100-40g:2" else word for word in words]
        code, _, err = command(capsys, *changed, "--from", f"{file}.runs.jsonl")
        assert code == 2 and said in err


@pytest.mark.slow
def test_where_nothing_works(words, capsys):
    before = signal.getsignal(signal.SIGTERM)
    code, _, err = command(capsys, *[word.replace("worker.py", "nothing.py") for word in words], "--runs", "2")
    assert code == 3 and "none of 2 strategies worked" in err.splitlines()[-1]
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.slow
@pytest.mark.long  # the page of fine-tuning does it, too
def test_real_runs_on_this_machine(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, _, err = command(
        capsys, "finetune", MODEL, "--cluster", "cpu:2", "--batch", "16", "--runs", "2", "--log", "a.runs.jsonl",
        "--time-limit", "1",
    )  # fmt: skip
    assert code == 0, err
    runs = read_runs("a.runs.jsonl")
    assert [one.status for one in runs] == ["done", "done"], [one.reason for one in runs]
    assert all(len(one.step_s) >= 5 and one.share is not None for one in runs)
