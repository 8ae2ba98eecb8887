"""`TrialStore`: trials on one or several clusters, with their problems, in one SQLite file."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import threading
import uuid
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rlplace.errors import InputError, show
from rlplace.files import canonical_json, parse_json
from rlplace.measured.database import open_database, reported, writing
from rlplace.measured.rows import (
    COLUMNS,
    MAX_GROUPS,
    check_fingerprint,
    check_text,
    plan_key,
    trial_from_row,
    trial_to_row,
)
from rlplace.measured.site import Site
from rlplace.measured.trial import Trial
from rlplace.problem import Problem, problem_from_dict, problem_to_dict

MAX_TRIALS = 1_000_000
"""Trials that one call reads."""

MAX_PROBLEM_BYTES = 1 << 26
"""Size of a problem as JSON text."""

_CHUNK = 500
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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # Clusters and problems

    def add_site(self, site: Site) -> str:
        """Stores a cluster's description unless it is known; returns its fingerprint."""
        self._insert("sites", (site.fingerprint, site.name, canonical_json(dict(site.facts))))
        return site.fingerprint

    def sites(self) -> list[Site]:
        """All clusters, in the order in which they were added."""
        return [self._site(row) for row in self._rows("SELECT fingerprint, name, facts FROM sites ORDER BY rowid")]

    def site(self, fingerprint: str) -> Site:
        """A cluster by its fingerprint."""
        rows = self._rows("SELECT fingerprint, name, facts FROM sites WHERE fingerprint = ?", fingerprint)
        if not rows:
            raise InputError(f"{self._where}: there is no cluster {show(fingerprint)}; `sites()` names those that are known")
        return self._site(rows[0])

    def add_problem(self, problem: Problem) -> str:
        """Stores a problem unless it is known; returns its fingerprint."""
        text = json.dumps(problem_to_dict(problem), allow_nan=False).encode()
        if len(text) > MAX_PROBLEM_BYTES or problem.num_groups > MAX_GROUPS:
            raise InputError(
                f"{self._where}: problem {problem.name[:80]!r} has {len(text)} bytes and {problem.num_groups} groups; "
                f"the limits are {MAX_PROBLEM_BYTES} and {MAX_GROUPS}"
            )
        sizes = problem.num_devices, problem.num_groups, problem.num_ops
        self._insert("problems", (problem.fingerprint, problem.name, *sizes, zlib.compress(text, 6)))
        return problem.fingerprint

    def problems(self) -> dict[str, str]:
        """Names of all problems by fingerprint, in the order in which they were added."""
        rows = self._rows("SELECT fingerprint, name FROM problems ORDER BY rowid")
        where = f"{self._where}: problems"
        return {check_fingerprint(found, where): check_text(name, where) for found, name in rows}

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
        if trial.status != "running":
            raise InputError(f"begin: the trial is {show(trial.status)}; expected 'running'")
        return self._add(trial)

    def finish(self, number: int, trial: Trial) -> None:
        """Replaces a running trial by what came of it; the plan and its conditions must be the same."""
        if trial.status == "running":
            raise InputError("finish: the trial is still 'running'")
        row, trial = trial_to_row(trial)
        with self._writing() as database:
            found = database.execute("SELECT plan_key, status FROM trials WHERE id = ?", (number,)).fetchone()
            if found is None or found[1] != "running":
                raise InputError(f"{self._where}: trial {show(number)} is {'not known' if found is None else found[1]}")
            if found[0] != plan_key(trial.key):
                raise InputError(f"{self._where}: trial {number} began with another plan, or under other conditions")
            database.execute(f"UPDATE trials SET {', '.join(f'{name} = ?' for name in COLUMNS)} WHERE id = ?", (*row, number))

    def discard(self, number: int) -> None:
        """Forgets a trial that is still running, as if it had never begun."""
        with self._writing() as database:
            if not database.execute("DELETE FROM trials WHERE id = ? AND status = 'running'", (number,)).rowcount:
                raise InputError(f"{self._where}: trial {show(number)} is not running")

    def add(self, trial: Trial) -> int:
        """Stores a trial that has ended; returns its number."""
        if trial.status == "running":
            raise InputError("add: the trial is still 'running'; use begin")
        return self._add(trial)

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
        conditions = {"problem = ?": problem, "site = ?": site, "run = ?": run}
        found = self._select({text: value for text, value in conditions.items() if value is not None}, include_running)
        return [trial for _, _, trial in found]

    def lookup(
        self,
        problem: str,
        site: str,
        device_of_group: Sequence[int],
        microbatches: int,
        schedule: str,
        mode: str = "computed",
        priority: Sequence[float] | None = None,
    ) -> Trial | None:
        """The latest trial of a plan that has ended and is no anchor, None where there is none.

        The arguments are those of `Trial.key` in its order. Latest is by `began_at`, then by the order of adding.
        """
        _, asked = trial_to_row(
            Trial(
                problem=problem,
                site=site,
                device_of_group=tuple(device_of_group),
                microbatches=microbatches,
                schedule=schedule,
                status="running",
                mode=mode,
                priority=None if priority is None else tuple(priority),
            )
        )
        conditions = {"plan_key = ?": plan_key(asked.key), "anchor = ?": 0}
        found = [(trial.began_at, number, trial) for number, _, trial in self._select(conditions)]
        return max(found, key=lambda item: item[:2])[2] if found else None

    def interrupted(self, run: str) -> list[tuple[int, Trial]]:
        """Numbers and trials of a run that have begun and not ended."""
        found = self._select({"run = ?": run, "status = ?": "running"}, include_running=True)
        return [(number, trial) for number, _, trial in found]

    def merge(self, other_path: str | Path) -> int:
        """Copies what another store holds and this one does not.

        A trial is the same in two files when it was written once and then copied with its file; two measurements of one plan
        are two trials. Of the same trial the one stored here is kept, unless it is still running and the other has ended.
        Trials that run in the other store are left there.

        Args:
            other_path: The other store's file, which is not changed. All of it is checked before anything is copied.

        Returns:
            How many trials came over.
        """
        with TrialStore(other_path, create=False) as other:
            for _ in other._select({}):
                pass
            problems = [other.problem(fingerprint) for fingerprint in other.problems()]
            for site in other.sites():
                self.add_site(site)
            for problem in problems:
                self.add_problem(problem)
            return sum(self._take(uid, trial) for _, uid, trial in other._select({}))

    # Rows

    def _add(self, trial: Trial) -> int:
        row, trial = trial_to_row(trial)
        with self._writing() as database:
            return self._insert_trial(database, uuid.uuid4().bytes, row, trial)

    def _take(self, uid: bytes, trial: Trial) -> int:
        row, trial = trial_to_row(trial)
        with self._writing() as database:
            same = database.execute("SELECT id, status FROM trials WHERE uid = ?", (uid,)).fetchone()
            if same is not None and same[1] != "running":
                return 0
            if same is not None:
                database.execute("DELETE FROM trials WHERE id = ?", (same[0],))
            self._insert_trial(database, uid, row, trial)
            return 1

    def _insert_trial(self, database: sqlite3.Connection, uid: bytes, row: tuple[Any, ...], trial: Trial) -> int:
        self._check_known(database, trial, self._where)
        columns = ("uid", "plan_key", *COLUMNS)
        done = database.execute(
            f"INSERT INTO trials ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})",
            (uid, plan_key(trial.key), *row),
        )
        return int(done.lastrowid or 0)

    def _check_known(self, database: sqlite3.Connection, trial: Trial, where: str) -> None:
        sizes = database.execute(
            "SELECT num_devices, num_groups, num_ops FROM problems WHERE fingerprint = ?", (trial.problem,)
        ).fetchone()
        if sizes is None:
            raise InputError(f"{where}: problem {show(trial.problem)} is not in the store; add it first")
        known = trial.site == "" or database.execute("SELECT 1 FROM sites WHERE fingerprint = ?", (trial.site,)).fetchone()
        if not known:
            raise InputError(f"{where}: cluster {show(trial.site)} is not in the store; add it first")
        num_devices, num_groups, num_ops = sizes
        if len(trial.device_of_group) != num_groups or max(trial.device_of_group, default=-1) >= num_devices:
            raise InputError(f"{where}: the plan is not for a problem of {num_groups} groups on {num_devices} devices")
        if trial.priority is not None and len(trial.priority) != num_ops:
            raise InputError(f"{where}: {len(trial.priority)} priorities, the problem has {num_ops} ops")

    def _select(self, conditions: dict[str, Any], include_running: bool = False) -> Iterator[tuple[int, bytes, Trial]]:
        """Checked trials in the order of adding; in parts, so that no writer waits for a long read."""
        texts = [*conditions, *(() if include_running else ("status != 'running'",))]
        last, read = 0, 0
        while True:
            where = " AND ".join((*texts, "id > ?"))
            rows = self._rows(f"{_SELECT} WHERE {where} ORDER BY id LIMIT {_CHUNK}", *conditions.values(), last)
            for number, uid, key, *row in rows:
                at = f"{self._where}: trial {show(number)}"
                trial = trial_from_row(row, at)
                with self._reading() as database:
                    self._check_known(database, trial, at)
                if key != plan_key(trial.key) or not isinstance(uid, bytes) or len(uid) != 16:
                    raise InputError(f"{at}: its key does not fit its plan; the row was changed")
                yield number, uid, trial
                last = number
            read += len(rows)
            if len(rows) < _CHUNK:
                return
            if read >= MAX_TRIALS:
                raise InputError(f"{self._where}: more than {MAX_TRIALS} trials; ask for those of one problem, cluster or run")

    def _site(self, row: Sequence[Any]) -> Site:
        fingerprint, name, facts = row
        where = f"{self._where}: cluster {show(fingerprint)}"
        site = Site(check_text(name, where), parse_json(check_text(facts, where, 1 << 20), where))
        if site.fingerprint != fingerprint:
            raise InputError(f"{where}: what is stored has another fingerprint")
        return site

    def _insert(self, table: str, values: tuple[Any, ...]) -> None:
        with self._writing() as database:
            database.execute(f"INSERT OR IGNORE INTO {table} VALUES ({', '.join('?' * len(values))})", values)

    def _rows(self, text: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._reading() as database:
            return database.execute(text, values).fetchall()

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self._lock, reported(self._where):
            yield self._database

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._lock, reported(self._where), writing(self._database):
            yield self._database


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
