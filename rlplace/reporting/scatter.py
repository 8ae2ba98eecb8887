"""Predicted against measured step times as an inline SVG picture."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from rlplace.reporting.tables import MeasuredRow
from rlplace.text import seconds_text

_LEFT, _TOP, _SIZE = 64.0, 10.0, 260.0


def scatter(rows: Sequence[MeasuredRow]) -> str:
    """A dot a plan over the line of equal times; empty for fewer than two plans with both times."""
    pairs = [(row, row.measured_s, row.predicted_s) for row in rows]
    known = [(row, m, p) for row, m, p in pairs if m is not None and p is not None]
    if len(known) < 2:
        return ""
    values = [value for _, m, p in known for value in (m, p)]
    low, high = min(values), max(values)
    pad = 0.08 * (high - low) or 0.1 * high
    low, high = max(0.0, low - pad), high + pad

    def at(value: float) -> float:
        return _SIZE * (value - low) / (high - low)

    bottom, right = _TOP + _SIZE, _LEFT + _SIZE
    dots = []
    for row, m, p in sorted(known, key=lambda item: item[0].this):
        name = html.escape(
            f"{row.name}: measured {seconds_text(m)}, predicted {seconds_text(p)}".encode("utf-8", "replace").decode()
        )
        kind = "dot this" if row.this else "dot"
        dots.append(
            f'<circle class="{kind}" cx="{_LEFT + at(m):.1f}" cy="{bottom - at(p):.1f}" r="5"><title>{name}</title></circle>'
        )
    ticks = []
    for value in _round_values(low, high):
        x, y = _LEFT + at(value), bottom - at(value)
        ticks.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{seconds_text(value)}</text>')
        ticks.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{seconds_text(value)}</text>')
    return (
        f'<figure><svg class="chart" viewBox="0 0 {right + 8:.0f} {bottom + 38:.0f}" role="img" '
        'aria-label="Predicted over measured step times; the table has the numbers">'
        f'<rect class="axis" x="{_LEFT}" y="{_TOP}" width="{_SIZE}" height="{_SIZE}"/>'
        f'<line class="equal" x1="{_LEFT}" y1="{bottom}" x2="{right}" y2="{_TOP}"/>{"".join(ticks)}{"".join(dots)}'
        f'<text x="{_LEFT + _SIZE / 2}" y="{bottom + 33}" text-anchor="middle">measured</text>'
        f'<text x="{_LEFT + 8}" y="{_TOP + 16}">predicted</text></svg></figure>'
    )


def _round_values(low: float, high: float) -> list[float]:
    """Two to five multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    unit = next(m * power for m in (1, 2, 5, 10) if m * power >= rough)
    return [unit * n for n in range(math.ceil(low / unit), math.floor(high / unit) + 1)]
