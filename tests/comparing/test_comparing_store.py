"""The file of a comparison: complete lines or nothing, and no rows of another comparison beside each other."""

import json

import pytest
from msgspec.structs import asdict, replace

from rlplace.cli.compare_table import to_csv
from rlplace.comparing import Case, ComparisonRow, ProblemInfo, Settings, Store, gather
from rlplace.comparing.records import MAKESPAN
from rlplace.errors import InputError
from rlplace.records import build

INFO = ProblemInfo("m", "c", "tasks", "f" * 64, 8, 10, 30, 2, 0.1, 0.2, 0.05, 0.2, 1)


def row(planner, step=0.5, **changes):
    return ComparisonRow("m", "c", "tasks", planner, MAKESPAN, "ok", None, False, 1, 1, step_time_s=step, samples=8, **changes)


@pytest.fixture(params=["rows.json", "rows.jsonl"])
def path(request, tmp_path):
    return tmp_path / request.param


def filled(path):
    store = Store(Settings(calls=5), path)
    store.add_problem(INFO)
    store.add_row(row("best"))
    store.add_row(row("heft", 0.6))
    return store


def test_every_row_is_there_at_once(path):
    store = filled(path)
    for number in range(3):
        store.add_row(row(f"planner{number}", 0.1 + 0.2))
        found = Store(Settings(calls=5), path, resume=True)
        assert found.rows == store.rows and found.problems == store.problems  # floats come back bit for bit


def test_an_existing_file_is_not_overwritten(path):
    filled(path)
    before = path.read_bytes()
    with pytest.raises(InputError, match="--resume goes on"):
        Store(Settings(calls=5), path)
    assert path.read_bytes() == before
    assert Store(Settings(), path.with_name(f"new{path.suffix}"), resume=True).rows == {}  # nothing there is no error


@pytest.mark.parametrize(
    ("field", "value"), [("calls", 6), ("calls", None), ("time_limit_s", 1.0), ("seeds", 2), ("global_batch", 64),
                         ("agent", "x"), ("microbatches", 2), ("version", "0.0.1")],
)  # fmt: skip
def test_other_settings_are_refused(path, field, value):
    filled(path)
    with pytest.raises(InputError, match=f"made with {field} "):
        Store(replace(Settings(calls=5), **{field: value}), path, resume=True)


def test_another_problem_of_the_same_name_is_refused(path):
    filled(path)
    store = Store(Settings(calls=5), path, resume=True)
    store.add_problem(INFO)
    with pytest.raises(InputError, match="was another problem"):
        store.add_problem(replace(INFO, fingerprint="0" * 64))


def test_a_line_that_was_cut_off_is_dropped(tmp_path):
    path = tmp_path / "rows.jsonl"
    filled(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    store = Store(Settings(calls=5), path, resume=True)
    assert [r.planner for r in store.rows.values()] == ["best"]
    store.add_row(row("heft", 0.6))
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
        (lambda lines: [lines[0].replace('"version": 1', '"version": 2', 1), *lines[1:]], "upgrade rlplace"),
    ],
)
def test_damaged_files_are_refused(tmp_path, change, message):
    path = tmp_path / "rows.jsonl"
    filled(path)
    path.write_text("".join(f"{line}\n" for line in change(path.read_text().splitlines())))
    with pytest.raises(InputError, match=message) as caught:
        Store(Settings(calls=5), path, resume=True)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"format": "rlplace.comparison", "version": 1, "settings": {}}'])
def test_damaged_json_is_refused(tmp_path, text):
    path = tmp_path / "rows.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"rows\.json"):
        Store(Settings(), path, resume=True)


def test_other_names_and_folders_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"\*\.json or \*\.jsonl"):
        Store(Settings(), tmp_path / "rows.txt")
    with pytest.raises(InputError, match="no folder"):
        Store(Settings(), tmp_path / "nowhere" / "rows.json")


def test_records_survive_json():
    for record in (INFO, row("best", ratio=1.0, gap=None, reference=True), Settings(calls=None)):
        assert build(type(record), json.loads(json.dumps(asdict(record))), "x") == record
    with pytest.raises(InputError, match="seeds: expected a whole number"):
        build(Settings, {"seeds": True}, "x")


BAD = (None, True, -1, 0, 1e300, 10**400, float("nan"), "x", [], {}, "best")


@pytest.mark.parametrize("kind", ["settings", "problem", "row"])
def test_mutated_files_load_or_are_refused(tmp_path, kind):
    path = tmp_path / "rows.jsonl"
    filled(path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    number = {"settings": 0, "problem": 1, "row": 3}[kind]
    refused = 0
    cases = [Case("m", "c", lambda: None)]
    for key in lines[number][kind]:
        for value in BAD:
            changed = json.loads(json.dumps(lines))
            changed[number][kind][key] = value
            path.write_text("".join(json.dumps(line) + "\n" for line in changed))
            try:
                store = Store(Settings(calls=5), path, resume=True)
            except InputError as error:
                refused += 1
                assert "\n" not in str(error)
                continue
            found = gather(store, cases, ["best", "heft"])
            to_csv(found)
            json.dumps(found.to_dict(), allow_nan=False)
    assert refused > 3 * len(lines[number][kind])
