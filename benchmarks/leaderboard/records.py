"""Records of a submission: its card and a row a case, as typed records."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from rlplace.errors import show
from rlplace.records import Record, Whole

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
