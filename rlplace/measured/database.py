"""The SQLite file of a trial store: opening, schema, locking, and its errors as one line each."""

from __future__ import annotations

import contextlib
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path

from rlplace.errors import InputError, show
from rlplace.files import check_output

APPLICATION_ID = 0x726C7054  # "rlpT"
VERSION = 1
BUSY_S = 60.0
"""How long a process waits for another one's transaction, which takes milliseconds."""

MAX_VALUE_BYTES = 1 << 27
"""Longer texts and blobs are refused by SQLite itself, before they are read."""

_LEAST_BYTES = 512
"""The smallest page of a database, and so the smallest database."""

# `plan_key` is a digest of plan and conditions. `uid` is drawn once: the same trial in two files has the same.
SCHEMA = (
    "CREATE TABLE sites (fingerprint TEXT PRIMARY KEY NOT NULL, name TEXT NOT NULL, facts TEXT NOT NULL)",
    "CREATE TABLE problems (fingerprint TEXT PRIMARY KEY NOT NULL, name TEXT NOT NULL, num_devices INTEGER NOT NULL, "
    "num_groups INTEGER NOT NULL, num_ops INTEGER NOT NULL, json BLOB NOT NULL)",
    "CREATE TABLE trials (id INTEGER PRIMARY KEY AUTOINCREMENT, uid BLOB NOT NULL UNIQUE, plan_key TEXT NOT NULL, "
    "problem TEXT NOT NULL, site TEXT NOT NULL, run TEXT NOT NULL, anchor INTEGER NOT NULL, status TEXT NOT NULL, "
    "mode TEXT NOT NULL, engine TEXT NOT NULL, began_at REAL NOT NULL, setup_s REAL NOT NULL, predicted_s REAL, "
    "device_of_group TEXT NOT NULL, step_s TEXT NOT NULL, places TEXT NOT NULL, reason TEXT NOT NULL)",
    "CREATE INDEX trials_by_key ON trials (plan_key)",
    "CREATE INDEX trials_by_problem ON trials (problem, site)",
    "CREATE INDEX trials_by_run ON trials (run)",
)


def open_database(path: str | Path | None, *, create: bool) -> sqlite3.Connection:
    """Opens a store's database and checks all of its structure.

    The journal is SQLite's default, the rollback journal, not a write-ahead log: a trial takes seconds and its transaction
    milliseconds, so nothing is won by a log, which needs memory shared between the processes (network file systems have
    none), keeps the latest trials in a second file that is easily left behind when the first is copied, and cannot be read
    where the folder is read-only. Either survives SIGKILL between any two instructions: the next one to open the file rolls
    back what was not committed.

    Args:
        path: The file; None: in memory.
        create: Make it where there is none.

    Raises:
        InputError: Not a store, a damaged one, one of a newer version, or not to be opened at all.
    """
    where = "trials in memory" if path is None else str(path)
    with reported(where):
        connection = sqlite3.connect(
            ":memory:" if path is None else _uri(Path(path), create),
            uri=path is not None,
            timeout=BUSY_S,
            isolation_level=None,  # transactions are begun and ended here, see `writing`
            check_same_thread=False,  # the store has a lock of its own
        )
        try:
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
            connection.execute("PRAGMA trusted_schema = OFF")
            connection.execute("PRAGMA cell_size_check = ON")
            connection.execute("PRAGMA synchronous = FULL")
            if _empty(connection):
                _create(connection)
            _check(connection, where)
        except BaseException:
            connection.close()
            raise
    return connection


@contextlib.contextmanager
def writing(connection: sqlite3.Connection) -> Iterator[None]:
    """A transaction that takes the write lock at once: two readers that both wait to write would wait for each other."""
    with connection:  # commits, or rolls back
        connection.execute("BEGIN IMMEDIATE")
        yield


@contextlib.contextmanager
def reported(where: str) -> Iterator[None]:
    """Turns what SQLite raises into an `InputError` of one line."""
    try:
        yield
    except sqlite3.Error as error:
        raise InputError(f"{where}: {_explained(error)}") from None
    except OSError as error:
        raise InputError(f"{where}: cannot be opened: {error.strerror or error}") from None
    except UnicodeError:
        raise InputError(f"{where}: a text is not valid UTF-8") from None
    except OverflowError as error:
        raise InputError(f"{where}: {error}") from None


def _explained(error: sqlite3.Error) -> str:
    text = str(error).lower()
    for part, meaning in (
        ("not a database", "not a SQLite database"),
        ("malformed", "the database is damaged; restore a copy of it, or try `sqlite3 FILE .recover`"),
        ("readonly", "the file or its folder is read-only"),
        ("disk is full", "the disk is full; what was finished before is kept"),
        ("disk i/o error", "the disk does not take or give the data; what was finished before is kept"),
        ("locked", f"another process has kept it locked for {BUSY_S:g} seconds"),
        ("unable to open", "cannot be opened"),
        ("closed database", "the store is closed"),
    ):
        if part in text:
            return meaning
    return f"SQLite says {show(str(error))}"


def _uri(path: Path, create: bool) -> str:
    try:
        status = path.stat()
    except FileNotFoundError:
        if not create:
            raise InputError(f"{path}: there is no such file") from None
        check_output(path)
    except ValueError as error:  # a null character in the path
        raise InputError(f"{show(str(path))}: cannot be opened: {error}") from None
    else:
        if stat.S_ISDIR(status.st_mode):
            raise InputError(f"{path}: is a folder; name a file such as {path / 'trials.sqlite'}")
        if not stat.S_ISREG(status.st_mode):
            raise InputError(f"{path}: is not a regular file")
        if 0 < status.st_size < _LEAST_BYTES:  # SQLite takes a file of one byte for an empty one, and writes over it
            raise InputError(f"{path}: not a SQLite database")
    return f"{path.absolute().as_uri()}?mode={'rwc' if create else 'rw'}"


def _empty(connection: sqlite3.Connection) -> bool:
    marks = (_number(connection, text) for text in ("PRAGMA application_id", "PRAGMA user_version"))
    return not any(marks) and not _number(connection, "SELECT count(*) FROM sqlite_master")


def _number(connection: sqlite3.Connection, text: str) -> int:
    return int(connection.execute(text).fetchone()[0])


def _create(connection: sqlite3.Connection) -> None:
    with writing(connection):
        if not _empty(connection):  # another process was faster
            return
        for statement in SCHEMA:
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {VERSION}")


def _check(connection: sqlite3.Connection, where: str) -> None:
    if _number(connection, "PRAGMA application_id") != APPLICATION_ID:
        raise InputError(f"{where}: a SQLite database, but not one of trials")
    version = _number(connection, "PRAGMA user_version")
    if version > VERSION:
        raise InputError(f"{where}: written as trials version {version}, this rlplace reads up to {VERSION}; upgrade rlplace")
    # Anything beside these and what AUTOINCREMENT and ANALYZE make is refused: a view or a trigger would run statements of
    # whoever made the file.
    own = (
        "type = 'table' AND name IN ('sqlite_sequence', 'sqlite_stat1', 'sqlite_stat4') AND sql LIKE 'CREATE TABLE sqlite_%(%'"
    )
    statements = connection.execute(f"SELECT sql FROM sqlite_master WHERE sql IS NOT NULL AND NOT ({own})")
    if version < 1 or sorted(str(sql) for (sql,) in statements) != sorted(SCHEMA):
        raise InputError(f"{where}: its tables are not those of a store of trials")
    # The whole check, indexes included: with one that has lost an entry a known plan would be measured again, unnoticed.
    faults = connection.execute("PRAGMA integrity_check(1)").fetchone()
    if faults is None or faults[0] != "ok":
        raise InputError(f"{where}: the database is damaged; restore a copy of it, or try `sqlite3 FILE .recover`")
