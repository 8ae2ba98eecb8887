"""The agent's benchmark: rows are made from the floor, checked by a simulation of their own, never made twice; its tables."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from benchmarks import ils
from benchmarks.agent import measure, methods, race, tables
from benchmarks.agent.__main__ import main
from benchmarks.agent.measure import Job, check, floor_of, random_cases, run_row
from benchmarks.agent.records import ABLATION, AGENT, RIVAL, BenchmarkRow, Budget, CaseInfo, Method, Store
from rlplace.errors import InfeasibleError, InputError
from rlplace.placement import get_planner
from rlplace.placement.common import groupgraph
from rlplace.placement.common.evaluate import count_calls
from rlplace.placement.simple import random_plans
from rlplace.plan import make_plan
from rlplace.plan.prediction import Prediction
from rlplace.simulator import Simulator, lowering, simulate

ROOT = Path(__file__).parents[2]
CASE = random_cases(1)[0]
CALLS = Budget("calls", 32)


@pytest.fixture(scope="module")
def info() -> CaseInfo:
    return floor_of(CASE)


def test_the_floor_is_the_plan_of_best(info: CaseInfo) -> None:
    assert info.floor is not None and simulate(CASE.problem, info.floor).step_time_s == info.floor_s


@pytest.mark.parametrize("name", [*methods.RIVALS, "local_search,tries=6", "race,least=1", "race,least=1,search=local_search"])
def test_searches_start_from_the_floor_and_keep_to_their_calls(info: CaseInfo, name: str) -> None:
    row = run_row(Job(info, CASE.problem, methods.rival(name), CALLS, 1))
    assert row.status == "ok" and row.violation is None
    assert row.step_time_s is not None and info.floor_s is not None and row.step_time_s <= info.floor_s
    assert row.calls == 33  # the start is simulated once more, in no budget
    assert run_row(Job(info, CASE.problem, methods.rival(name), CALLS, 1)).step_time_s == row.step_time_s


def test_the_race_is_annealing_from_the_one_start_that_is_left_by_short_runs_from_all(monkeypatch: pytest.MonkeyPatch) -> None:
    starts, began = race.starts_of(CASE.problem), []
    run = race.run

    def watched(search: Any, start: Any, *rest: Any) -> Any:
        before = search.budget.used
        found = run(search, start, *rest)
        began.append((start.devices.tobytes(), found, search.budget.used - before))
        return found

    monkeypatch.setattr(race, "run", watched)
    floor = starts[0].devices
    place = methods.place_of(methods.rival("race,most=4,share=0.5"))
    with count_calls() as counter:
        plan = place(CASE.problem, seed=0, start=floor, calls=400)
    assert counter.calls == 401
    assert [calls for *_, calls in began] == [25, 25, 25, 25, 50, 50, 200]
    assert [start for start, *_ in began[:4]] == [answer.devices.tobytes() for answer in starts[:4]]
    ranked = sorted((found for _, found, _ in began[:4]), key=lambda found: found.score.objective_s)
    assert [start for start, *_ in began[4:6]] == [found.devices.tobytes() for found in ranked[:2]]
    assert began[6][0] in [found.devices.tobytes() for _, found, _ in began[4:6]]
    assert plan.predicted.step_time_s == began[6][1].score.step_time_s <= min(found.score.step_time_s for _, found, _ in began)
    began.clear()
    place(CASE.problem, seed=0, start=floor, calls=20)  # too few for runs of 16 calls: annealing alone
    assert [calls for *_, calls in began] == [20]


def test_starts_of_the_race_are_those_of_the_one_shot_planners_and_cost_no_calls() -> None:
    with count_calls() as counter:
        starts = race.starts_of(random_cases(2)[1].problem)
    steps = [answer.score.objective_s for answer in starts]
    assert (
        counter.calls == 0 and steps == sorted(steps) and len({answer.devices.tobytes() for answer in starts}) == len(steps) > 2
    )
    best = get_planner("best")(random_cases(2)[1].problem)
    assert steps[0] == best.predicted.step_time_s


def test_iterated_local_search_kicks_the_best_plan_and_harder_each_time_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    kicks, kick = [], ils.kick

    def watched(search: Any, moves: Any, count: int) -> Any:
        assert search.score.step_time_s == simulate(CASE.problem, search.assignment).step_time_s
        assert search.score.objective_s == search.best_score.objective_s
        kicks.append((count, search.best_score.objective_s))
        return kick(search, moves, count)

    monkeypatch.setattr(ils, "kick", watched)
    worst = np.zeros(CASE.problem.num_groups, dtype=np.int32)
    methods.place_of(methods.rival("ils,kick=3,tries=2,random_tries=2"))(CASE.problem, seed=0, start=worst, calls=1000)
    pairs = list(itertools.pairwise(kicks))
    assert all(now == (1 if now_s < before_s else before % 3 + 1) for (before, before_s), (now, now_s) in pairs)
    assert {count for count, _ in kicks} == {1, 2, 3} and len({step_s for _, step_s in kicks}) > 2


def test_random_search_is_the_best_of_the_start_and_so_many_samples() -> None:
    worst = np.zeros(CASE.problem.num_groups, dtype=np.int32)
    simulator = Simulator(CASE.problem)
    steps = [simulator.evaluate(plan)[0] for plan in (worst, *random_plans.candidates(CASE.problem, 5, samples=40))]
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
    found = check(tight, make_plan(tight, devices, planner="x", seed=0, predicted=Prediction(step_s)))[1]
    assert found is not None and found.startswith("not feasible")


def test_what_goes_wrong_stands_in_the_row(info: CaseInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    def place(problem: Any, **options: Any) -> Any:
        raise errors[0]

    monkeypatch.setattr(measure, "_warm", lambda method: place)
    errors: list[Exception] = [InfeasibleError("device 0 is 5 bytes short")]
    job = Job(info, CASE.problem, Method("broken", RIVAL), CALLS, 0)
    row = run_row(job)
    assert (row.status, row.violation, row.step_time_s) == ("infeasible", "no plan: device 0 is 5 bytes short", None)
    errors[0] = KeyError("x")
    row = run_row(job)
    assert (row.status, row.violation) == ("failed", "KeyError: 'x'")


def test_every_row_has_a_problem_of_its_own_with_what_the_floor_derived(info: CaseInfo) -> None:
    own = measure.after_floor(CASE.problem, np.array(info.floor, dtype=np.int32))
    assert own is not CASE.problem
    assert own.fingerprint == dataclasses.replace(own).fingerprint
    assert own in lowering.lower.results and own in groupgraph.group_graph.results


def test_budgets() -> None:
    assert [str(Budget.parse(text)) for text in ("64", "64 calls", "1s", "0.5 s")] == ["64 calls", "64 calls", "1 s", "0.5 s"]
    assert Budget.parse("256").arguments == {"calls": 256} and Budget.parse("5s").arguments == {"time_limit_s": 5.0}
    for text in ("", "calls", "-1", "0", "1.5", "nan", "5 m"):
        with pytest.raises(InputError, match="budget"):
            Budget.parse(text)


def test_the_command_makes_no_row_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--out", str(tmp_path / "rows.jsonl"), "--set", "random", "--agents", "", "--methods", "annealing,random"]
    words += ["--cases", "random-0,random-1", "--seeds", "2"]
    assert main([*words, "--budgets", "8"]) == 0
    first = (tmp_path / "rows.jsonl").read_text()
    assert main([*words, "--budgets", "8"]) == 0
    assert (tmp_path / "rows.jsonl").read_text() == first
    assert main([*words, "--budgets", "8,16"]) == 0
    assert (tmp_path / "rows.jsonl").read_text().startswith(first)
    rows = Store({}, tmp_path / "rows.jsonl", report=True).rows
    assert len(rows) == 16 and {key[2] for key in rows} == {"8 calls", "16 calls"}
    capsys.readouterr()
    assert main([*words[:2], "--report"]) == 0
    assert "| over the floor, all, 2 cases | 8 calls | 16 calls |" in capsys.readouterr().out
    assert main([*words, "--budgets", "x"]) == 2 and "error: budget 'x'" in capsys.readouterr().err


def filled(path: Path | None = None) -> Store:
    """Returns twelve cases of floor 1 where annealing reaches 0.9 and the agent 0.96 of that; a little noise a case."""
    store = Store({"set": "made up"}, path)
    for method in (Method("annealing", RIVAL), Method("seed0", AGENT, "runs/seed0", "2" * 64), Method("seed1", AGENT)):
        store.add(method)
    noise = 1e-4 * np.random.default_rng(0).normal(size=12)
    for number in range(12):
        family = ("inception", "dlrm", "gpt")[number % 3]
        case = CaseInfo(f"case{number}", family, "0" * 64, family != "gpt", number >= 6, 1.0, [0, 0, 1, 1], 0.1)
        store.add(case)
        for budget in ("64 calls", "5 s"):
            for method, step in (("annealing", 0.9), ("seed0", 0.864 * (1 + noise[number])), ("seed1", 0.864)):
                store.add(row(case.name, method, step, budget))
    return store


def row(case: str, method: str, step: float | None, budget: str = "64 calls", seed: int = 0, wrong: str | None = None):
    return BenchmarkRow(case, method, budget, seed, "ok" if step else "infeasible", step, wrong, 64, 1.0, 0.5)


def test_the_tables() -> None:
    store = filled()
    store.add(row("case0", "annealing", 0.5))
    store.add(row("case1", "annealing", 0.9 * 0.96))
    text = tables.report(store)
    assert "| annealing | 10 / 1 / 1 | 12 / 0 / 0 |" in text  # faster, level, slower: 64 calls, 5 s
    store.add(row("case3", "seed1", 0.5, wrong="not feasible: device 0 is 5 bytes over"))
    store.add(row("case4", "seed1", 1.1))
    text = tables.report(store)
    assert "| agent | 48 | 1 | 1 | 1.000 s, 64/s |" in text and "| agent seed0 | 24 | 0 | 0 |" in text
    assert "| over annealing, gpt, 4 cases | 64 calls | 5 s |\n| --- | --- | --- |\n| agent | 0.9600 [" in text
    assert "| over annealing, unseen clusters, 6 cases |" in text and "12 cases, 12 with a floor" in text


def test_the_agent_over_the_best_rival_of_each_budget() -> None:
    store = filled()
    for name, role in (("race", RIVAL), ("few", RIVAL), ("untrained", ABLATION)):
        store.add(Method(name, role))
    for case in store.cases:
        for budget, race_s in (("64 calls", 0.95), ("5 s", 0.88)):
            store.add(row(case, "race", race_s, budget))
            store.add(row(case, "untrained", 0.5, budget))
    store.add(row("case0", "few", 0.5))  # a rival on fewer cases is not the best one
    whole, branchy, _ = tables.rival_tables(store, ["64 calls", "5 s"])
    assert whole.startswith("| the agent over, all, 12 cases | 64 calls | 5 s |") and "branchy, 8 cases" in branchy
    line = re.search(r"\| the best rival \| (\S+) \[.*\] annealing \| (\S+) \[.*\] race \|", whole)
    assert line is not None
    assert [float(ratio) for ratio in line.groups()] == pytest.approx([0.864 / 0.9, 0.864 / 0.88], abs=1e-4)
    assert "| ablation: untrained | 1.728" in whole and "| few | 1.72" in whole


def test_seeds_weigh_alike_within_a_method_and_methods_within_a_case() -> None:
    rows = [
        row("a", "one", 1.0), row("a", "one", 4.0, seed=1), row("a", "two", 8.0), row("a", "other", 1e-9),
        row("a", "one", None, seed=2, wrong="no plan"), row("a", "one", 1e-9, seed=3, wrong="not feasible"),
        row("a", "one", 1e-9, "256 calls"),
    ]  # fmt: skip
    assert math.exp(tables.log_steps(rows, ["one", "two"], "64 calls")["a"]) == pytest.approx(4.0)


def test_the_file_reads_back_also_after_a_cut_and_refuses_damage(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    written = filled(path)
    with path.open("a") as file:
        file.write('{"row": {"case": "case0", "met')
    read = Store({"set": "made up"}, path)
    assert (read.cases, read.methods, read.rows) == (written.cases, written.methods, written.rows)
    assert read.done(("case0", "seed0", "5 s", 0)) and not read.done(("case0", "seed0", "5 s", 1))
    read.add(replace(row("case0", "seed0", None, seed=1), status="failed"))
    assert not read.done(("case0", "seed0", "64 calls", 1))
    lines = path.read_text().splitlines()
    for number, line, words in (
        (3, "{", "line 4: not valid JSON"),
        (3, json.dumps({"plan": {}}), "line 4: expected one of case"),
        (5, json.dumps({"row": {"case": "a"}}), "line 6: key"),
        (5, lines[5].replace('"case": "case0"', '"case": "b"'), "line 6: its case 'b'"),
        (0, lines[0].replace("agent_benchmark", "plan"), "expected format"),
    ):
        path.write_text("\n".join([*lines[:number], line, *lines[number + 1 :]]) + "\n")
        with pytest.raises(InputError, match=words):
            Store({"set": "made up"}, path)


def test_other_settings_weights_and_problems_are_refused(tmp_path: Path) -> None:
    store = filled(tmp_path / "rows.jsonl")
    with pytest.raises(InputError, match="made with set 'made up', now 'test'"):
        Store({"set": "test"}, tmp_path / "rows.jsonl")
    before = (tmp_path / "rows.jsonl").read_bytes()
    for name, change in (
        ("seed0", {"fingerprint": "4" * 64}),
        ("seed0", {"options": {"samples": 8}}),
        ("seed0", {"role": RIVAL}),
    ):
        with pytest.raises(InputError, match="use another --out"):
            store.add(replace(store.methods[name], **change))
    store.add(replace(store.methods["seed0"], checkpoint="elsewhere/with/the/same/weights"))
    with pytest.raises(InputError, match="use another --out"):
        store.add(replace(store.cases["case0"], fingerprint="5" * 64))
    assert (tmp_path / "rows.jsonl").read_bytes() == before
