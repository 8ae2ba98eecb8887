"""The file of rows: resumed after a cut, refused when it is of something else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from benchmarks.agent.records import AGENT, RIVAL, BenchmarkRow, Budget, CaseInfo, Method
from benchmarks.agent.store import Store
from rlplace.errors import InputError

SETTINGS = {"set": "random", "torch": "2.13.0"}
CASE = CaseInfo("a", "f", "1" * 64, 2, 6, 2, 1, "list", True, False, 1.0, [0, 1], 0.1, 30)
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


def test_a_line_that_was_cut_off_is_dropped_and_made_again(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    filled(path)
    text = path.read_text()
    for cut in (1, 10, 60):
        path.write_text(text[:-cut])
        store = Store(SETTINGS, path)
        assert [store.done(("a", "seed0", "64 calls", seed)) for seed in range(3)] == [True, True, False]
        store.add_row(replace(ROW, seed=2))
        assert path.read_text() == text


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


def test_shards_merge_and_other_settings_do_not(tmp_path: Path) -> None:
    filled(tmp_path / "one.jsonl")
    other = Store(SETTINGS, tmp_path / "two.jsonl")
    other.add_method(METHOD)
    other.add_case(replace(CASE, name="b"))
    other.add_row(replace(ROW, case="b"))
    one = Store(SETTINGS, tmp_path / "one.jsonl")
    one.merge(Store.read(tmp_path / "two.jsonl"))
    assert len(Store(SETTINGS, tmp_path / "one.jsonl").rows) == 4
    with pytest.raises(InputError, match="do not compare"):
        one.merge(Store({"set": "test"}))


def test_budgets() -> None:
    assert [str(Budget.parse(text)) for text in ("64", "64 calls", "1s", "0.5 s")] == ["64 calls", "64 calls", "1 s", "0.5 s"]
    assert Budget.parse("256").arguments == {"calls": 256} and Budget.parse("5s").arguments == {"time_limit_s": 5.0}
    for text in ("", "calls", "-1", "0", "1.5", "nan", "5 m"):
        with pytest.raises(InputError, match="budget"):
            Budget.parse(text)
