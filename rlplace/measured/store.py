"""`TrialStore`: trials on one or several clusters, with their problems, in one SQLite file."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import threading
import uuid
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rlplace.errors import InputError, show, whole_number
from rlplace.files import canonical_json, parse_json
from rlplace.measured.database import open_database, reported, writing
from rlplace.measured.rows import COLUMNS, plan_key, trial_from_row, trial_to_row
from rlplace.measured.site import Site
from rlplace.measured.trial import MAX_GROUPS, MAX_NAME, Fingerprint, Name, Trial
from rlplace.problem import Problem, problem_from_dict, problem_to_dict
from rlplace.records import build

MAX_TRIALS = 1_000_000
"""Trials that one call reads."""

MAX_PROBLEM_BYTES = 1 << 26
"""Size of a problem as JSON text."""

_CHUNK = 100
"""Rows in memory at once: each may hold a number per op."""
_SELECT = f"SELECT id, uid, plan_key, {', '.join(COLUMNS)} FROM trials"


class TrialStore:
    """A persistent set of trials. Every change is a transaction of its own: what a call has stored survives the end of the
    process. Several processes may use one file at once, and several threads one store.
    """

    def __init__(self, path: str | Path | None = None, *, create: bool = True) -> None:
        """Opens a store.

        Args:
            path: SQLite file, made where there is none; None: in memory, gone when it is closed.
            create: False: refuse a file that does not exist.

        Raises:
            InputError: Not a store of trials, a damaged one, or one of a newer version.
        """
        self.path = None if path is None else Path(path)
        self._where = "trials" if path is None else str(path)
        self._lock = threading.RLock()
        self._database = open_database(path, create=create)

    def close(self) -> None:
        """Closes the file; the store cannot be used any more."""
        with self._lock:
            self._database.close()

    def __enter__(self) -> TrialStore:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # Clusters and problems

    def add_site(self, site: Site) -> str:
        """Stores a cluster's description unless it is known; returns its fingerprint."""
        self._insert("sites", (site.fingerprint, site.name, canonical_json(dict(site.facts))))
        return site.fingerprint

    def add_problem(self, problem: Problem) -> str:
        """Stores a problem unless it is known; returns its fingerprint."""
        text = json.dumps(problem_to_dict(problem), allow_nan=False).encode()
        if len(text) > MAX_PROBLEM_BYTES or problem.num_groups > MAX_GROUPS:
            raise InputError(
                f"{self._where}: problem {problem.name[:80]!r} has {len(text)} bytes and {problem.num_groups} groups; "
                f"the limits are {MAX_PROBLEM_BYTES} and {MAX_GROUPS}"
            )
        sizes = problem.num_devices, problem.num_groups, problem.num_ops
        self._insert("problems", (problem.fingerprint, problem.name[:MAX_NAME], *sizes, zlib.compress(text, 6)))
        return problem.fingerprint

    def problems(self) -> dict[str, str]:
        """Names of all problems by fingerprint, in the order in which they were added."""
        rows = self._rows("SELECT fingerprint, name FROM problems ORDER BY rowid")
        return build(dict[Fingerprint, Name], dict(rows), f"{self._where}: problems")

    def problem(self, fingerprint: str) -> Problem:
        """A problem by its fingerprint."""
        where = f"{self._where}: problem {show(fingerprint)}"
        rows = self._rows("SELECT json FROM problems WHERE fingerprint = ?", fingerprint)
        if not rows:
            raise InputError(f"{where}: not known; `problems()` names those that are")
        try:
            problem = problem_from_dict(parse_json(_inflate(rows[0][0]), "problem"))
        except InputError as error:
            raise InputError(f"{where}: {error}") from None
        if problem.fingerprint != fingerprint:
            raise InputError(f"{where}: what is stored has another fingerprint")
        return problem

    # Trials

    def begin(self, trial: Trial) -> int:
        """Notes that a trial is about to run; returns the number to `finish` it with."""
        return self._add(trial, running=True)

    def finish(self, number: int, trial: Trial) -> None:
        """Replaces a running trial by what came of it; the plan and its conditions must be the same."""
        row, trial = _checked(trial, running=False)
        with self._writing() as database:
            stored = database.execute("SELECT plan_key, status FROM trials WHERE id = ?", (number,)).fetchone()
            if stored is None or stored[1] != "running":
                raise InputError(f"{self._where}: trial {show(number)} is {'not known' if stored is None else show(stored[1])}")
            if stored[0] != plan_key(trial):
                raise InputError(f"{self._where}: trial {number} began with another plan, or under other conditions")
            database.execute(f"UPDATE trials SET {', '.join(f'{name} = ?' for name in COLUMNS)} WHERE id = ?", (*row, number))

    def discard(self, number: int) -> None:
        """Forgets a trial that is still running, as if it had never begun."""
        with self._writing() as database:
            if not database.execute("DELETE FROM trials WHERE id = ? AND status = 'running'", (number,)).rowcount:
                raise InputError(f"{self._where}: trial {show(number)} is not running")

    def add(self, trial: Trial) -> int:
        """Stores a trial that has ended; returns its number."""
        return self._add(trial, running=False)

    def trials(
        self,
        problem: str | None = None,
        site: str | None = None,
        run: str | None = None,
        include_running: bool = False,
    ) -> list[Trial]:
        """Trials in the order in which they were added.

        Args:
            problem: Only those of the problem of this fingerprint.
            site: Only those of the cluster of this fingerprint.
            run: Only those of this run.
            include_running: Also those that have not ended.
        """
        asked = {"problem": problem, "site": site, "run": run}
        conditions = {f"{key} = ?": build(Name, value, f"trials: {key}") for key, value in asked.items() if value is not None}
        if not include_running:
            conditions["status != ?"] = "running"
        count = self._rows(f"SELECT count(*) FROM trials WHERE {_all(conditions)}", *conditions.values())[0][0]
        if count > MAX_TRIALS:
            raise InputError(
                f"{self._where}: {count} trials, the limit is {MAX_TRIALS}; ask for those of one problem, cluster or run"
            )
        return [trial for _, trial in self._select(conditions)]

    def interrupted(self, run: str) -> list[tuple[int, Trial]]:
        """Numbers and trials of a run that have begun and not ended."""
        conditions = {"run = ?": build(Name, run, "interrupted: run"), "status = ?": "running"}
        return list(self._select(conditions))

    # Rows

    def _add(self, trial: Trial, *, running: bool) -> int:
        row, trial = _checked(trial, running=running)
        columns = ("uid", "plan_key", *COLUMNS)
        text = f"INSERT INTO trials ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"
        with self._writing() as database:
            self._check_known(trial, self._where)
            return int(database.execute(text, (uuid.uuid4().bytes, plan_key(trial), *row)).lastrowid or 0)

    def _check_known(self, trial: Trial, where: str) -> None:
        """Refuses a trial whose problem or cluster the store does not know, or whose plan is not for its problem."""
        problem = show(trial.problem)
        found = self._rows("SELECT num_devices, num_groups FROM problems WHERE fingerprint = ?", trial.problem)
        if not found:
            raise InputError(f"{where}: problem {problem} is not in the store; add it first")
        if trial.site and not self._rows("SELECT 1 FROM sites WHERE fingerprint = ?", trial.site):
            raise InputError(f"{where}: cluster {show(trial.site)} is not in the store; add it first")
        sizes = (whole_number(size, f"{where}: a size of problem {problem}", 0, 1 << 31) for size in found[0])
        num_devices, num_groups = sizes
        if len(trial.device_of_group) != num_groups or max(trial.device_of_group, default=-1) >= num_devices:
            raise InputError(
                f"{where}: the plan is not for its problem, which has {num_groups} groups and {num_devices} devices"
            )

    def _select(self, conditions: dict[str, str]) -> Iterator[tuple[int, Trial]]:
        """Checked trials in the order of adding; read in parts, so that no writer waits for a long read."""
        last = -1 << 63
        text = f"{_SELECT} WHERE {_all(conditions)} AND id > ? ORDER BY id LIMIT {_CHUNK}"
        while rows := self._rows(text, *conditions.values(), last):
            for number, uid, key, *row in rows:
                at = f"{self._where}: trial {show(number)}"
                trial = trial_from_row(row, at)
                self._check_known(trial, at)
                if key != plan_key(trial) or not isinstance(uid, bytes) or len(uid) != 16:
                    raise InputError(f"{at}: its key does not fit its plan; the row was changed")
                if whole_number(number, f"{at}: id", 1, (1 << 63) - 1) <= last:
                    raise InputError(f"{at}: not in order; the database is damaged")
                last = number
                yield number, trial

    def _insert(self, table: str, values: tuple[Any, ...]) -> None:
        with self._writing() as database:
            database.execute(f"INSERT OR IGNORE INTO {table} VALUES ({', '.join('?' * len(values))})", values)

    def _rows(self, text: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._lock, reported(self._where):
            return self._database.execute(text, values).fetchall()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._lock, reported(self._where), writing(self._database):
            yield self._database


def _checked(trial: Trial, *, running: bool) -> tuple[tuple[Any, ...], Trial]:
    row, trial = trial_to_row(trial)
    if (trial.status == "running") != running:
        what = "expected 'running'; use `add` for one that has ended" if running else "it has not ended; use `begin`"
        raise InputError(f"trial: its status is {trial.status!r}: {what}")
    return row, trial


def _all(conditions: Iterable[str]) -> str:
    return " AND ".join(("1", *conditions))


def _inflate(blob: Any) -> str:
    """Decompresses at most `MAX_PROBLEM_BYTES`, however many the blob would make."""
    if not isinstance(blob, bytes):
        raise InputError("expected compressed JSON")
    inflater = zlib.decompressobj()
    try:
        data = inflater.decompress(blob, MAX_PROBLEM_BYTES + 1)
        if len(data) > MAX_PROBLEM_BYTES:
            raise InputError(f"more than {MAX_PROBLEM_BYTES} bytes of JSON")
        if not inflater.eof:
            raise InputError("the compressed JSON is cut off")
        return data.decode()
    except zlib.error as error:
        raise InputError(f"cannot be decompressed: {error}") from None
    except UnicodeDecodeError:
        raise InputError("not UTF-8 text") from None
