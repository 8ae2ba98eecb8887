"""Submissions: their records, reading them from anyone, and the exact check of every plan.

A submission is small regular files inside its own folder, strict JSON and TOML, no code. Every plan is simulated again, and
must be what the submission says.
"""

from __future__ import annotations

import io
import math
import re
import stat
import tomllib
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta

from benchmarks.agent.records import Budget
from rlplace.agents.problems.cases import ProblemCase
from rlplace.errors import InputError, show, unknown_name
from rlplace.files import parse_json, read_bytes
from rlplace.records import Record, Whole, build
from rlplace.simulator import simulate

BUDGETS = ("one shot", "256 calls", "4096 calls", "1 s", "5 s")
"""Classes of the board, in its order."""

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
"""Names of submissions: they are folders, and stand in the page."""

_FORBIDDEN = frozenset("<>|`[]\\\u2028\u2029")
_LINK = re.compile(r"https://[A-Za-z0-9._~/?#@!$&'*+,;=%-]+|docs/[a-z0-9_/-]+\.md")

Line = Annotated[str, Meta(min_length=1, max_length=200)]
Paragraph = Annotated[str, Meta(min_length=20, max_length=2000)]
Positive = Annotated[float, Meta(gt=0.0, le=1e9)]


class Versions(Record, frozen=True):
    """Versions that made the plans; "none" where nothing of it was used."""

    rlplace: Line
    python: Line
    torch: Line


class Card(Record, frozen=True):
    """``card.toml``.

    Attributes:
        name: Name of the folder.
        authors: Who made it.
        method: What it does, in one paragraph.
        link: Where it is described, or its code: an https:// address, or a page of this repository's docs.
        kind: What the method is.
        budget: Class, see `BUDGETS`.
        hardware: On what it ran.
        seeds: Seeds of its random choices; one plan a case is submitted all the same.
        date: Day, ``YYYY-MM-DD``.
        versions: Versions of the libraries.
    """

    name: Line
    authors: Line
    method: Paragraph
    link: Line
    kind: Literal["heuristic", "search", "learned", "exact"]
    budget: Literal["one shot", "256 calls", "4096 calls", "1 s", "5 s"]
    hardware: Line
    seeds: Annotated[list[Whole], Meta(min_length=1, max_length=100)]
    date: Line
    versions: Versions

    def __post_init__(self) -> None:
        """Refuses what would break the page, or hide in it."""
        texts = {key: getattr(self, key) for key in ("name", "authors", "method", "link", "hardware")}
        texts.update({f"versions.{key}": getattr(self.versions, key) for key in ("rlplace", "python", "torch")})
        for key, text in texts.items():
            for character in text:
                if character in _FORBIDDEN or not character.isprintable():
                    raise ValueError(
                        f"{key} holds {show(character)}; write plain text in one line, without any of < > | ` [ ] \\"
                    )
        if not NAME.fullmatch(self.name):
            raise ValueError(f"name is {show(self.name)}; use small letters, digits, '.', '_' and '-', at most 64")
        if not _LINK.fullmatch(self.link):
            raise ValueError(f"link is {show(self.link)}; give one https:// address without brackets")
        try:
            if date.fromisoformat(self.date).isoformat() != self.date:
                raise ValueError
        except ValueError:
            raise ValueError(f"date is {show(self.date)}; write a day as 2026-01-31") from None


class Row(Record, frozen=True):
    """The answer for one case.

    Attributes:
        case: Name of the case.
        problem: Fingerprint of its problem.
        devices: Device number of every group, in the problem's order; None: the method has no plan.
        step_time_s: Step time that is claimed; None without a plan.
        calls: Simulator calls spent after the start, its own left out; None: they were not counted.
        seconds: Wall time spent after the start; None: it was not measured.
    """

    case: Line
    problem: Line
    devices: Annotated[list[Whole], Meta(min_length=1, max_length=1 << 20)] | None = None
    step_time_s: Positive | None = None
    calls: Whole | None = None
    seconds: Annotated[float, Meta(ge=0.0, le=1e9)] | None = None


@dataclass(frozen=True)
class Submission:
    """A submission as it was read, nothing of it simulated.

    Attributes:
        folder: Where it lies.
        card: Its card.
        rows: By name of the case.
    """

    folder: Path
    card: Card
    rows: dict[str, Row]


HERE = Path(__file__).resolve().parent
SUBMISSIONS = HERE / "submissions"

CARD = "card.toml"
PLANS = ("plans.jsonl.gz", "plans.json")
_EXTRA = "README.md"

CARD_BYTES = 1 << 14
PACKED_BYTES = 1 << 22
PLANS_BYTES = 1 << 24
"""Largest sizes of a card, of packed plans and of plain plans."""


def folders(names: list[str] | None = None, root: Path = SUBMISSIONS) -> list[Path]:
    """Returns the folders of these submissions, or all of `root`, sorted by name."""
    if names:
        return [Path(name) for name in names]
    return sorted(path for path in root.iterdir() if not path.name.startswith("."))


def read_submission(folder: Path) -> Submission:
    """Reads a submission.

    Raises:
        InputError: A file is missing, of another kind, too large or broken, or lies outside of the folder.
    """
    _check_folder(folder)
    card = _read_card(folder)
    return Submission(folder, card, _read_rows(folder))


def _check_folder(folder: Path) -> None:
    if folder.is_symlink():
        raise InputError(f"{folder}: is a link; a submission is a folder of its own, copy the files into it")
    if not folder.is_dir():
        raise InputError(f"{folder}: there is no such folder; a submission is benchmarks/leaderboard/submissions/NAME")
    name = folder.resolve().name
    if not NAME.fullmatch(name):
        raise InputError(f"{folder}: name it with small letters, digits, '.', '_' and '-', at most 64")
    known = {CARD, *PLANS, _EXTRA}
    for path in sorted(folder.iterdir()):
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            raise InputError(f"{path}: is a link, which may lead out of the folder; put the file itself there")
        if path.name not in known or not stat.S_ISREG(mode):
            raise InputError(
                f"{path}: does not belong to a submission; keep only {CARD}, one of {' and '.join(PLANS)}, {_EXTRA}"
            )


def _read_card(folder: Path) -> Card:
    path = folder / CARD
    if not path.exists():
        raise InputError(f"{path}: is missing; write one like benchmarks/leaderboard/submissions/best/{CARD}")
    try:
        data = tomllib.loads(read_bytes(path, CARD_BYTES).decode())
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not a TOML file: {error}") from None
    card = build(Card, data, str(path))
    if card.name != folder.resolve().name:
        raise InputError(f"{path}: name is {show(card.name)}, its folder {show(folder.resolve().name)}; make them the same")
    return card


def _read_rows(folder: Path) -> dict[str, Row]:
    there = [folder / name for name in PLANS if (folder / name).exists()]
    if len(there) != 1:
        what = "both are there; keep one" if there else "is missing; `make` writes one"
        raise InputError(f"{folder}: {' or '.join(PLANS)}: {what}")
    path = there[0]
    if path.suffix == ".gz":
        text = unpack(read_bytes(path, PACKED_BYTES), str(path), PLANS_BYTES)
        lines = [line for line in text.split("\n") if line.strip()]
        entries = [(parse_json(line, f"{path} line {n}", PLANS_BYTES), f"{path} line {n}") for n, line in enumerate(lines, 1)]
    else:
        entries = _entries(parse_json(_decoded(read_bytes(path, PLANS_BYTES), str(path)), str(path), PLANS_BYTES), path)
    rows: dict[str, Row] = {}
    for data, where in entries:
        row = build(Row, data, where)
        if row.case in rows:
            raise InputError(f"{where}: case {show(row.case)} has a row already; keep one row a case")
        rows[row.case] = row
    return rows


def _entries(data: Any, path: Path) -> list[tuple[Any, str]]:
    if not isinstance(data, list):
        raise InputError(f"{path}: expected a list of rows, found {type(data).__name__}")
    return [(row, f"{path}[{number}]") for number, row in enumerate(data)]


def unpack(payload: bytes, where: str, most: int) -> str:
    """Returns text of gzip data of at most `most` bytes; more is never unpacked.

    Raises:
        InputError: It is no gzip data, is cut, holds more, or no text.
    """
    reader = zlib.decompressobj(wbits=31)
    plain = io.BytesIO()
    try:
        plain.write(reader.decompress(payload, most + 1))
    except zlib.error as error:
        raise InputError(f"{where}: not a gzip file: {error}") from None
    if plain.tell() > most:
        raise InputError(f"{where}: holds more than {most} bytes when unpacked, which is the limit")
    if not reader.eof or reader.unused_data:
        raise InputError(f"{where}: the gzip file is cut, or has more behind its end; pack it again")
    return _decoded(plain.getvalue(), where)


def _decoded(payload: bytes, where: str) -> str:
    try:
        return payload.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: not UTF-8 text (byte {error.start})") from None


SAME = 1e-12
"""Relative difference up to which a claimed and a simulated step time are the same: the simulator is exact."""

LATE = 1.1
"""Claimed seconds over those of the class up to which a run is in time: searches look at the clock between steps."""


def check_submission(submission: Submission, cases: Mapping[str, ProblemCase]) -> None:
    """Checks everything that can be checked of a submission.

    Args:
        submission: As it was read.
        cases: The cases of the board by name.

    Raises:
        InputError: Says which case is wrong, why, and what to do.
    """
    folder = submission.folder
    for name in submission.rows:
        if name not in cases:
            raise InputError(f"{folder}: {unknown_name('case', name, list(cases))}; the board has {len(cases)} cases")
    missing = [name for name in cases if name not in submission.rows]
    if missing:
        raise InputError(
            f"{folder}: {len(missing)} of {len(cases)} cases have no row, first {missing[0]}; add a row each, with no devices "
            "and no step_time_s where the method has no plan"
        )
    for name, row in submission.rows.items():
        where = f"{folder}: {name}"
        _check_budget(row, submission.card.budget, where)
        _check_plan(row, cases[name], where)


def _check_budget(row: Row, budget: str, where: str) -> None:
    if budget == "one shot":
        return
    allowed = Budget.parse(budget)
    spent = row.calls if allowed.kind == "calls" else row.seconds
    what = "calls" if allowed.kind == "calls" else "seconds"
    if spent is None:
        raise InputError(f"{where}: {what} is missing, which the class {budget!r} needs; add what the run spent")
    if spent > allowed.value * (1.0 if what == "calls" else LATE):
        raise InputError(
            f"{where}: {spent:g} {what} are more than the class {budget!r} allows; run it again, or change the class"
        )


def _check_plan(row: Row, case: ProblemCase, where: str) -> None:
    problem = case.problem
    if row.problem != problem.fingerprint:
        raise InputError(
            f"{where}: its plan is for problem {row.problem[:12]}, the board's is {problem.fingerprint[:12]}; place the "
            "problems that `python -m benchmarks.leaderboard problems --out FOLDER` writes"
        )
    if row.devices is None or row.step_time_s is None:
        if row.devices is not None or row.step_time_s is not None:
            raise InputError(f"{where}: has only one of devices and step_time_s; give both, or neither where there is no plan")
        return
    if len(row.devices) != problem.num_groups:
        raise InputError(f"{where}: names {len(row.devices)} devices for {problem.num_groups} groups; name one for every group")
    if max(row.devices) >= problem.num_devices:
        raise InputError(f"{where}: names device {max(row.devices)}, the last one is {problem.num_devices - 1}")
    devices = np.array(row.devices, dtype=np.int32)
    line = simulate(problem, devices)
    if line.step_time_s is None or not math.isfinite(line.step_time_s):
        raise InputError(f"{where}: its step cannot complete: {'; '.join(line.violations)}; change the plan, or give none")
    if not line.feasible:
        raise InputError(f"{where}: its plan breaks the problem: {'; '.join(line.violations)}; change the plan, or give none")
    if abs(row.step_time_s - line.step_time_s) > SAME * line.step_time_s:
        raise InputError(
            f"{where}: claims a step of {row.step_time_s!r} s, its plan takes {line.step_time_s!r} s; write what "
            "rlplace.simulator.simulate says, with all digits, and check the order of the groups"
        )
