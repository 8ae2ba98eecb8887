"""Tables, times and sizes for display: without units in cells under a header that names them, with units elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns lines of a table: columns right aligned, left the first one and those whose header begins with ``<``."""
    left = [i == 0 or name.startswith("<") for i, name in enumerate(header)]
    shown = [[name.removeprefix("<") for name in header], *rows]
    widths = [max(len(row[i]) for row in shown) for i in range(len(header))]
    lines = []
    for row in shown:
        cells = [cell.ljust(w) if at_left else cell.rjust(w) for cell, w, at_left in zip(row, widths, left, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines


MANY_ROWS = 64
"""Rows of devices up to which a table has one for each."""


def by_run(rows: list[list[str]]) -> list[list[str]]:
    """Returns rows of devices, of more than `MANY_ROWS` neighbours that differ in their first cell alone as one row."""
    if len(rows) <= MANY_ROWS:
        return rows
    runs = [[row[0] for row in alike] + [cells] for cells, alike in groupby(rows, key=lambda row: row[1:])]
    return [[names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}", *cells] for *names, cells in runs]


def names_in_a_row(names: Sequence[str]) -> str:
    """Names of devices for a cell: up to three, or the first and the last of many, with how many they are."""
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} .. {names[-1]} ({len(names)})"


def either(names: Iterable[str]) -> str:
    """Returns the names as a choice: "a", "a or b", "a, b or c"."""
    *most, last = names
    return f"{', '.join(most)} or {last}" if most else last


def ms(value_s: float | None, *, sign: bool = False) -> str:
    """Returns milliseconds, for a table; "-" for None."""
    if value_s is None:
        return "-"
    return f"{value_s * 1e3:+.3f}" if sign else f"{value_s * 1e3:.3f}"


def gb(size_bytes: float | None) -> str:
    """Returns units of 10^9 bytes, for a table; "-" for None."""
    return "-" if size_bytes is None else f"{size_bytes / 1e9:.3f}"


def percent(share: float | None, *, sign: bool = False) -> str:
    """Returns a share; "-" for None."""
    if share is None:
        return "-"
    return f"{100 * share:+.1f} %" if sign else f"{100 * share:.1f} %"


def seconds_text(value_s: float | None) -> str:
    """Returns a time with four digits and a unit that fits; "-" for None."""
    if value_s is None:
        return "-"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(value_s) >= scale:
            return f"{_digits(value_s / scale)} {unit}"
    return f"{_digits(value_s / 1e-9)} ns" if value_s else "0 s"


def bytes_text(size_bytes: float) -> str:
    """Returns a size with three digits and a decimal unit: ``"744 GB"``, ``"12.3 MB"``."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(size_bytes) >= scale:
            value = size_bytes / scale
            return f"{value:.3g} {unit}" if abs(value) < 999.5 else f"{value:.0f} {unit}"
    return f"{size_bytes:.0f} bytes"


def _digits(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 999.95 else f"{value:.4g}"
