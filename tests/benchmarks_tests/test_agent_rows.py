"""Rows are made from the floor, checked by a simulation of their own, and never made twice."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.agent import jobs, measure, methods
from benchmarks.agent.__main__ import main
from benchmarks.agent.jobs import matrix, pick, spread
from benchmarks.agent.measure import Job, check, floor_of, run_row
from benchmarks.agent.records import ABLATION, ADAPT, RIVAL, Budget, CaseInfo, Method
from benchmarks.agent.sets import describe, random_cases
from benchmarks.agent.store import Store
from rlplace.errors import InfeasibleError, InputError
from rlplace.plan import make_plan
from rlplace.plan.prediction import Prediction
from rlplace.planners.common import groupgraph
from rlplace.planners.common.evaluate import count_calls
from rlplace.planners.random_plans import candidates
from rlplace.simulator import Simulator, lowering, simulate

CASE, _, PIPELINED = random_cases(3)


@pytest.fixture(scope="module")
def info() -> CaseInfo:
    return floor_of(describe(CASE), CASE.problem)


def test_the_floor_is_the_plan_of_best(info: CaseInfo) -> None:
    assert info.floor is not None and info.floor_calls > 10
    assert simulate(CASE.problem, info.floor).step_time_s == info.floor_s


@pytest.mark.parametrize("name", [*methods.RIVALS, "local_search,tries=6"])
def test_searches_start_from_the_floor_and_keep_to_their_calls(info: CaseInfo, name: str) -> None:
    row = run_row(Job(info, methods.rival(name), Budget("calls", 32), 1), CASE.problem)
    assert row.status == "ok" and row.violation is None and row.stated_s == row.step_time_s
    assert row.step_time_s is not None and info.floor_s is not None and row.step_time_s <= info.floor_s
    assert 0 < row.calls <= 33
    one = run_row(Job(info, methods.rival(name), Budget("calls", 32), 1), CASE.problem)
    assert one.step_time_s == row.step_time_s


def test_random_search_is_the_best_of_the_start_and_so_many_samples(info: CaseInfo) -> None:
    worst = np.zeros(CASE.problem.num_groups, dtype=np.int32)
    simulator = Simulator(CASE.problem)
    steps = [simulator.evaluate(plan)[0] for plan in (worst, *candidates(CASE.problem, 5, samples=40))]
    with count_calls() as counter:
        plan = methods.random_search(CASE.problem, seed=5, start=worst, calls=40)
    assert plan.predicted.step_time_s == min(steps) and counter.calls == 41


def test_a_plan_is_checked_against_what_it_says() -> None:
    devices = np.zeros(CASE.problem.num_groups, dtype=np.int32)
    step_s = simulate(CASE.problem, devices).step_time_s
    plan = make_plan(CASE.problem, devices, planner="x", seed=0, predicted=Prediction(step_s))
    assert check(CASE.problem, plan) == (step_s, None)
    for lie in (0.999 * step_s, None):
        found = check(CASE.problem, dataclasses.replace(plan, predicted=Prediction(lie)))[1]
        assert found is not None and "states a step" in found
    small = tuple(dataclasses.replace(device, memory_bytes=1) for device in CASE.problem.devices)
    tight = dataclasses.replace(CASE.problem, devices=small)
    full = make_plan(tight, devices, planner="x", seed=0, predicted=Prediction(step_s))
    found = check(tight, full)[1]
    assert found is not None and found.startswith("not feasible")


def test_what_goes_wrong_stands_in_the_row(info: CaseInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    def place(problem: Any, **options: Any) -> Any:
        raise errors[0]

    monkeypatch.setattr(measure, "_warm", lambda method: place)
    errors: list[Exception] = [InfeasibleError("device 0 is 5 bytes short")]
    job = Job(info, Method("broken", RIVAL), Budget("calls", 8), 0)
    row = run_row(job, CASE.problem)
    assert (row.status, row.violation, row.step_time_s) == ("infeasible", "no plan: device 0 is 5 bytes short", None)
    errors[0] = KeyError("x")
    row = run_row(job, CASE.problem)
    assert (row.status, row.violation) == ("failed", "KeyError: 'x'")


def test_agents_are_named_by_label_weights_and_options(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_checkpoint(name: str) -> SimpleNamespace:
        network = torch.nn.Linear(3, 2)
        torch.nn.init.constant_(network.weight, 1.0)
        torch.nn.init.constant_(network.bias, 1e-7 if name == "other" else 0.0)
        network.config = "3x2"
        return SimpleNamespace(network=network)

    monkeypatch.setattr("rlplace.agents.checkpoint.load_checkpoint", load_checkpoint)
    method = methods.learned("n1=runs/a,samples=1,untrained=1,heat=0.5,mode=fast", ABLATION)
    assert (method.name, method.role, method.checkpoint) == ("n1", ABLATION, "runs/a")
    assert method.options == {"samples": 1, "untrained": 1, "heat": 0.5, "mode": "fast"}
    assert method.fingerprint == methods.learned("b").fingerprint and len(method.fingerprint or "") == 64
    assert method.fingerprint != methods.learned("other").fingerprint
    assert (methods.learned("runs/a").name, methods.learned("x=runs/a", ADAPT).name) == ("a", "x, adapted")
    with pytest.raises(InputError, match="option=value"):
        methods.learned("default,samples")
    with pytest.raises(InputError, match="two methods are called a"):
        jobs.chosen_methods([], "a,runs/a", ())
    tuned = methods.rival("annealing,cooling=0.1,start_temperature=0")
    assert (tuned.name, tuned.options) == (
        "annealing cooling=0.1 start_temperature=0",
        {"cooling": 0.1, "start_temperature": 0},
    )


def test_comments_and_docstrings_are_no_program(tmp_path: Path) -> None:
    texts = (
        '"""A."""\ndef f():\n    return 1\n',
        '"""B."""\ndef f():\n    """C."""\n    return 1  # one\n',
        "def f():\n    return 2\n",
    )
    files = [tmp_path / f"{number}.py" for number in range(3)]
    for file, text in zip(files, texts, strict=True):
        file.write_text(text)
    first, second, third = (methods._bare(file) for file in files)
    assert first == second != third
    assert methods.code_fingerprint("agents") != methods.code_fingerprint("envs")
    assert methods.code_fingerprint("simulator") == methods.code_fingerprint("simulator")


def test_rows_are_asked_budget_by_budget_and_cases_are_picked_by_name() -> None:
    cases = random_cases(5)
    asked = matrix(cases, [methods.rival("annealing"), methods.rival("random")], "64,1s", seeds=2, agent_seeds=1)
    assert len(asked) == 40 and {str(budget) for _, _, budget, _ in asked[:20]} == {"64 calls"}
    assert pick(cases, "") == cases
    assert [case.name for case in pick(cases, "random-1,random-4")] == ["random-1", "random-4"]
    with pytest.raises(InputError, match="no case has such a name"):
        pick(cases, "nothing")


def test_instances_to_adapt_to_are_spread_over_the_families() -> None:
    cases = random_cases(12)
    chosen = spread(cases, 6)
    assert chosen == spread(list(reversed(cases)), 6) and len({case.name for case in chosen}) == 6
    assert sorted(case.family for case in chosen) == sorted(2 * ["random:branchy", "random:chain", "random:layered"])
    assert len(spread(cases, 99)) == 12


def test_the_command_makes_no_row_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--out", str(tmp_path / "rows.jsonl"), "--set", "random", "--agents", "", "--methods", "annealing,random"]
    words += ["--cases", "random-0,random-1", "--seeds", "2"]
    assert main([*words, "--budgets", "8"]) == 0
    first = (tmp_path / "rows.jsonl").read_text()
    assert "2 of 6 cases" in capsys.readouterr().out
    assert main([*words, "--budgets", "8"]) == 0
    assert (tmp_path / "rows.jsonl").read_text() == first
    assert main([*words, "--budgets", "8,16"]) == 0
    again = (tmp_path / "rows.jsonl").read_text()
    assert again.startswith(first)
    rows = Store.read(tmp_path / "rows.jsonl").rows
    assert len(rows) == 16 and {key[2] for key in rows} == {"8 calls", "16 calls"}
    capsys.readouterr()
    assert main([*words[:2], "--report"]) == 0
    assert "| over the floor, 2 cases | 8 calls | 16 calls |" in capsys.readouterr().out
    assert main([*words[:2], "--set", "validation", "--report", "--budgets", "x"]) == 0
    assert main([*words, "--budgets", "x"]) == 2 and "error: budget 'x'" in capsys.readouterr().err


def test_every_row_has_a_problem_of_its_own_with_what_the_floor_derived(info: CaseInfo) -> None:
    start = np.array(info.floor, dtype=np.int32)
    own = measure.after_floor(CASE.problem, start)
    assert own is not CASE.problem
    assert own.fingerprint == dataclasses.replace(own).fingerprint
    assert own in lowering.lower.results and own in groupgraph.group_graph.results


def test_curves_take_every_checkpoint_of_a_run_by_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("", "step_10", "step_20", "last"):
        (tmp_path / "run" / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / folder / "policy.safetensors").touch()
    steps = {"run": "20", "step_10": "10", "step_20": "20", "last": "30"}
    weights = dict(steps)

    def learned(text: str, role: str) -> Method:
        label, _, folder = text.partition("=")
        return Method(label, role, folder, weights[Path(folder).name])

    monkeypatch.setattr(jobs, "_trained", lambda folder: steps[folder.name])
    monkeypatch.setattr(jobs, "learned", learned)
    asked = jobs.curve(random_cases(2), f"seed0={tmp_path / 'run'}", "64", 1)
    assert sorted({method.name for _, method, *_ in asked}) == ["annealing", "seed0@10", "seed0@20", "seed0@30"]
    assert len(asked) == 8
    weights["step_20"] = "others"
    with pytest.raises(InputError, match="two checkpoints after equal steps"):
        jobs.curve(random_cases(2), f"seed0={tmp_path / 'run'}", "64", 1)
    with pytest.raises(InputError, match="holds no checkpoint"):
        jobs.curve(random_cases(2), f"seed0={tmp_path / 'nowhere'}", "64", 1)


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_two_processes_make_the_rows_that_one_makes(tmp_path: Path) -> None:
    words = ["--set", "random", "--agents", "", "--methods", "annealing,brkga", "--budgets", "32", "--seeds", "1"]
    files = [tmp_path / f"{processes}.jsonl" for processes in (1, 2)]
    assert main([*words, "--out", str(files[0]), "--processes", "1"]) == 0
    command = [sys.executable, "-m", "benchmarks.agent", *words, "--out", str(files[1]), "--processes", "2"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300, check=True)
    assert "| over the floor, 6 cases | 32 calls |" in done.stdout
    one, two = (Store.read(file) for file in files)
    assert {key: row.step_time_s for key, row in one.rows.items()} == {key: row.step_time_s for key, row in two.rows.items()}
    assert {name: info.floor for name, info in one.cases.items()} == {name: info.floor for name, info in two.cases.items()}
