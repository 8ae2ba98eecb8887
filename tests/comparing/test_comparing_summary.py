"""Summaries: geometric means over problems, wins and losses, intervals; metrics apart."""

import math

import numpy as np
import pytest

from rlplace.comparing import ComparisonRow
from rlplace.comparing.records import MAKESPAN, RATE, SPLIT, VIEWS
from rlplace.comparing.summary import References, summarize
from rlplace.means import interval


def row(problem, planner, step, *, metric=MAKESPAN, base=None, **changes):
    fields = {"samples": 8, "simulator_calls": 10.0, "seconds": 0.5, "gap": None, **changes}
    if step is None:
        return ComparisonRow(
            problem, "c", "tasks", planner, metric, "infeasible", "full", False, 1, 0, **{**fields, "samples": None}
        )
    ratio = None if base is None else step / base
    view = fields.pop("view", "tasks")
    return ComparisonRow(problem, "c", view, planner, metric, "ok", None, False, 1, 1, step_time_s=step, ratio=ratio, **fields)


def table(steps):
    """Rows of `best` and one other planner; None: no plan."""
    rows = []
    for number, (best, other) in enumerate(steps):
        rows.append(row(f"p{number}", "best", best, base=best))
        rows.append(row(f"p{number}", "other", other, base=best))
    return rows


def test_ratios_wins_and_losses():
    steps = [(1.0, 0.5), (1.0, 1.0009), (1.0, 2.0), (1.0, 1.0011), (2.0, None), (None, 3.0), (None, None)]
    best, other = summarize(table(steps), ["best", "other"])
    assert (other.problems, other.feasible, other.compared) == (7, 5, 4)
    assert (other.wins, other.ties, other.losses) == (1, 1, 2)
    assert (other.only_it, other.only_reference) == (1, 1)
    assert other.ratio == pytest.approx((0.5 * 1.0009 * 2.0 * 1.0011) ** 0.25)
    assert other.low < other.ratio < other.high and other.low >= 0.5 and other.high <= 2.0
    assert (best.ratio, best.ties, best.feasible, best.compared) == (1.0, 5, 5, 5)
    assert other.simulator_calls == 10.0 and other.seconds == 0.5


def test_no_interval_below_three_problems():
    assert summarize(table([(1.0, 2.0), (1.0, 3.0)]), ["best", "other"])[1].low is None
    assert interval([]) == (None, None) and interval([0.0, 0.0, 0.0]) == (1.0, 1.0)


def test_the_interval_is_that_of_the_mean_logarithm():
    logs = np.random.default_rng(1).normal(0.1, 0.3, 400)
    low, high = interval(logs)
    half = 1.96 * logs.std() / math.sqrt(400)
    assert math.log(low) == pytest.approx(logs.mean() - half, abs=0.1 * half)
    assert math.log(high) == pytest.approx(logs.mean() + half, abs=0.1 * half)
    assert interval(logs) == (low, high)


def test_gaps_have_a_mean_of_their_own():
    rows = [row("p0", "best", 1.0, base=1.0, gap=0.0), row("p1", "best", 1.0, base=1.0, gap=3.0)]
    assert summarize(rows, ["best"])[0].gap == pytest.approx(1.0)


def test_rows_without_a_plan_count_where_the_planner_usually_is():
    rows = [*table([(1.0, 1.0), (1.0, 1.0)]), row("p0", "piped", 4.0, metric=RATE, samples=32), row("p1", "piped", None)]
    lines = {(line.metric, line.planner): line for line in summarize(rows, ["best", "other", "piped"])}
    assert set(lines) == {(MAKESPAN, "best"), (MAKESPAN, "other"), (RATE, "piped")}
    piped = lines[RATE, "piped"]
    assert (piped.problems, piped.feasible, piped.only_reference) == (2, 1, 0)  # its rival there is unknown


def test_references_are_of_one_problem_metric_and_batch():
    rows = [
        row("p0", "best", 1.0), row("p1", "best", 2.0), row("p0", "best", 5.0, metric=RATE, samples=32, reference=True),
        row("p0", "best", 7.0, metric=MAKESPAN + VIEWS[SPLIT], view=SPLIT),
    ]  # fmt: skip
    against = References(rows)
    assert against.of(row("p1", "x", 1.0)) is rows[1]
    assert against.of(row("p0", "x", 1.0, metric=RATE, samples=32)) is rows[2]
    assert against.of(row("p0", "x", 1.0, metric=RATE, samples=64)) is None
    assert against.of(row("p0", "x", 1.0, metric=MAKESPAN + VIEWS[SPLIT], view=SPLIT)) is rows[3]
    assert [line.planner for line in summarize(rows, ["best"])] == ["best", "best"]  # a reference row has no line
