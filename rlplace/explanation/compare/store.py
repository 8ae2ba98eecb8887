"""The file of a comparison: every row is written as soon as it is made, and a comparison resumes where it stopped.

``*.jsonl``: a header line, then a line a problem and a row, appended. A last line that was cut off is dropped. Without a path
nothing is written.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from rlplace.errors import InputError, show
from rlplace.explanation.compare.records import FORMAT, VERSION, ComparisonRow, ProblemInfo, Settings
from rlplace.files import check_header, check_keys, check_output, parse_json, read_text, write_text
from rlplace.limits import FORMAT_BYTES
from rlplace.records import build

Entry = tuple[str, Any, str]
"""Kind and data of a record, and where it stands, for messages."""


class RowFile:
    """A file with a header and records of some kinds, which one process writes.

    Attributes:
        path: Where the file is.
        kinds: Names of the records.
    """

    def __init__(self, path: Path, format_name: str, version: int, kinds: Sequence[str]) -> None:
        check_output(path)
        self.path, self.kinds = path, tuple(kinds)
        self._format, self._version = format_name, version

    def begin(self, settings: Mapping[str, Any]) -> None:
        """Writes the header, anew."""
        write_text(self.path, _line({"format": self._format, "version": self._version, "settings": dict(settings)}))

    def append(self, kind: str, data: Mapping[str, Any]) -> None:
        """Adds a record.

        Raises:
            InputError: The file cannot be written; it then ends where it ended before.
        """
        try:
            handle = os.open(self.path, os.O_WRONLY | os.O_APPEND)  # the file is there: it has its header
            try:
                line = _line({kind: dict(data)}).encode()
                size = os.fstat(handle).st_size
                if os.write(handle, line) < len(line):  # in one call, so that lines of two processes do not mix
                    os.ftruncate(handle, size)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(handle)
            finally:
                os.close(handle)
        except OSError as error:
            raise InputError(f"{self.path}: cannot be written: {error.strerror or error}") from None

    def read(self, *, repair: bool = True) -> tuple[Any, list[Entry]]:
        """Returns the settings of the header, and the records in order.

        Args:
            repair: Also remove a last line that was cut off.

        Raises:
            InputError: The file is empty, damaged, or of another format.
        """
        text = read_text(self.path, FORMAT_BYTES.get(self._format))
        whole = text[: text.rfind("\n") + 1]
        if whole != text and repair:
            write_text(self.path, whole)
        lines = whole.splitlines()
        if not lines:
            raise InputError(f"{self.path}: holds no {self._format}; delete it, or choose another name")
        header = check_header(self._parse(lines[0], 1), self._format, self._version, str(self.path))
        return header.get("settings"), [self._entry(line, number) for number, line in enumerate(lines[1:], start=2)]

    def _entry(self, line: str, number: int) -> Entry:
        data, where = self._parse(line, number), f"{self.path}: line {number}"
        if not isinstance(data, dict) or len(data) != 1 or next(iter(data)) not in self.kinds:
            raise InputError(f"{where}: expected one of {', '.join(self.kinds)}, found {show(data)}")
        kind, value = next(iter(data.items()))
        return kind, value, where

    def _parse(self, line: str, number: int) -> Any:
        try:
            return parse_json(line, f"{self.path}: line {number}")
        except InputError as error:
            raise InputError(f"{error}; start another file") from None


def _line(data: Mapping[str, Any]) -> str:
    return json.dumps(data, allow_nan=False) + "\n"


class Store:
    """The problems and rows so far.

    Attributes:
        settings: Budgets and seeds under which every row was made.
        problems: By key.
        rows: By key, in the order in which they were made.
    """

    def __init__(self, settings: Settings, path: str | Path | None = None, *, resume: bool = False) -> None:
        """Opens a comparison.

        Args:
            settings: Budgets and seeds under which every row was made.
            path: ``*.jsonl``; None keeps everything in memory.
            resume: Go on with the file if there is one.

        Raises:
            InputError: The file exists and `resume` is False, is damaged, or was made under other settings.
        """
        self.settings = settings
        self.problems: dict[tuple[str, str, str], ProblemInfo] = {}
        self.rows: dict[Any, ComparisonRow] = {}
        self.path = None if path is None else Path(path)
        if self.path is None:
            return
        if self.path.suffix != ".jsonl":
            raise InputError(f"{path}: rows are written as *.jsonl; choose such a name (--json prints one object)")
        self._lines = RowFile(self.path, FORMAT, VERSION, ("problem", "row"))
        if self.path.exists():
            if not resume:
                raise InputError(f"{path}: exists; --resume goes on with it, or choose another name")
            self._load()
        else:
            self._lines.begin(asdict(settings))

    def add_problem(self, info: ProblemInfo) -> None:
        """Adds a problem; one that is known must be the same.

        Raises:
            InputError: The file has another problem under this name.
        """
        known = self.problems.get(info.key)
        if known is None:
            self.problems[info.key] = info
            self._write("problem", info)
        elif known.fingerprint != info.fingerprint:
            raise InputError(
                f"{self.path}: {info.model} on {info.cluster or 'its devices'} was another problem "
                f"({known.fingerprint[:12]}, now {info.fingerprint[:12]}); use the options it was made with, or another --out"
            )

    def add_row(self, row: ComparisonRow) -> None:
        """Adds a finished row."""
        self.rows[row.key] = row
        self._write("row", row)

    def _write(self, kind: str, record: ProblemInfo | ComparisonRow) -> None:
        if self.path is not None:
            self._lines.append(kind, asdict(record))

    def _load(self) -> None:
        settings, entries = self._lines.read()
        self._check_settings(settings)
        for kind, data, where in entries:
            if kind == "problem":
                info = build(ProblemInfo, data, where)
                self.problems[info.key] = info
                continue
            row = build(ComparisonRow, data, where)
            if (row.model, row.cluster, row.view) not in self.problems:
                raise InputError(f"{where}: its problem {row.model!r} is not in the file; start another file")
            self.rows[row.key] = row

    def _check_settings(self, data: Any) -> None:
        check_keys(data, asdict(self.settings), (), f"{self.path}: settings")
        known = asdict(build(Settings, data, f"{self.path}: settings"))
        for key, value in asdict(self.settings).items():
            if known[key] != value:
                raise InputError(
                    f"{self.path}: made with {key} {_brief(known[key])}, now {_brief(value)}; rows under other settings do not "
                    "compare: use the same, or another --out"
                )


def _brief(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else show(value)
