"""The file of a comparison: every row is on disk as soon as it is there, and a comparison goes on where it stopped.

``*.jsonl``: a header line, then a line a problem and a row, appended. A last line that was cut off is dropped. ``*.json``: one
object, written anew and atomically for every row. Without a path nothing is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from rlplace.comparing.records import FORMAT, VERSION, ComparisonRow, ProblemInfo, Settings, Summary, document
from rlplace.comparing.rowfile import Entry, RowFile
from rlplace.errors import InputError, show
from rlplace.files import check_keys, check_output, read_json, write_json
from rlplace.records import build


class Store:
    """The problems and rows so far.

    Attributes:
        settings: What every row was made under.
        problems: By key.
        rows: By key, in the order in which they were made.
    """

    def __init__(self, settings: Settings, path: str | Path | None = None, *, resume: bool = False) -> None:
        """Opens a comparison.

        Args:
            settings: What every row was made under.
            path: ``*.json`` or ``*.jsonl``; None keeps everything in memory.
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
        if self.path.suffix not in (".json", ".jsonl"):
            raise InputError(f"{path}: a comparison is written as *.json or *.jsonl; choose one of these names")
        check_output(self.path)
        self._lines = RowFile(self.path, FORMAT, VERSION, ("problem", "row")) if self.path.suffix == ".jsonl" else None
        if self.path.exists():
            if not resume:
                raise InputError(f"{path}: exists; --resume goes on with it, or choose another name")
            self._load()
        elif self._lines is not None:
            self._lines.rewrite(asdict(settings))

    def finish(self, summaries: Sequence[Summary], *, complete: bool) -> None:
        """Writes the summaries, which only a ``*.json`` file has a place for."""
        if self.path is not None and self._lines is None:
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
        if self.path is None:
            return
        if self._lines is None:
            self.finish((), complete=False)
        else:
            self._lines.append(kind, asdict(record))

    def _load(self) -> None:
        settings, entries = self._read_object() if self._lines is None else self._lines.read()
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

    def _read_object(self) -> tuple[Any, list[Entry]]:
        assert self.path is not None
        data = read_json(self.path, FORMAT, VERSION)
        problems, rows = data.get("problems", []), data.get("rows", [])
        if not isinstance(problems, list) or not isinstance(rows, list):
            raise InputError(f"{self.path}: problems and rows must be lists")
        rows = [{k: v for k, v in row.items() if k != "feasible"} if isinstance(row, dict) else row for row in rows]
        kinds = (("problem", problems), ("row", rows))
        return data.get("settings"), [
            (kind, item, f"{self.path}: {kind} {number}") for kind, items in kinds for number, item in enumerate(items)
        ]

    def _check_settings(self, data: Any) -> None:
        check_keys(data, asdict(self.settings), (), f"{self.path}: settings")
        known = asdict(build(Settings, data, f"{self.path}: settings"))
        for key, value in asdict(self.settings).items():
            if known[key] != value:
                raise InputError(
                    f"{self.path}: made with {key} {_told(known[key])}, now {_told(value)}; rows under other settings do not "
                    "compare: use the same, or another --out"
                )


def _told(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else show(value)
