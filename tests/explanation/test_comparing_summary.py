"""Summaries: geometric means over problems, wins and losses, intervals; views apart."""

import json
import math

import numpy as np
import pytest
from msgspec.structs import asdict, replace

from rlplace.errors import InputError
from rlplace.explanation.compare import ComparisonRow, ProblemInfo, Settings, Store
from rlplace.explanation.compare.records import SPLIT, summarize
from rlplace.records import build
from rlplace.stats import interval


def row(problem, planner, step, *, view="tasks", base=None, **changes):
    fields = {"simulator_calls": 10.0, "seconds": 0.5, "gap": None, **changes}
    if step is None:
        return ComparisonRow(problem, "c", view, planner, "infeasible", "full", False, 1, 0, **fields)
    ratio = None if base is None else step / base
    return ComparisonRow(problem, "c", view, planner, "ok", None, False, 1, 1, step_time_s=step, ratio=ratio, **fields)


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


def test_views_do_not_mix():
    rows = [*table([(1.0, 1.0), (1.0, 2.0)]), row("p0", "best", 7.0, view=SPLIT), row("p0", "split", 4.0, base=7.0, view=SPLIT),
            row("p1", "split", None, view=SPLIT)]  # fmt: skip
    lines = {(line.view, line.planner): line for line in summarize(rows, ["best", "other", "split"])}
    assert set(lines) == {("tasks", "best"), ("tasks", "other"), (SPLIT, "best"), (SPLIT, "split")}
    split = lines[SPLIT, "split"]
    assert (split.problems, split.feasible, split.only_reference) == (2, 1, 0)  # its rival there is unknown


INFO = ProblemInfo("m", "c", "tasks", "f" * 64, 8, 10, 30, 2, 0.1, 0.2, 0.05, 0.2, 1)


def stored(planner, step=0.5, **changes):
    return ComparisonRow("m", "c", "tasks", planner, "ok", None, False, 1, 1, step_time_s=step, **changes)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "rows.jsonl"


def filled(path):
    store = Store(Settings(calls=5), path)
    store.add_problem(INFO)
    store.add_row(stored("best"))
    store.add_row(stored("heft", 0.6))
    return store


def test_every_row_is_there_at_once(path):
    store = filled(path)
    for number in range(3):
        store.add_row(stored(f"planner{number}", 0.1 + 0.2))
        found = Store(Settings(calls=5), path, resume=True)
        assert found.rows == store.rows and found.problems == store.problems  # floats come back bit for bit


@pytest.mark.parametrize(
    ("field", "value"), [("calls", 6), ("calls", None), ("time_limit_s", 1.0), ("seeds", 2),
                         ("agent", "x"), ("version", "0.0.1")],
)  # fmt: skip
def test_other_settings_are_refused(path, field, value):
    filled(path)
    with pytest.raises(InputError, match=f"made with {field} "):
        Store(replace(Settings(calls=5), **{field: value}), path, resume=True)


def test_a_line_that_was_cut_off_is_dropped(tmp_path):
    path = tmp_path / "rows.jsonl"
    filled(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    store = Store(Settings(calls=5), path, resume=True)
    assert [r.planner for r in store.rows.values()] == ["best"]
    store.add_row(stored("heft", 0.6))
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: [lines[0], "{]", *lines[1:]], "line 2: not valid JSON"),
        (lambda lines: lines[1:], "expected format"),
        (lambda lines: [], "holds no rlplace.comparison"),
        (lambda lines: [lines[0], *lines[2:]], "is not in the file"),
        (lambda lines: [*lines, '{"rows": {}}'], "line 5: expected one of problem, row"),
        (lambda lines: [*lines, '{"row": {}}'], "is missing"),
        (lambda lines: [*lines[:3], lines[3].replace('"planner"', '"plannner"')], "did you mean 'planner'"),
        (lambda lines: [*lines[:3], lines[3].replace("0.6", '"0.6"')], "step_time_s: expected a number"),
        (lambda lines: [lines[0].replace('"version": 2', '"version": 3', 1), *lines[1:]], "upgrade rlplace"),
    ],
)
def test_damaged_files_are_refused(tmp_path, change, message):
    path = tmp_path / "rows.jsonl"
    filled(path)
    path.write_text("".join(f"{line}\n" for line in change(path.read_text().splitlines())))
    with pytest.raises(InputError, match=message) as caught:
        Store(Settings(calls=5), path, resume=True)
    assert "\n" not in str(caught.value)


def test_records_survive_json():
    for record in (INFO, stored("best", ratio=1.0, gap=None), Settings(calls=None)):
        assert build(type(record), json.loads(json.dumps(asdict(record))), "x") == record
    with pytest.raises(InputError, match="seeds: expected a whole number"):
        build(Settings, {"seeds": True}, "x")
