"""``rlplace compare``: tables, JSON, CSV, resuming, Ctrl-C."""

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

import pytest

from rlplace.placement import get_planner
from rlplace.problem import Problem
from rlplace.problem.generate import random_problem
from rlplace.simulator import simulate
from tests.cli import command

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
    block = out[out.index("  step ms") :].split(problems[1])[0].splitlines()[1:]
    rows = {words[-10]: words for words in (line.split() for line in block) if len(words) >= 10}
    problem, best = Problem.load(problems[0]), float(rows["best"][-9])
    for name in ("best", "single", "heft"):  # as every planner's plan is when it is simulated by itself
        plan = get_planner(name)(problem)
        step_s = simulate(problem, plan.device_of_group, priority=plan.priority).step_time_s
        assert rows[name][-9] == f"{1e3 * step_s:.3f}"
        assert float(rows[name][-6]) == pytest.approx(1e3 * step_s / best, abs=2e-4)


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
    import rlplace.model.capture.capture as capture

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
