"""Whole strategies as rows of a comparison."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from rlplace.cluster import Cluster
from rlplace.explanation.compare.records import TASKS, Settings
from rlplace.explanation.compare.rows import STRATEGIES, strategy_row
from rlplace.explanation.compare.run import problem_info
from rlplace.problem.generate import random_problem
from rlplace.strategy.executor.evaluate import DraftEvaluator
from rlplace.strategy.search.tries import SearchProblem
from tests.strategy.random_costs import random_costs

PROBLEM = random_problem(0, 4, 4)
INFO = problem_info(PROBLEM, "m", "c", view=TASKS)


def rows_on(cluster: Cluster, calls: int) -> dict:
    costs = random_costs(np.random.default_rng(3), cluster, 12)
    question = SearchProblem(DraftEvaluator(costs, cluster), 16)
    settings = Settings(calls=calls)
    return {name: strategy_row(name, INFO, PROBLEM, question, settings, strict=True) for name in STRATEGIES}


@pytest.mark.slow
def test_every_kind_is_asked_for_the_same_batch_under_the_same_budget() -> None:
    rows = rows_on(Cluster.preset("a100-80g:4"), 4000)
    assert all(row.samples_per_s * row.step_time_s == pytest.approx(16) for row in rows.values())
    assert all(0 < row.simulator_calls <= 4000 for row in rows.values())
    steps = {name: row.step_time_s for name, row in rows.items()}
    assert min(steps, key=steps.get) in ("strategy", "best uniform")
    assert steps["strategy"] <= steps["best uniform"] <= min(steps[name] for name in STRATEGIES[2:])
    words = {name: row.reason for name, row in rows.items()}
    assert words["one device"].startswith("one device")
    assert "replicas" in words["data parallel"] and "fully sharded" not in words["data parallel"]
    assert "fully sharded over" in words["fully sharded"] and "pipeline stages" in words["pipeline"]
    assert "tensor parallel" in words["tensor parallel"] and rows["tensor parallel"].replicas == 1


@pytest.mark.slow
def test_what_does_not_fit_says_how_much_is_missing() -> None:
    cluster = Cluster.preset("a100-80g:4")
    devices = tuple(dataclasses.replace(device, memory_bytes=device.reserved_bytes + 1) for device in cluster.devices)
    rows = rows_on(dataclasses.replace(cluster, devices=devices, text=None), 4000)
    assert {row.status for row in rows.values()} == {"infeasible"}
    assert all(row.step_time_s is None and "too large by" in row.reason for row in rows.values())
