"""The leaderboard: right submissions pass, wrong ones are refused by messages of their own, the page is that of its files."""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.leaderboard import __main__ as command
from benchmarks.leaderboard.board import board_cases, board_infos, freeze, info_of, page, standings
from benchmarks.leaderboard.making import make, new_card, placer
from benchmarks.leaderboard.submission import PLANS_BYTES, SUBMISSIONS, check_submission, folders, read_submission
from rlplace.agents.problems.cases import ProblemCase, is_branchy
from rlplace.errors import InputError
from rlplace.placement.common.evaluate import count_calls
from rlplace.problem.generate import random_problem
from rlplace.simulator import simulate
from rlplace.simulator.reference import simulate_reference

ROOT = Path(__file__).parents[2]
SAID = {"authors": "A, B", "method": "A method of the tests.", "link": "https://a.b/c", "kind": "heuristic"}
Change = Callable[[list[dict[str, Any]]], object]


def few_cases() -> dict[str, ProblemCase]:
    """Returns two cases: one with limits that one device does not meet, and one with a fixed group."""
    tight = random_problem(3, 16, 3, memory_factor=1.2)
    fixed = random_problem(4, 12, 2, shape="chain")
    fixed = dataclasses.replace(fixed, group_device=np.array([1, *[-1] * 11], dtype=np.int32))
    problems = {"tiny-tight": tight, "tiny-fixed": fixed}
    return {name: ProblemCase(name, "random", problem, is_branchy(problem)) for name, problem in problems.items()}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ProblemCase]:
    path = tmp_path_factory.mktemp("board") / "cases.jsonl.gz"
    freeze(list(few_cases().values()), {"torch": "2"}, path)
    again = path.with_name("again.gz")
    freeze(list(few_cases().values()), {"torch": "2"}, again)
    assert path.read_bytes() == again.read_bytes()
    return board_cases(path)


@pytest.fixture
def entry(cases: dict[str, ProblemCase], tmp_path: Path) -> Path:
    card = new_card("mine", "best", "one shot", {}, 0)
    make(card, placer("best", "one shot"), cases, tmp_path / "mine", {})
    return tmp_path / "mine"


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in gzip.decompress((folder / "plans.jsonl.gz").read_bytes()).splitlines()]


def write_rows(folder: Path, rows: list[dict[str, Any]]) -> None:
    (folder / "plans.jsonl.gz").write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))


def refusal(folder: Path, cases: dict[str, ProblemCase]) -> str:
    with pytest.raises(InputError) as caught:
        check_submission(read_submission(folder), cases)
    return str(caught.value)


def test_a_right_submission_passes_and_claims_what_the_reference_simulator_says(
    entry: Path, cases: dict[str, ProblemCase]
) -> None:
    submission = read_submission(entry)
    check_submission(submission, cases)
    for name, row in submission.rows.items():
        assert row.step_time_s == simulate_reference(cases[name].problem, row.devices).step_time_s
    rows = rows_of(entry)
    (entry / "plans.jsonl.gz").unlink()
    (entry / "plans.json").write_text(json.dumps(rows))
    check_submission(read_submission(entry), cases)


def next_float(rows: list[dict[str, Any]]) -> None:
    rows[0]["step_time_s"] *= 1 + 1e-11


def swap(rows: list[dict[str, Any]]) -> None:
    devices = rows[0]["devices"]
    other = next(n for n, device in enumerate(devices) if device != devices[0])
    devices[0], devices[other] = devices[other], devices[0]


CHANGES: dict[str, tuple[Change, str]] = {
    "digit": (next_float, "tiny-tight: claims a step of"),
    "swap": (swap, "tiny-tight: (claims a step of|its plan breaks the problem)"),
    "all on one": (lambda rows: rows[0].update(devices=[0] * 16), r"its plan breaks the problem: .* bytes and has .* short"),
    "moved": (lambda rows: rows[1].update(devices=[1 - d for d in rows[1]["devices"]]), "breaks the problem: .*fixed groups"),
    "missing": (lambda rows: rows.pop(), "1 of 2 cases have no row, first tiny-fixed"),
    "unknown": (lambda rows: rows.append({**rows[0], "case": "tiny-tigth"}), "unknown case 'tiny-tigth'.*tiny-tight"),
    "problem": (lambda rows: rows[0].update(problem="0" * 64), "its plan is for problem 000000000000, the board's is"),
    "twice": (lambda rows: rows.append(rows[0]), "line 3: case 'tiny-tight' has a row already"),
    "short": (lambda rows: rows[0]["devices"].pop(), "names 15 devices for 16 groups"),
    "outside": (lambda rows: rows[0]["devices"].__setitem__(0, 3), "names device 3, the last one is 2"),
    "half": (lambda rows: rows[0].pop("devices"), "has only one of devices and step_time_s"),
    "negative": (lambda rows: rows[0]["devices"].__setitem__(0, -1), r"devices\[0\]: expected a whole number"),
    "float": (lambda rows: rows[0]["devices"].__setitem__(0, 0.5), r"devices\[0\]: expected a whole number"),
    "true": (lambda rows: rows[0]["devices"].__setitem__(0, True), r"devices\[0\]: expected a whole number"),
    "text": (lambda rows: rows[0].update(step_time_s="0.1"), "step_time_s: expected a number"),
    "nan": (lambda rows: rows[0].update(step_time_s=math.nan), "line 1: .*NaN"),
    "infinite": (lambda rows: rows[0].update(seconds=math.inf), "line 1: .*Infinity"),
    "key": (lambda rows: rows[0].update(bonus=1), "unknown key 'bonus'"),
    "row": (lambda rows: rows.__setitem__(0, 7), "line 1: expected an object"),  # type: ignore[call-overload]
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_a_wrong_row_is_refused_by_its_own_message(name: str, entry: Path, cases: dict[str, ProblemCase]) -> None:
    change, message = CHANGES[name]
    rows = rows_of(entry)
    change(rows)
    write_rows(entry, rows)
    with pytest.raises(InputError, match=message):
        check_submission(read_submission(entry), cases)


def test_a_case_without_a_plan_is_no_fault(entry: Path, cases: dict[str, ProblemCase]) -> None:
    rows = rows_of(entry)
    del rows[0]["devices"], rows[0]["step_time_s"]
    write_rows(entry, rows)
    check_submission(read_submission(entry), cases)


CARDS = {
    "missing key": (("authors", None), "key 'authors' is missing"),
    "unknown key": (("colour", '"red"'), "unknown key 'colour'"),
    "kind": (("kind", '"magic"'), "unknown kind 'magic'"),
    "budget": (("budget", '"2 s"'), "unknown budget '2 s'"),
    "date": (("date", '"2026-02-30"'), "write a day as"),
    "markup": (("authors", '"a | b"'), "authors holds"),
    "hidden": (("authors", '"a\\u202eb"'), "authors holds"),
    "link": (("link", '"javascript:x"'), "give one https:// address"),
    "name": (("name", '"other"'), "make them the same"),
    "type": (("seeds", "7"), "seeds: expected a list"),
    "toml": (("seeds", "["), "not a TOML file"),
    "huge": (("method", '"' + "x" * 20_000 + '"'), "the limit is"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CARDS)
def test_a_wrong_card_is_refused_by_its_own_message(name: str, entry: Path) -> None:
    (key, value), message = CARDS[name]
    path = entry / "card.toml"
    kept = [line for line in path.read_text().splitlines() if not line.startswith(f"{key} =")]
    path.write_text("\n".join(([] if value is None else [f"{key} = {value}"]) + kept))
    with pytest.raises(InputError, match=message):
        read_submission(entry)


def test_what_leads_out_of_the_folder_or_does_not_belong_there_is_refused(entry: Path, tmp_path: Path) -> None:
    (entry / "run.py").write_text("")
    with pytest.raises(InputError, match=r"run\.py: does not belong to a submission"):
        read_submission(entry)
    (entry / "run.py").unlink()
    outside = tmp_path / "secret.toml"
    (entry / "card.toml").rename(outside)
    with pytest.raises(InputError, match="is missing; write one like"):
        read_submission(entry)
    (entry / "card.toml").symlink_to(outside)
    with pytest.raises(InputError, match=r"card\.toml: is a link, which may lead out"):
        read_submission(entry)
    (tmp_path / "linked").symlink_to(entry)
    with pytest.raises(InputError, match="linked: is a link"):
        read_submission(tmp_path / "linked")
    with pytest.raises(InputError, match="there is no such folder"):
        read_submission(tmp_path / "nowhere")
    (entry / "card.toml").unlink()
    os.mkfifo(entry / "card.toml")
    with pytest.raises(InputError, match="does not belong"):
        read_submission(entry)


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (gzip.compress(b"0" * (PLANS_BYTES + 1)), "holds more than"),
        (gzip.compress(b"{}\n" * 1000)[:-9], "is cut"),
        (gzip.compress(b"{}") + b"more", "is cut, or has more"),
        (b"plain", "not a gzip file"),
        (gzip.compress(b"\xff\xfe"), "not UTF-8"),
        (gzip.compress(b"[" * 100_000), "nested too deeply|not valid JSON"),
    ],
    ids=["huge", "cut", "more", "plain", "bytes", "nested"],
)
def test_hostile_plans_are_refused(payload: bytes, message: str, entry: Path) -> None:
    (entry / "plans.jsonl.gz").write_bytes(payload)
    with pytest.raises(InputError, match=message):
        read_submission(entry)


def test_claims_beyond_the_class_are_refused(cases: dict[str, ProblemCase], tmp_path: Path) -> None:
    make(new_card("search", "annealing", "256 calls", {}, 1), placer("annealing", "256 calls"), cases, tmp_path / "search", {})
    folder = tmp_path / "search"
    check_submission(read_submission(folder), cases)
    rows = rows_of(folder)
    assert all(0 < row["calls"] <= 256 for row in rows)
    write_rows(folder, [{**row, "calls": 257} for row in rows])
    assert "257 calls are more than the class '256 calls' allows" in refusal(folder, cases)
    write_rows(folder, [{k: v for k, v in row.items() if k != "calls"} for row in rows])
    assert "calls is missing, which the class '256 calls' needs" in refusal(folder, cases)


@pytest.mark.parametrize("planner", ["random", "agent", "local_search"])
def test_searches_of_rlplace_are_counted_without_their_start(
    planner: str, cases: dict[str, ProblemCase], tmp_path: Path
) -> None:
    make(new_card("x", planner, "256 calls", {}, 1), placer(planner, "256 calls"), cases, tmp_path / "x", {})
    check_submission(read_submission(tmp_path / "x"), cases)
    assert all(250 <= row["calls"] <= 256 for row in rows_of(tmp_path / "x"))


def test_bipartition_is_projected_on_groups_that_stay_whole(cases: dict[str, ProblemCase], tmp_path: Path) -> None:
    make(new_card("x", "bipartition", "one shot", {}, 0), placer("bipartition", "one shot"), cases, tmp_path / "x", {})
    check_submission(read_submission(tmp_path / "x"), cases)


def test_the_page_says_what_the_submissions_give(cases: dict[str, ProblemCase], tmp_path: Path) -> None:
    entries = []
    for name, planner in (("best", "best"), ("all-round", "round_robin"), ("few", "single")):
        make(new_card(name, planner, "one shot", SAID, 0), placer(planner, "one shot"), cases, tmp_path / name, {})
        entries.append(read_submission(tmp_path / name))
    infos = {name: info_of(case) for name, case in cases.items()}
    lines = standings(entries, infos)["one shot"]
    names = [line.submission.card.name for line in lines]
    assert names == ["best", "all-round", "few"]  # the first case fits on no one device
    best, other = ({row["case"]: row["step_time_s"] for row in rows_of(tmp_path / name)} for name in ("best", "all-round"))
    mean = math.prod(other[name] / best[name] for name in cases) ** (1 / len(cases))
    text = page(entries, infos)
    row = next(line for line in text.splitlines() if "[all-round]" in line)
    assert f"| {mean:.4f} " in row and "| 2/2 |" in row
    assert "| 1/2 |" in next(line for line in text.splitlines() if "[few]" in line)
    with pytest.raises(InputError, match="best is not among them"):
        standings(entries[1:], infos)


def test_the_command_checks_and_writes(
    cases: dict[str, ProblemCase], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    board = tmp_path / "cases.jsonl.gz"
    freeze(list(cases.values()), {}, board)
    own = ["--cases", str(board), "--submissions", str(tmp_path / "entries")]
    with count_calls() as counter:
        assert command.main([*own, "make", "best", "--planner", "best", "--budget", "one shot"]) == 0
    assert counter.calls > 0 and command.main([*own, "check"]) == 0 and "best: 2 rows are right" in capsys.readouterr().out
    assert command.main([*own, "table", "--write", "--page", str(tmp_path / "page.md")]) == 0
    assert "[best]" in (tmp_path / "page.md").read_text()
    rows = rows_of(tmp_path / "entries/best")
    write_rows(tmp_path / "entries/best", rows[:1])
    assert command.main([*own, "check"]) == 2 and "cases have no row" in capsys.readouterr().err
    assert command.main([*own, "make", "best", "--planner", "best", "--budget", "one shot"]) == 2
    for words, message in (
        (["../evil", "--planner", "best", "--budget", "one shot"], "name is '../evil'; use small letters"),
        (["x", "--planner", "bets", "--budget", "one shot"], "unknown planner 'bets'"),
        (["x", "--planner", "annealing", "--budget", "one shot"], "give --budget a class of calls or seconds"),
        (["x", "--planner", "heft", "--budget", "256 calls"], "heft counts no calls"),
        (["x", "--planner", "heft", "--budget", "one shot", "--agent", "runs/x"], "heft has no checkpoint"),
    ):
        capsys.readouterr()
        assert command.main([*own, "make", *words]) == 2 and message in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cases.jsonl.gz", "entries", "page.md"]
    assert command.main([*own, "problems", "--out", str(tmp_path / "problems")]) == 0
    assert len(list((tmp_path / "problems").glob("*.problem.json"))) == 2


def test_the_board_holds_entries_of_ours_and_its_page_is_theirs() -> None:
    entries = [read_submission(folder) for folder in folders()]
    assert len(entries) >= 8
    assert (ROOT / "LEADERBOARD.md").read_text() == page(entries, board_infos())


@pytest.mark.slow
def test_every_plan_of_the_board_is_what_it_claims() -> None:
    cases = board_cases()
    for folder in folders(None, SUBMISSIONS):
        check_submission(read_submission(folder), cases)
    best = read_submission(SUBMISSIONS / "best")
    for name in list(cases)[::12]:  # the definition itself, which is slow
        devices = np.array(best.rows[name].devices, dtype=np.int32)
        assert simulate(cases[name].problem, devices).step_time_s == best.rows[name].step_time_s
        assert simulate_reference(cases[name].problem, devices).step_time_s == best.rows[name].step_time_s
