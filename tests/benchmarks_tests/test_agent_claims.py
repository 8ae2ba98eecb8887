"""What is claimed of the agent holds or does not, by the rows alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from benchmarks.agent.claims import best_known, findings, verdicts
from benchmarks.agent.records import ADAPT, AGENT, RIVAL, BenchmarkRow, CaseInfo, Method
from benchmarks.agent.report import report
from benchmarks.agent.store import Store

BUDGETS = ("64 calls", "256 calls", "1024 calls", "4096 calls", "1 s", "5 s")
FAMILIES = ("inception", "dlrm", "gpt")


def build(agent: dict[str, float] | float = 0.96, **change: Any) -> Store:
    """Twelve cases of floor 1 where annealing reaches 0.9 and the agent so much of that; a little noise a case."""
    store = Store({"set": "made up"})
    store.add_run({"processes": 1, "cores": 2, "load": 0.1, "cases": 12})
    for method in (Method("annealing", RIVAL), Method("seed0", AGENT), Method("seed1", AGENT), Method("seed0, adapted", ADAPT)):
        store.add_method(method)
    noise = 1e-4 * np.random.default_rng(0).normal(size=12)
    for number in range(12):
        name, family = f"case{number}", FAMILIES[number % 3]
        branchy, unseen = family != "gpt", number >= 6
        store.add_case(CaseInfo(name, family, "0" * 64, 4, 12, 2, 1, "list", branchy, unseen, 1.0, [0, 0, 1, 1], 0.1, 30))
        for budget in BUDGETS:
            ratio = agent if isinstance(agent, float) else agent.get(f"{family} {budget}", agent.get(budget, 0.96))
            for method, step in (("annealing", 0.9), ("seed0", 0.9 * ratio * (1 + noise[number])), ("seed1", 0.9 * ratio)):
                store.add_row(BenchmarkRow(name, method, budget, 0, "ok", step, None, step, 64, 1.0, 0.5))
    for key, value in change.items():
        setattr(store, key, value)
    return store


def put(store: Store, case: str, method: str, budget: str, step: float | None, violation: str | None = None) -> None:
    store.add_row(BenchmarkRow(case, method, budget, 0, "ok" if step else "infeasible", step, violation, step, 64, 1.0, 0.5))


def test_everything_holds_where_the_agent_is_four_per_cent_ahead() -> None:
    verdict = verdicts(findings(build()))
    assert verdict == {"a": True, "b": True, "c": True, "d": True, "e": True, "f": None}


def test_one_violation_is_one_too_many() -> None:
    store = build()
    put(store, "case3", "seed1", "64 calls", 0.5, "not feasible: device 0 is 5 bytes over")
    assert verdicts(findings(store))["a"] is False
    store = build()
    put(store, "case3", "seed1", "64 calls", None, "no plan: out of luck")
    assert verdicts(findings(store))["a"] is False


def test_worse_than_the_floor_by_a_millionth() -> None:
    store = build()
    put(store, "case0", "seed0", "5 s", 1.000001)
    assert verdicts(findings(store))["a"] is False
    put(store, "case0", "seed0", "5 s", 1.0)
    assert verdicts(findings(store))["a"] is True


def test_ahead_by_less_than_three_per_cent_is_not_three() -> None:
    assert verdicts(findings(build({"64 calls": 0.9702})))["b"] is False
    assert verdicts(findings(build({"64 calls": 0.9698})))["b"] is True


def test_a_single_family_that_is_worse_breaks_b_alone() -> None:
    found = findings(build({"gpt 256 calls": 1.0005}))
    assert verdicts(found) == {"a": True, "b": False, "c": True, "d": True, "e": True, "f": None}
    (line,) = [item for item in found if item.holds is False]
    assert "worse than annealing on 1 of 3 families, 1 of them with the whole interval" in line.text and "gpt" in line.text


@pytest.mark.parametrize(("budget", "claim"), [("1024 calls", "c"), ("4096 calls", "c"), ("1 s", "d"), ("5 s", "d")])
def test_overall_and_branchy_at_large_budgets(budget: str, claim: str) -> None:
    assert verdicts(findings(build({budget: 1.003})))[claim] is False
    level = findings(build({budget: 1.001}))
    assert verdicts(level)[claim] is False  # not worse overall, but not better on branchy models either
    assert [item.holds for item in level if item.claim == claim and item.text.startswith(budget)] == [True, False]
    assert verdicts(findings(build({budget: 0.99})))[claim] is True


def test_every_classical_search_counts_at_large_budgets() -> None:
    store = build()
    store.add_method(Method("brkga", RIVAL))
    for number in range(12):
        put(store, f"case{number}", "brkga", "1 s", 0.8)
    verdict = verdicts(findings(store))
    assert (verdict["c"], verdict["d"]) == (None, False)


def test_unseen_clusters_alone() -> None:
    store = build()
    for number in range(6, 12):
        for method in ("seed0", "seed1"):
            put(store, f"case{number}", method, "4096 calls", 0.91)
    assert verdicts(findings(store))["e"] is False


def test_adapting_by_the_share_and_where_something_is_left_to_find() -> None:
    store = build()
    for number in range(10):
        put(store, f"case{number}", "annealing", "30 s", 0.85)
        put(store, f"case{number}", "seed0, adapted", "30 s", 0.84 if number < 9 else 0.87)
    assert verdicts(findings(store))["f"] is True
    assert best_known(store)["case0"] == 0.84 and best_known(store)["case9"] == 0.85
    put(store, "case8", "seed0, adapted", "30 s", 0.852)
    assert verdicts(findings(store))["f"] is False  # eight tenths
    for number in range(9):  # within the share, yet worse where annealing is still far from the best known
        put(store, f"case{number}", "seed0, adapted", "30 s", 0.8505)
    for number in range(9):
        put(store, f"case{number}", "seed0", "5 s", 0.7)
    found = [item for item in findings(store) if item.claim == "f"]
    assert [item.holds for item in found] == [True, False] and "9 instances" in found[1].text


def test_no_rows_are_no_claim() -> None:
    store = Store({"set": "made up"})
    assert set(verdicts(findings(store)).values()) == {None}
    store = build()
    store.rows = {key: row for key, row in store.rows.items() if row.method != "annealing"}
    assert verdicts(findings(store)) == {"a": True, "b": None, "c": None, "d": None, "e": None, "f": None}


def test_two_branchy_cases_have_no_interval_and_show_nothing() -> None:
    store = build()
    store.cases = {name: info for name, info in store.cases.items() if name in ("case0", "case1")}
    store.rows = {key: row for key, row in store.rows.items() if row.case in store.cases}
    assert verdicts(findings(store))["c"] is None


def test_report_names_every_verdict() -> None:
    text = report(build({"64 calls": 0.99}))
    for line in ("- (a) holds", "- (b) does not hold", "- (c) holds", "- (f) not measured"):
        assert line in text.splitlines()
    assert "| agent seed1 |" in text and "12 of 12 cases" in text


def test_counts_of_cases() -> None:
    store = build()
    put(store, "case0", "annealing", "64 calls", 0.5)
    put(store, "case1", "annealing", "64 calls", 0.9 * 0.96)
    assert "| annealing | 10 / 1 / 1 | 12 / 0 / 0 |" in report(store)


def test_runs_and_faults_by_method() -> None:
    store = build()
    put(store, "case3", "seed1", "64 calls", 0.5, "not feasible: device 0 is 5 bytes over")
    put(store, "case4", "seed1", "64 calls", 1.1)
    text = report(store)
    assert "| agent | 144 | 1 | 1 | 1.000 s, 64/s |" in text and "| agent seed0 | 72 | 0 | 0 |" in text


def test_one_rollout_counts_with_the_floor() -> None:
    store = build()
    for number, stage in ((0, 0.81), (1, 2.0), (2, 0.9)):
        row = store.rows[f"case{number}", "seed0", "64 calls", 0]
        store.add_row(replace(row, stages={"single_rollout": stage, "floor": 1.0}))
    mean = (0.81 * 1.0 * 0.9) ** (1 / 3)
    assert f"| agent | single rollout | {mean:.4f} [" in report(store)
