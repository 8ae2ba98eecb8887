"""Rows of the agent's benchmark: means, intervals, the file that is resumed after a cut; published tables of fine-tuning."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from benchmarks.agent import means
from benchmarks.agent.records import AGENT, RIVAL, BenchmarkRow, Budget, CaseInfo, Method
from benchmarks.agent.store import Store
from rlplace.errors import InputError
from rlplace.means import interval


def info(name: str, *, family: str = "f", branchy: bool = False, floor_s: float | None = 1.0) -> CaseInfo:
    floor = None if floor_s is None else [0] * 8
    return CaseInfo(name, family, "0" * 64, 8, 24, 2, branchy, False, floor_s, floor, 0.1, 9)


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
        "b": info("b", family="y", floor_s=None),
        "c": info("c", family="x"),
    }
    assert means.slices(cases) == {
        "all": ["a", "b", "c"],
        "branchy": ["a"],
        "chain-like": ["b", "c"],
    }
    assert means.families(cases) == {"x": ["a", "c"], "y": ["b"]}
    assert means.log_floors(cases) == {"a": 0.0, "c": 0.0}


ROOT = Path(__file__).parents[2]


def test_the_tables_are_of_the_published_rows(capsys):
    from benchmarks.finetune.rank import read_rows
    from benchmarks.finetune.report import report

    rows = read_rows(ROOT / "benchmarks/finetune/measured")
    report(rows)
    page = (ROOT / "docs/results.md").read_text()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(lines) > 25 and all(f"\n{line}\n" in page for line in lines)


def test_the_cells_are_what_the_page_says():
    from benchmarks.finetune.rank import read_rows

    rows = read_rows(ROOT / "benchmarks/finetune/measured")
    assert len({(row["cluster"], row["model"], row["seed"]) for row in rows}) == len(rows) == 36
    for row in rows:
        assert all(facts["plans"] <= 32 for facts in row["facts"].values())
        assert all(len(steps) >= 20 for steps in row["judged_s"].values())


SETTINGS = {"set": "random", "torch": "2.13.0"}
CASE = CaseInfo("a", "f", "1" * 64, 2, 6, 2, True, False, 1.0, [0, 1], 0.1, 30)
METHOD = Method("seed0", AGENT, "runs/seed0", "2" * 64, {"samples": 4}, "3" * 64)
ROW = BenchmarkRow("a", "seed0", "64 calls", 0, "ok", 0.9, None, 0.9, 65, 0.2, 0.4, {"floor": 1.0})


def filled(path: Path) -> Store:
    store = Store(SETTINGS, path)
    store.add_run({"processes": 1})
    store.add_method(METHOD)
    store.add_case(CASE)
    for seed in range(3):
        store.add_row(replace(ROW, seed=seed))
    return store


def test_reads_back_what_was_written(tmp_path: Path) -> None:
    written, read = filled(tmp_path / "rows.jsonl"), Store(SETTINGS, tmp_path / "rows.jsonl")
    assert (read.cases, read.methods, read.rows, read.runs) == (written.cases, written.methods, written.rows, written.runs)


def test_damage_elsewhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    filled(path)
    lines = path.read_text().splitlines()
    for number, line, words in (
        (3, "{", "line 4: not valid JSON"),
        (3, json.dumps({"plan": {}}), "line 4: expected one of case"),
        (4, json.dumps({"row": {"case": "a"}}), "line 5: key"),
        (4, lines[4].replace("0.9,", '"0.9",', 1), "line 5: step_time_s: expected a number"),
        (4, lines[4].replace('"case": "a"', '"case": "b"'), "line 5: its case 'b'"),
        (0, lines[0].replace("agent_benchmark", "plan"), "expected format"),
    ):
        path.write_text("\n".join([*lines[:number], line, *lines[number + 1 :]]) + "\n")
        with pytest.raises(InputError, match=words):
            Store(SETTINGS, path)
    path.write_text("")
    with pytest.raises(InputError, match=r"holds no rlplace\.agent_benchmark"):
        Store(SETTINGS, path)


def test_other_settings_weights_programs_and_problems_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    filled(path)
    before = path.read_bytes()
    with pytest.raises(InputError, match=r"torch '2\.13\.0', now '2\.14\.0'"):
        Store({**SETTINGS, "torch": "2.14.0"}, path)
    store = Store(SETTINGS, path)
    for change in ({"fingerprint": "4" * 64}, {"code": "4" * 64}, {"options": {"samples": 8}}, {"role": RIVAL}):
        with pytest.raises(InputError, match="--drop seed0"):
            store.add_method(replace(METHOD, **change))
    store.add_method(replace(METHOD, checkpoint="elsewhere/with/the/same/weights"))
    with pytest.raises(InputError, match="was another problem"):
        store.check_case("a", "5" * 64)
    with pytest.raises(InputError, match="two floors"):
        store.add_case(replace(CASE, floor=[1, 0]))
    assert path.read_bytes() == before


def test_failed_rows_are_run_again_and_infeasible_ones_are_not(tmp_path: Path) -> None:
    store = filled(tmp_path / "rows.jsonl")
    store.add_row(replace(ROW, seed=7, status="failed", step_time_s=None, violation="KeyError: 'x'"))
    store.add_row(replace(ROW, seed=8, status="infeasible", step_time_s=None, violation="no plan"))
    again = Store(SETTINGS, tmp_path / "rows.jsonl")
    assert not again.done(("a", "seed0", "64 calls", 7)) and again.done(("a", "seed0", "64 calls", 8))
    again.add_row(replace(ROW, seed=7))
    assert Store(SETTINGS, tmp_path / "rows.jsonl").done(("a", "seed0", "64 calls", 7))


def test_dropping_a_method_takes_its_rows_out_of_the_file(tmp_path: Path) -> None:
    store = filled(tmp_path / "rows.jsonl")
    store.add_method(Method("annealing", RIVAL))
    store.add_row(replace(ROW, method="annealing"))
    assert store.drop(["seed0"]) == 3
    again = Store(SETTINGS, tmp_path / "rows.jsonl")
    assert list(again.methods) == ["annealing"] and len(again.rows) == 1 and list(again.cases) == ["a"]
    with pytest.raises(InputError, match="holds no rows of 'seed0'"):
        again.drop(["seed0"])


def test_budgets() -> None:
    assert [str(Budget.parse(text)) for text in ("64", "64 calls", "1s", "0.5 s")] == ["64 calls", "64 calls", "1 s", "0.5 s"]
    assert Budget.parse("256").arguments == {"calls": 256} and Budget.parse("5s").arguments == {"time_limit_s": 5.0}
    for text in ("", "calls", "-1", "0", "1.5", "nan", "5 m"):
        with pytest.raises(InputError, match="budget"):
            Budget.parse(text)
