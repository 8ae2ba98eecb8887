"""The file of a comparison: every row is written as soon as it is made, and a comparison resumes where it stopped.

``*.jsonl``: a header line, then a line a problem and a row, appended. A last line that was cut off is dropped. Without a path
nothing is written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from rlplace.errors import InputError, show
from rlplace.explanation.compare.records import FORMAT, VERSION, ComparisonRow, ProblemInfo, Settings
from rlplace.files import check_keys, check_output
from rlplace.lines import LineFile
from rlplace.records import build


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
        check_output(self.path)
        self._lines = LineFile(self.path, FORMAT, VERSION)
        if self.path.exists():
            if not resume:
                raise InputError(f"{path}: exists; --resume goes on with it, or choose another name")
            self._load()
        else:
            self._lines.begin(settings=asdict(settings))

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
            self._lines.append({kind: asdict(record)})

    def _load(self) -> None:
        settings, entries = self._lines.records(("problem", "row"))
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
