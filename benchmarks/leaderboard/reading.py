"""Reading a submission from anyone: small regular files inside its own folder, strict JSON and TOML, no code."""

from __future__ import annotations

import io
import stat
import tomllib
import zlib
from pathlib import Path
from typing import Any

from benchmarks.leaderboard.records import NAME, Card, Row, Submission
from rlplace.errors import InputError, show
from rlplace.files import parse_json, read_bytes
from rlplace.records import build

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
