"""Tables of the agent's benchmark, by the rows alone."""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from benchmarks.agent.records import ADAPT, AGENT, RIVAL, BenchmarkRow, CaseInfo, Method
from benchmarks.agent.report import report
from benchmarks.agent.store import Store

BUDGETS = ("64 calls", "256 calls", "1024 calls", "4096 calls", "1 s", "5 s")
FAMILIES = ("inception", "dlrm", "gpt")


def build() -> Store:
    """Twelve cases of floor 1 where annealing reaches 0.9 and the agent 0.96 of that; a little noise a case."""
    store = Store({"set": "made up"})
    store.add_run({"processes": 1, "cores": 2, "load": 0.1, "cases": 12})
    for method in (Method("annealing", RIVAL), Method("seed0", AGENT), Method("seed1", AGENT), Method("seed0, adapted", ADAPT)):
        store.add_method(method)
    noise = 1e-4 * np.random.default_rng(0).normal(size=12)
    for number in range(12):
        name, family = f"case{number}", FAMILIES[number % 3]
        branchy, unseen = family != "gpt", number >= 6
        store.add_case(CaseInfo(name, family, "0" * 64, 4, 12, 2, branchy, unseen, 1.0, [0, 0, 1, 1], 0.1, 30))
        for budget in BUDGETS:
            for method, step in (("annealing", 0.9), ("seed0", 0.864 * (1 + noise[number])), ("seed1", 0.864)):
                store.add_row(BenchmarkRow(name, method, budget, 0, "ok", step, None, step, 64, 1.0, 0.5))
    return store


def put(store: Store, case: str, method: str, budget: str, step: float | None, violation: str | None = None) -> None:
    store.add_row(BenchmarkRow(case, method, budget, 0, "ok" if step else "infeasible", step, violation, step, 64, 1.0, 0.5))


def test_adapting_stands_beside_annealing_and_the_best_known() -> None:
    store = build()
    put(store, "case0", "annealing", "30 s", 0.85)
    put(store, "case0", "seed0, adapted", "30 s", 0.84)
    put(store, "case1", "annealing", "30 s", 0.85)
    put(store, "case1", "seed0, adapted", "30 s", 0.86)
    put(store, "case1", "seed0", "5 s", 0.5, "not feasible")
    text = report(store)
    assert "| case0 | 0.8500 | 0.8400 | 0.8400 |" in text and "| case1 | 0.8500 | 0.8600 | 0.8500 |" in text
    assert "| agent seed1 |" in text and "12 of 12 cases" in text and "case2" not in text


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
