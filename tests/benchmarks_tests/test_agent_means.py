"""Geometric means, their intervals, and the groups of cases they are over."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.agent import means
from benchmarks.agent.records import BenchmarkRow, CaseInfo
from rlplace.means import interval


def info(
    name: str, *, family: str = "f", branchy: bool = False, microbatches: int = 1, floor_s: float | None = 1.0
) -> CaseInfo:
    return CaseInfo(
        name,
        family,
        "0" * 64,
        8,
        24,
        2,
        microbatches,
        "list",
        branchy,
        False,
        floor_s,
        None if floor_s is None else [0] * 8,
        0.1,
        9,
    )


def row(
    case: str, method: str, seed: int, step: float | None, *, budget: str = "64 calls", violation: str | None = None
) -> BenchmarkRow:
    return BenchmarkRow(case, method, budget, seed, "ok" if step else "infeasible", step, violation, step, 64, 0.1, 0.5)


def test_interval_covers_the_truth_as_often_as_it_says() -> None:
    rng, hits = np.random.default_rng(2), 0
    for number in range(100):
        low, high = interval(rng.normal(0.0, 0.1, 40), seed=number)
        assert low is not None and high is not None
        hits += low <= 1.0 <= high
    assert 87 <= hits <= 100


def test_interval_is_seeded_and_needs_three_cases() -> None:
    logs = np.random.default_rng(3).normal(size=20)
    assert interval(logs) == interval(logs)
    assert interval(logs, seed=1) != interval(logs)
    assert interval(logs[:2]) == (None, None)


def test_mean_ratio_is_over_the_cases_that_both_have() -> None:
    ours = {"a": math.log(2.0), "b": math.log(3.0), "c": math.log(5.0)}
    theirs = {"a": math.log(1.0), "b": math.log(6.0), "d": 0.0}
    mean = means.mean_ratio(ours, theirs, ["a", "b", "c", "d"])
    assert mean is not None and mean.count == 2 and mean.low is None
    assert mean.ratio == pytest.approx(1.0)
    assert means.mean_ratio(ours, theirs, ["c"]) is None


def test_seeds_weigh_alike_within_a_method_and_methods_within_a_case() -> None:
    rows = [
        row("a", "one", 0, 1.0),
        row("a", "one", 1, 4.0),
        row("a", "two", 0, 8.0),
        row("a", "one", 2, None, violation="no plan"),
        row("a", "one", 3, 1e-9, violation="not feasible"),
        row("a", "one", 4, 1e-9, budget="256 calls"),
        row("a", "other", 0, 1e-9),
    ]
    assert math.exp(means.log_steps(rows, ["one", "two"], "64 calls")["a"]) == pytest.approx(4.0)


def test_slices() -> None:
    cases = {
        "a": info("a", family="x", branchy=True),
        "b": info("b", family="y", microbatches=4, floor_s=None),
        "c": info("c", family="x"),
    }
    assert means.slices(cases) == {
        "all": ["a", "b", "c"],
        "branchy": ["a"],
        "chain-like": ["b", "c"],
        "one micro-batch": ["a", "c"],
        "several micro-batches": ["b"],
    }
    assert means.families(cases) == {"x": ["a", "c"], "y": ["b"]}
    assert means.log_floors(cases) == {"a": 0.0, "c": 0.0}
