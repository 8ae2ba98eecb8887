"""Files that are no store of trials, or one that somebody or a disk has changed: a valid read or one line, nothing else."""

from __future__ import annotations

import sqlite3
import zlib
from typing import get_args

import pytest
from trial_store_helpers import PROBLEM, SITE, begun, done, new_store

from rlplace.errors import InputError
from rlplace.measured import database
from rlplace.measured import store as store_module
from rlplace.measured.rows import COLUMNS, trial_to_row
from rlplace.measured.store import TrialStore
from rlplace.measured.trial import Status


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A small store's bytes."""
    path = tmp_path_factory.mktemp("base") / "t.sqlite"
    with new_store(path) as store:
        for number in range(12):
            store.add(done(number, reason="x" * 300))
        store.begin(begun(20))
    return path.read_bytes()


@pytest.fixture
def path(tmp_path, base):
    """The same as a file."""
    (tmp_path / "t.sqlite").write_bytes(base)
    return tmp_path / "t.sqlite"


def read_all(path):
    """Everything that a store tells, checked: what comes out may go in again."""
    with TrialStore(path) as store:
        problems = {name: store.problem(name) for name in store.problems()}
        for trial in store.trials(include_running=True):
            assert trial_to_row(trial)[1] == trial
            assert trial.status in get_args(Status)
            problem = problems[trial.problem]
            assert len(trial.device_of_group) == problem.num_groups
            assert max(trial.device_of_group) < problem.num_devices
            assert trial.site == SITE.fingerprint
        for number, trial in store.interrupted("first"):
            assert type(number) is int
            assert trial.status == "running"
        store.add(done(99))
        return True


def outcome(path):
    """Whether it can be read; every error must be one line."""
    try:
        return read_all(path)
    except InputError as error:
        assert "\n" not in str(error)
        assert len(str(error)) < 500
        return False


def refused(path, message):
    with pytest.raises(InputError, match=message) as caught:
        read_all(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def change(path, *statements, values=()):
    plain = sqlite3.connect(path, isolation_level=None)
    plain.execute("PRAGMA writable_schema = ON")
    for statement in statements:
        plain.execute(statement, values)
    plain.close()


def test_the_base_itself_is_read(path):
    assert outcome(path)


VALUES = (
    None, -1, 0, 3, 2**63 - 1, -(2**63), 1.5, -0.5, 9e999, "", "text", "done", "\x00", "1" * 5000, "9" * 64,
    b"", b"\x00\xff", b"\xff" * 64, "[]", "[0]", "[0,1]", "[1e999]", "[NaN]", "[true]", "[null]", "[-1]", "[0.5]", '["0"]',
    "[[0]]", "[" * 100_000, "[0" + ",0" * 70_000 + "]", "{}", '{"a":1}', '{"a":1,"a":2}', "[{}]", '[{"rank":0}]',
    '{"' * 50_000, "[" + "9" * 5000 + "]", "nul", "[1", "\ufeff[1]", "[1]x", "-",
)  # fmt: skip


@pytest.mark.parametrize("column", ["id", "uid", "plan_key", *COLUMNS])
def test_any_value_in_a_column_of_a_trial(path, column):
    read = 0
    with TrialStore(path) as store:
        for value in VALUES:
            plain = store._database
            plain.execute("BEGIN")
            try:
                plain.execute(f"UPDATE trials SET {column} = ? WHERE id = 2", (value,))
                trials = store.trials(include_running=True)
                assert all(trial_to_row(trial)[1] == trial for trial in trials)
                read += 1
            except InputError as error:
                assert "\n" not in str(error)
                assert len(str(error)) < 500
            except sqlite3.IntegrityError:
                pass
            plain.execute("ROLLBACK")
    free = {"engine": 10, "reason": 10, "run": 10, "began_at": 3, "setup_s": 3, "predicted_s": 4, "step_s": 1}
    assert (read >= free[column]) if column in free else (read <= 2)


@pytest.mark.parametrize(
    ("blob", "message"),
    [
        (b"", "cut off"),
        (b"not compressed", "cannot be decompressed"),
        (zlib.compress(b"{}" * 1000)[:-5], "cut off"),
        (zlib.compress(b"\xff\xfe"), "not UTF-8"),
        (zlib.compress(b"[" * 100_000), "nested too deeply"),
        (zlib.compress(b'{"a": NaN}'), "NaN"),
        (zlib.compress(b"{}"), "expected format"),
        (zlib.compress(b"[]"), "expected a JSON object"),
        (zlib.compress(b" " * ((1 << 26) + 1), 1), "more than 67108864 bytes"),
    ],
)
def test_problems_that_are_no_problems(path, blob, message):
    change(path, "UPDATE problems SET json = ? WHERE rowid = 1", values=(blob,))
    refused(path, message)


def test_a_problem_in_place_of_another(path):
    change(path, "UPDATE problems SET json = (SELECT json FROM problems WHERE rowid = 2) WHERE rowid = 1")
    refused(path, "has another fingerprint")


def test_trials_without_their_problem_or_site(path):
    change(path, "DELETE FROM sites WHERE rowid = 1")
    refused(path, f"trial 1: cluster '{SITE.fingerprint}' is not in the store")
    change(path, "DELETE FROM problems")
    refused(path, "is not in the store")


def test_a_plan_that_was_changed(path):
    plan = str([1] * PROBLEM.num_groups)
    change(path, f"UPDATE trials SET device_of_group = '{plan}' WHERE id = 3")
    refused(path, "trial 3: its key does not fit its plan")


def test_values_that_are_too_long_are_not_read(path, monkeypatch):
    change(path, "UPDATE trials SET reason = ? WHERE id = 3", values=("x" * 200_000,))
    refused(path, "trial 3: reason: expected text of at most 4000 characters")
    monkeypatch.setattr(database, "MAX_VALUE_BYTES", 100_000)
    refused(path, "too big")


def test_lists_that_are_too_long_are_not_parsed(path, monkeypatch):
    from rlplace.measured import rows

    monkeypatch.setitem(rows._LISTS, "step_s", 2)
    refused(path, "trial 1: step_s: holds about 3 values, the limit is 2")


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE TABLE more (a)",
        "CREATE VIEW more AS SELECT 1",
        "CREATE INDEX more ON trials (status)",
        "CREATE TRIGGER more AFTER INSERT ON trials BEGIN DELETE FROM trials; END",
        "ALTER TABLE trials ADD COLUMN more",
        "ALTER TABLE trials RENAME COLUMN reason TO why",
        "DROP TABLE sites",
        "DROP INDEX trials_by_key",
        "UPDATE sqlite_master SET sql = 'nonsense' WHERE name = 'trials'",
        "UPDATE sqlite_master SET sql = NULL WHERE name = 'trials'",
        "UPDATE sqlite_master SET name = 'sqlite_stat1', sql = 'CREATE TABLE sqlite_stat1 (a)' WHERE name = 'sites'",
        "UPDATE sqlite_master SET rootpage = 999 WHERE name = 'trials'",
        "UPDATE sqlite_master SET rootpage = (SELECT rootpage FROM sqlite_master WHERE name = 'sites') WHERE name = 'trials'",
        "INSERT INTO sqlite_master VALUES ('trigger', 'sqlite_stat1', 'trials', 0, "
        "'CREATE TRIGGER sqlite_stat1 AFTER INSERT ON trials BEGIN DELETE FROM trials; END')",
        "INSERT INTO sqlite_master VALUES ('view', 'sqlite_stat4', 'sqlite_stat4', 0, 'CREATE VIEW sqlite_stat4 AS SELECT 1')",
        "PRAGMA application_id = 7",
        "PRAGMA user_version = 0",
        "PRAGMA user_version = -3",
    ],
)
def test_other_tables(path, statement):
    change(path, statement)
    assert not outcome(path)


def test_statistics_and_a_vacuum_do_no_harm(path):
    change(path, "ANALYZE", "VACUUM")
    assert outcome(path)
    change(path, "PRAGMA journal_mode = WAL")
    assert outcome(path)


def test_a_newer_version(path):
    change(path, "PRAGMA user_version = 2")
    refused(path, "written as trials version 2, this rlplace reads up to 1; upgrade rlplace")


def test_somebody_elses_database_is_left_alone(tmp_path):
    path = tmp_path / "t.sqlite"
    change(path, "CREATE TABLE trials (id INTEGER PRIMARY KEY, uid, plan_key)")
    before = path.read_bytes()
    refused(path, "a SQLite database, but not one of trials")
    assert path.read_bytes() == before


HEADER = b"SQLite format 3\x00"


@pytest.mark.parametrize("content", [b"x", b"{}", b"hello\n" * 1000, HEADER, HEADER + bytes(5000), bytes(8192)])
def test_files_that_are_no_database(tmp_path, content):
    path = tmp_path / "t.sqlite"
    path.write_bytes(content)
    refused(path, "t.sqlite")
    assert path.read_bytes() == content


def test_an_empty_file_becomes_a_store(tmp_path):
    path = tmp_path / "t.sqlite"
    path.touch()
    with new_store(path) as store:
        store.add(done(0))
    with TrialStore(path, create=False) as store:
        assert store.trials() == [done(0)]


@pytest.mark.parametrize("name", ["a b?c#d%20.sqlite", ":memory:", "file:x?mode=ro", "-journal", "é.sqlite"])
def test_odd_names_are_files(tmp_path, name):
    with new_store(tmp_path / name) as store:
        store.add(done(0))
    assert [path.name for path in tmp_path.iterdir()] == [name]
    with TrialStore(tmp_path / name) as store:
        assert store.trials() == [done(0)]


def test_limits_fit_each_other():
    """What may be written may be read: the longest lists fit into the longest value."""
    from rlplace.measured import rows

    assert rows.MAX_STEPS * 26 < database.MAX_VALUE_BYTES
    assert rows.MAX_GROUPS * 5 < database.MAX_VALUE_BYTES
    assert store_module.MAX_PROBLEM_BYTES + 100_000 < database.MAX_VALUE_BYTES
    assert rows.MAX_NAME < rows.MAX_REASON
