"""The file of the benchmark: JSON lines, a header and then what was found out, each on disk as soon as it is there.

A last line that was cut off is dropped. Rows of other settings, other problems, other weights or another program under the same
name are refused; rows that failed are run again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from benchmarks.agent.records import INFEASIBLE, OK, BenchmarkRow, CaseInfo, Method
from rlplace.comparing.store import RowFile
from rlplace.errors import InputError, show
from rlplace.records import build

FORMAT, VERSION = "rlplace.agent_benchmark", 1
KINDS = ("case", "method", "row", "run")


class Store:
    """Everything so far; the only writer of its file.

    Attributes:
        settings: What all rows have in common: the set of cases and the versions.
        cases, methods, rows: By name, and by key.
        runs: How the rows were made: processes, cores, load averages.
    """

    def __init__(self, settings: Mapping[str, Any], path: str | Path | None = None) -> None:
        """Opens a file and goes on with it, or begins it.

        Args:
            settings: See the attribute.
            path: ``*.jsonl``; None keeps everything in memory.

        Raises:
            InputError: The file is damaged or was made under other settings.
        """
        self.settings = dict(settings)
        self.cases: dict[str, CaseInfo] = {}
        self.methods: dict[str, Method] = {}
        self.rows: dict[tuple[str, str, str, int], BenchmarkRow] = {}
        self.runs: list[dict[str, Any]] = []
        self.path = None if path is None else Path(path)
        self._file: RowFile | None = None
        if self.path is None:
            return
        self._file = RowFile(self.path, FORMAT, VERSION, KINDS)
        if self.path.exists():
            self._take(self._file, check=True)
        else:
            self._rewrite()

    @staticmethod
    def read(path: str | Path) -> Store:
        """A file as it is, whatever its settings, to make tables of it; nothing is written."""
        store = Store({})
        store._take(RowFile(Path(path), FORMAT, VERSION, KINDS), check=False)
        return store

    def add_case(self, info: CaseInfo) -> None:
        """Adds a case; one that is known must be the same problem with the same floor."""
        known = self.cases.get(info.name)
        if known is None:
            self.cases[info.name] = info
            self._write("case", asdict(info))
        else:
            self.check_case(info.name, info.fingerprint)
            if known.floor != info.floor:
                raise InputError(f"{self.path}: {info.name} has two floors; rows from different starts do not compare")

    def check_case(self, name: str, fingerprint: str) -> None:
        """Refuses another problem under a known name."""
        known = self.cases.get(name)
        if known is not None and known.fingerprint != fingerprint:
            raise InputError(
                f"{self.path}: {name} was another problem ({known.fingerprint[:12]}, now {fingerprint[:12]}); use another --out"
            )

    def add_method(self, method: Method) -> None:
        """Adds a method; one that is known must be the same.

        Raises:
            InputError: Its weights, options or program differ from those of the rows in the file.
        """
        known = self.methods.get(method.name)
        if known is None:
            self.methods[method.name] = method
            self._write("method", asdict(method))
            return
        for key in ("role", "fingerprint", "options", "code"):
            before, now = getattr(known, key), getattr(method, key)
            if before != now:
                raise InputError(
                    f"{self.path}: rows of {method.name} were made with {key} {_short(before)}, now {_short(now)}; "
                    f"--drop {method.name} removes them, or use another --out"
                )

    def add_row(self, row: BenchmarkRow) -> None:
        """Adds a finished row; one that failed before gives way."""
        self.rows[row.key] = row
        self._write("row", asdict(row))

    def add_run(self, run: Mapping[str, Any]) -> None:
        """Notes how the rows that follow are made."""
        self.runs.append(dict(run))
        self._write("run", dict(run))

    def done(self, key: tuple[str, str, str, int]) -> bool:
        """Whether a row is there and did not fail."""
        row = self.rows.get(key)
        return row is not None and row.status in (OK, INFEASIBLE)

    def drop(self, names: Collection[str]) -> int:
        """Removes methods with their rows; returns the number of rows."""
        for name in names:
            if name not in self.methods:
                raise InputError(f"{self.path}: holds no rows of {show(name)}; it holds {', '.join(self.methods)}")
        before = len(self.rows)
        self.methods = {name: method for name, method in self.methods.items() if name not in names}
        self.rows = {key: row for key, row in self.rows.items() if row.method not in names}
        self._rewrite()
        return before - len(self.rows)

    def _rewrite(self) -> None:
        if self._file is not None:
            records = (("case", self.cases), ("method", self.methods), ("row", self.rows))
            entries = [(kind, asdict(record)) for kind, held in records for record in held.values()]  # type: ignore[attr-defined]
            self._file.rewrite(self.settings, [*entries, *(("run", run) for run in self.runs)])

    def _write(self, kind: str, data: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.append(kind, data)

    def _take(self, file: RowFile, *, check: bool) -> None:
        settings, entries = file.read(repair=check)
        known = settings if isinstance(settings, dict) else {}
        if check and known != self.settings:
            keys = [key for key in {**known, **self.settings} if known.get(key) != self.settings.get(key)]
            changes = ", ".join(f"{key} {show(known.get(key))}, now {show(self.settings.get(key))}" for key in keys)
            raise InputError(f"{file.path}: made with {changes}; rows under other settings do not compare: use another --out")
        self.settings = known
        for kind, data, where in entries:
            if kind == "case":
                info = build(CaseInfo, data, where)
                self.cases[info.name] = info
            elif kind == "method":
                method = build(Method, data, where)
                self.methods[method.name] = method
            elif kind == "row":
                row = build(BenchmarkRow, data, where)
                if row.case not in self.cases or row.method not in self.methods:
                    raise InputError(f"{where}: its case {row.case!r} or method {row.method!r} is not in the file")
                self.rows[row.key] = row
            elif isinstance(data, dict):
                self.runs.append(data)
            else:
                raise InputError(f"{where}: run must be an object, found {show(data)}")


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:12]
