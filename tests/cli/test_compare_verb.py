"""``rlplace compare`` and ``finetune``: tables, JSON, CSV, resuming, Ctrl-C, a live campaign under a real torchrun."""

from __future__ import annotations

import csv
import functools
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import command
import pytest
from launch import forked, start

from rlplace.agents.checkpoint import load_checkpoint
from rlplace.cli.main import main
from rlplace.measured.store import TrialStore
from rlplace.problem.generate import random_problem

QUICK = ["--planners", "single,heft,annealing", "--calls", "16"]


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    folder = tmp_path_factory.mktemp("problems")
    paths = []
    for seed in range(3):
        paths.append(str(folder / f"p{seed}.problem.json"))
        random_problem(seed, 8 + seed, 2 + seed % 2, memory_factor=(None, 1.7, 2.0)[seed]).save(paths[-1])
    return paths


def run(capsys, *arguments):
    return command.run(capsys, "compare", *arguments)


def test_json_holds_rows_problems_and_summaries(capsys, problems):
    code, out, err = run(capsys, *problems, *QUICK, "--seeds", 2, "--json")
    data = json.loads(out)
    assert code == 0 and data["format"] == "rlplace.comparison" and data["executor"] == "list" and data["complete"]
    assert len(data["problems"]) == 3 and len(data["rows"]) == 12 and data["settings"]["calls"] == 16
    assert [line["planner"] for line in data["summaries"]] == ["best", "single", "heft", "annealing"]
    assert {row["view"] for row in data["rows"]} == {"tasks"}
    assert all(row["seeds"] == (2 if row["planner"] == "annealing" else 1) for row in data["rows"])
    assert "heft" in err and out.count("\n") == 1
    steps = {(row["model"], row["planner"]): row["step_time_s"] for row in data["rows"]}
    for path in problems:
        assert steps[path, "annealing"] <= steps[path, "best"] <= steps[path, "heft"]


def test_the_table_names_executor_metric_budget_and_seeds(capsys, problems):
    code, out, _ = run(capsys, *problems, *QUICK)
    assert code == 0
    assert "all problems, makespan of one step" in out and "executor list" in out
    assert "16 simulator calls after the floor" in out and "a tie is within 0.1 %" in out
    assert "seed 0: annealing" in out and "no seed, run once: best, single, heft" in out
    assert re.search(r"infeasible: single found no plan", out)


def test_csv_has_a_line_a_row(capsys, problems, tmp_path):
    path = tmp_path / "rows.csv"
    code, out, _ = run(capsys, *problems[:2], *QUICK, "--csv", path, "--json")
    rows = list(csv.DictReader(io.StringIO(path.read_text())))
    data = json.loads(out)["rows"]
    assert code == 0 and len(rows) == len(data) == 8
    for line, row in zip(rows, data, strict=True):
        assert line["planner"] == row["planner"] and line["model"] == row["model"] and float(line["work_s"]) > 0
        assert line["step_time_s"] == ("" if row["step_time_s"] is None else repr(row["step_time_s"]))
        assert json.loads(line["settings"])["calls"] == 16 and len(line["fingerprint"]) == 64


def test_a_model_is_captured_once_for_all_clusters(capsys, monkeypatch, tmp_path):
    import rlplace.graph.capture as capture

    seen = []
    whole = capture.capture
    monkeypatch.setattr(capture, "capture", lambda *a, **k: seen.append(k["name"]) or whole(*a, **k))
    arguments = ["zoo:mlp", "--batch", 16, "--granularity", 8, "--cluster", "a100-80g:2", "--cluster", "t4:2,pcie"]
    code, out, _ = run(capsys, *arguments, "--planners", "heft", "--json")
    data = json.loads(out)
    assert code == 0 and len(seen) == 1
    assert [info["cluster"] for info in data["problems"]] == ["a100-80g:2", "t4:2,pcie"]
    assert len({info["fingerprint"] for info in data["problems"]}) == 2 and len(data["rows"]) == 4


def test_resume_goes_on_and_refuses_what_differs(capsys, problems, tmp_path):
    path = tmp_path / "rows.jsonl"
    assert run(capsys, problems[0], *QUICK, "--out", path)[0] == 0
    first = path.read_text()
    code, _, err = run(capsys, problems[0], *QUICK, "--out", path)
    assert code == 2 and "--resume" in err and path.read_text() == first
    code, out, err = run(capsys, *problems[:2], *QUICK, "--out", path, "--resume", "--json")
    assert code == 0 and "4 rows are there already" in err and f"{problems[0]} on" not in err
    assert path.read_text().startswith(first) and len(json.loads(out)["rows"]) == 8
    code, _, err = run(capsys, problems[0], "--planners", "heft", "--calls", "17", "--out", path, "--resume")
    assert code == 2 and "made with calls 16, now 17" in err
    random_problem(77, 9, 2).save(problems[0])
    code, _, err = run(capsys, problems[0], *QUICK, "--out", path, "--resume")
    assert code == 2 and "was another problem" in err and err.count("\n") == err.count("rows are there") + 1


def test_a_model_that_fails_does_not_end_the_comparison(capsys):
    arguments = ["zoo:mlpp", "zoo:mlp", "--batch", 16, "--granularity", 4, "--cluster", "cpu:2", "--planners", "best", "--json"]
    code, out, err = run(capsys, *arguments)
    data = json.loads(out)
    assert code == 2 and "did you mean 'mlp'" in err and "zoo:mlpp on cpu:2" in err
    assert [row["model"] for row in data["rows"]] == ["zoo:mlp"] and not data["complete"]


def test_no_bar_where_there_is_no_terminal(capsys, problems):
    _, _, err = run(capsys, problems[1], *QUICK)
    assert "\r" not in err and "%|" not in err


def test_a_bar_on_a_terminal(capsys, problems, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    code, out, err = run(capsys, problems[1], *QUICK, "--json")
    assert code == 0 and "0/4" in err and "%|" in err and "\r" in err and json.loads(out)


@pytest.mark.slow
def test_interrupting_keeps_what_was_done(problems, tmp_path):
    path = tmp_path / "rows.jsonl"
    command = [sys.executable, "-m", "rlplace", "compare", *problems[1:], "--planners", "heft,annealing", "--time-limit", "60"]
    child = subprocess.Popen(
        [*command, "--out", str(path), "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # a background job inherits SIG_IGN
    )  # fmt: skip
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and not (path.exists() and '"heft"' in path.read_text()):
        time.sleep(0.05)
    time.sleep(0.5)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=300)
    assert child.returncode == 130 and "--resume goes on" in err and "Traceback" not in err
    data = json.loads(out)
    assert not data["complete"] and [row["planner"] for row in data["rows"]] == ["best", "heft"]
    assert '"heft"' in path.read_text()


EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "finetune"
MODEL = "zoo:moe_toy,width=64,layers=2,experts=4"
LIVE = [MODEL, "--batch", "8", "--granularity", "12", "--cluster", "lab.toml", "--replay", "lab_true.toml", "--repeats", "2"]
LIVE += ["--calls", "256", "--fit-steps", "40", "--rehearse", "1", "--measurements", "m.sqlite", "--out", "tuned"]


def launch(folder):
    """A live campaign on three processes; returns the running job."""
    for name in ("lab.toml", "lab_true.toml"):
        (folder / name).write_text((EXAMPLES / name).read_text())
    return start(3, "-m", "rlplace", "finetune", *LIVE, "--plans", 6, cwd=folder, start_new_session=True)


def measured(path):
    if not path.exists():
        return []
    with TrialStore(path) as store:
        return store.trials(include_running=True)


@pytest.mark.slow
def test_a_campaign_is_interrupted_goes_on_and_teaches(tmp_path, capsys, monkeypatch):
    path = tmp_path / "m.sqlite"
    job = launch(tmp_path)
    try:
        deadline = time.monotonic() + 600
        while len([trial for trial in measured(path) if trial.timed]) < 3 and time.monotonic() < deadline:
            time.sleep(0.3)
        os.killpg(job.pid, signal.SIGINT)
        _, err = job.communicate(timeout=600)
    finally:
        job.kill()
    assert "the same command goes on from there" in err, err
    before = measured(path)
    assert len(before) >= 3 and all(trial.timed for trial in before)  # nothing was lost, nothing is half done

    words = [*LIVE, "--plans", "6", "--json", "--report", "report.md", "--best-plan", "best.plan.json"]
    code, out, err = forked(3, "-m", "rlplace", "finetune", *words, cwd=tmp_path)
    assert code == 0, err
    found = json.loads("".join(out))
    trials = measured(path)
    assert trials[: len(before)] == before
    own = [trial for trial in trials if not trial.anchor]
    assert len(own) == 6 == found["plans"] and len({trial.device_of_group for trial in own}) == 6
    assert set(found["device_factors"]) == {*"abc"}  # what they are is a matter of time, and found on its own clock elsewhere
    assert found["best_step_s"] <= found["untuned_step_s"] * 1.1
    assert json.loads((tmp_path / "best.plan.json").read_text())["placement"]["device_of_group"] == found["device_of_group"]
    assert "error of predicted step times" in (tmp_path / "report.md").read_text()
    tuned = load_checkpoint(tmp_path / "tuned")
    assert [line["name"] for line in tuned.training["lineage"]] == ["default"]

    monkeypatch.chdir(tmp_path)
    words = ["--measurements", "m.sqlite", "--agent", "tuned", "--out", "again", "--fit-steps", "40"]
    assert main(["finetune", *words, "--rehearse", "1", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["plans"] == 6 and again["rehearsed_cases"] == 1
    assert [line["name"] for line in load_checkpoint(tmp_path / "again").training["lineage"]] == ["default", "tuned"]
    assert main(["finetune", *words[:2], "--agent", "tuned", "--out", "tuned"]) == 2
    assert "give the new one another folder" in capsys.readouterr().err
