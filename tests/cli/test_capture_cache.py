"""What a capture gives is kept between commands, and only where nothing can have changed."""

import json

import pytest

from rlplace.cli import capture_cache as module
from rlplace.cli.capture_cache import cached
from tests.cli.command import run

TINY = "hf:gpt2,n_layer=3,n_embd=32,n_head=2,vocab_size=96"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("RLPLACE_CACHE", str(tmp_path / "kept"))
    return tmp_path / "kept"


def counted():
    made = []

    def make():
        made.append(len(made))
        return made[-1]

    return make, made


def test_the_same_question_is_answered_once():
    make, made = counted()
    assert [cached("graph", "hf:x", {"batch": 8}, make) for _ in range(3)] == [0, 0, 0]
    assert cached("graph", "hf:x", {"batch": 4}, make) == 1
    assert cached("facts", "hf:x", {"batch": 8}, make) == 2
    assert cached("graph", "hf:x,n=2", {"batch": 8}, make) == 3
    assert len(made) == 4


def test_other_sources_are_another_question(monkeypatch):
    make, _ = counted()
    cached("graph", "zoo:x", {}, make)
    monkeypatch.setattr(module, "_versions", lambda: ["another"])
    assert cached("graph", "zoo:x", {}, make) == 1


@pytest.mark.parametrize("model", ["file.py:make", "package.module:make", "x.problem.json"])
def test_nothing_of_a_users_own_code_is_kept(model, folder):
    make, _ = counted()
    assert [cached("graph", model, {}, make) for _ in range(2)] == [0, 1] and not folder.exists()


def test_it_can_be_turned_off(monkeypatch, tmp_path):
    monkeypatch.setenv("RLPLACE_CACHE", "0")
    monkeypatch.chdir(tmp_path)
    make, _ = counted()
    assert [cached("graph", "hf:x", {}, make) for _ in range(2)] == [0, 1] and not list(tmp_path.iterdir())


def test_a_damaged_entry_is_made_again(folder):
    make, _ = counted()
    cached("graph", "hf:x", {}, make)
    (entry,) = folder.iterdir()
    entry.write_bytes(b"no pickle")
    assert [cached("graph", "hf:x", {}, make) for _ in range(2)] == [1, 1]


@pytest.mark.parametrize("what", ["entry", "folder"])
def test_what_others_can_write_is_not_read(folder, what):
    make, _ = counted()
    cached("graph", "hf:x", {}, make)
    (entry,) = folder.iterdir()
    assert entry.stat().st_mode & 0o077 == 0
    (entry if what == "entry" else folder).chmod(0o777)
    assert cached("graph", "hf:x", {}, make) == 1


def test_old_entries_make_room(folder, monkeypatch):
    monkeypatch.setattr(module, "MOST_ENTRIES", 3)
    for number in range(6):
        cached("graph", "hf:x", {"batch": number}, lambda: 0)
    assert len(list(folder.iterdir())) == 3


@pytest.mark.slow
def test_a_second_command_captures_nothing_and_answers_the_same(capsys, folder, tmp_path):
    plan = tmp_path / "x.plan.json"
    words = f"place {TINY} --cluster a100-80g:2 --batch 8 --seq 16 --calls 40 --time-limit 600 --json --out {plan}".split()
    first, second = run(capsys, *words), run(capsys, *words)
    assert first[0] == second[0] == 0
    assert "capturing" in first[2] and "capturing" not in second[2] and "building" not in second[2]
    assert json.loads(first[1]) == json.loads(second[1])
    entries = {path: path.read_bytes() for path in folder.iterdir()}
    again = run(capsys, "simulate", str(plan), "--json")
    assert json.loads(again[1])["step_time_s"] == json.loads(first[1])["predicted"]["step_time_s"]
    assert entries == {path: path.read_bytes() for path in folder.iterdir()}  # the plan's verbs read them and need no others
