"""The file of a comparison: every row is on disk as soon as it is there, and a comparison goes on where it stopped.

``*.jsonl``: a header line, then a line a problem and a row, appended. A last line that was cut off is dropped. ``*.json``: one
object, written anew and atomically for every row. Without a path nothing is written.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlplace.comparing.records import FORMAT, VERSION, ProblemInfo, Row, Settings, Summary, as_dict, document, from_dict
from rlplace.errors import InputError, show
from rlplace.files import check_header, check_keys, check_output, parse_json, read_json, read_text, write_json, write_text
from rlplace.limits import FORMAT_BYTES


class Store:
    """The problems and rows so far.

    Attributes:
        settings: Of every row.
        problems: By key.
        rows: By key, in the order in which they were made.
    """

    def __init__(self, settings: Settings, path: str | Path | None = None, *, resume: bool = False) -> None:
        """Opens a comparison.

        Args:
            settings: Of every row.
            path: ``*.json`` or ``*.jsonl``; None keeps everything in memory.
            resume: Go on with the file if there is one.

        Raises:
            InputError: The file exists and `resume` is False, is damaged, or was made under other settings.
        """
        self.settings = settings
        self.problems: dict[tuple[str, str, str], ProblemInfo] = {}
        self.rows: dict[Any, Row] = {}
        self.path = None if path is None else Path(path)
        if self.path is None:
            return
        if self.path.suffix not in (".json", ".jsonl"):
            raise InputError(f"{path}: a comparison is written as *.json or *.jsonl; choose one of these names")
        check_output(self.path)
        self._lines = self.path.suffix == ".jsonl"
        if self.path.exists():
            if not resume:
                raise InputError(f"{path}: exists; --resume goes on with it, or choose another name")
            self._load()
        elif self._lines:
            write_text(self.path, _line({"format": FORMAT, "version": VERSION, "settings": as_dict(settings)}))

    def finish(self, summaries: Sequence[Summary], *, complete: bool) -> None:
        """Writes the summaries, which only a ``*.json`` file has a place for."""
        if self.path is not None and not self._lines:
            write_json(
                self.path, document(self.settings, self.problems.values(), self.rows.values(), summaries, complete=complete)
            )

    def add_problem(self, info: ProblemInfo) -> None:
        """Adds a problem; one that is known must be the same.

        Raises:
            InputError: The file has another problem under this name.
        """
        known = self.problems.get(info.key)
        if known is None:
            self.problems[info.key] = info
            self._write({"problem": as_dict(info)})
        elif known.fingerprint != info.fingerprint:
            raise InputError(
                f"{self.path}: {info.model} on {info.cluster or 'its devices'} was another problem "
                f"({known.fingerprint[:12]}, now {info.fingerprint[:12]}); use the options it was made with, or another --out"
            )

    def add_row(self, row: Row) -> None:
        """Adds a finished row."""
        self.rows[row.key] = row
        self._write({"row": as_dict(row)})

    def _write(self, data: dict[str, Any]) -> None:
        if self.path is None:
            return
        if not self._lines:
            self.finish((), complete=False)
            return
        try:
            handle = os.open(self.path, os.O_WRONLY | os.O_APPEND)  # the file is there: it has its header
            try:
                line = _line(data).encode()
                size = os.fstat(handle).st_size
                if os.write(handle, line) < len(line):  # in one call, so that lines of two processes do not mix
                    os.ftruncate(handle, size)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(handle)
            finally:
                os.close(handle)
        except OSError as error:
            raise InputError(f"{self.path}: cannot be written: {error.strerror or error}") from None

    def _load(self) -> None:
        assert self.path is not None
        problems: list[Any]
        rows: list[Any]
        if self._lines:
            header, problems, rows = self._read_lines()
        else:
            header = read_json(self.path, FORMAT, VERSION)
            problems, rows = header.get("problems", []), header.get("rows", [])
            if not isinstance(problems, list) or not isinstance(rows, list):
                raise InputError(f"{self.path}: problems and rows must be lists")
            rows = [{k: v for k, v in row.items() if k != "feasible"} if isinstance(row, dict) else row for row in rows]
        self._check_settings(header.get("settings"))
        for number, data in enumerate(problems):
            info = from_dict(ProblemInfo, data, f"{self.path}: problem {number}")
            self.problems[info.key] = info
        for number, data in enumerate(rows):
            row = from_dict(Row, data, f"{self.path}: row {number}")
            if (row.model, row.cluster, row.view) not in self.problems:
                raise InputError(f"{self.path}: row {number}: its problem {row.model!r} is not in the file; start another file")
            self.rows[row.key] = row

    def _read_lines(self) -> tuple[dict[str, Any], list[Any], list[Any]]:
        assert self.path is not None
        text = read_text(self.path, FORMAT_BYTES[FORMAT])
        whole = text[: text.rfind("\n") + 1]
        if whole != text:  # the writer was stopped within a line
            write_text(self.path, whole)
        parsed = []
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                parsed.append(parse_json(line, f"{self.path}: line {number}"))
            except InputError as error:
                raise InputError(f"{error}; start another file") from None
        if not parsed:
            raise InputError(f"{self.path}: holds no comparison; delete it, or choose another name")
        header = check_header(parsed[0], FORMAT, VERSION, str(self.path))
        found: dict[str, list[Any]] = {"problem": [], "row": []}
        for number, entry in enumerate(parsed[1:], start=2):
            if not isinstance(entry, dict) or len(entry) != 1 or next(iter(entry)) not in found:
                raise InputError(f"{self.path}: line {number}: expected a problem or a row, found {show(entry)}")
            kind, data = next(iter(entry.items()))
            found[kind].append(data)
        return header, found["problem"], found["row"]

    def _check_settings(self, data: Any) -> None:
        check_keys(data, as_dict(self.settings), (), f"{self.path}: settings")
        known = as_dict(from_dict(Settings, data, f"{self.path}: settings"))
        for key, value in as_dict(self.settings).items():
            if known[key] != value:
                raise InputError(
                    f"{self.path}: made with {key} {_told(known[key])}, now {_told(value)}; rows under other settings do not "
                    "compare: use the same, or another --out"
                )


def _told(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else show(value)


def _line(data: dict[str, Any]) -> str:
    return json.dumps(data, allow_nan=False) + "\n"
