"""Explanations as plain text: aligned tables and one sentence a line."""

from __future__ import annotations

from collections.abc import Sequence

from rlplace.planners.common.shortage import gigabytes

MOST_ROWS = 12
"""Rows of a table of parts; the rest is summed up in one more."""


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table: columns right aligned, left the first one and those whose header begins with ``<``."""
    left = [i == 0 or name.startswith("<") for i, name in enumerate(header)]
    shown = [[name.removeprefix("<") for name in header], *rows]
    widths = [max(len(row[i]) for row in shown) for i in range(len(header))]
    lines = []
    for row in shown:
        cells = [cell.ljust(w) if at_left else cell.rjust(w) for cell, w, at_left in zip(row, widths, left, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines


def ms(seconds: float | None, *, sign: bool = False) -> str:
    """Milliseconds for a table."""
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:+.3f}" if sign else f"{seconds * 1e3:.3f}"


def gb(size_bytes: float | None) -> str:
    """Units of 10^9 bytes for a table."""
    return "-" if size_bytes is None else f"{size_bytes / 1e9:.3f}"


def percent(share: float, *, sign: bool = False) -> str:
    """A share for a table."""
    return f"{100 * share:+.1f} %" if sign else f"{100 * share:.1f} %"


__all__ = ["MOST_ROWS", "gb", "gigabytes", "ms", "percent", "table"]
