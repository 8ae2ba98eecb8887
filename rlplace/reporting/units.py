"""Times and sizes for people."""

from __future__ import annotations


def seconds_text(value: float | None) -> str:
    """A time with four digits and a unit that fits; "-" for None."""
    if value is None:
        return "-"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(value) >= scale:
            return f"{_digits(value / scale)} {unit}"
    return f"{_digits(value / 1e-9)} ns" if value else "0 s"


def bytes_text(value: float) -> str:
    """A size with three digits and a decimal unit."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(value) >= scale:
            return f"{value / scale:.3g} {unit}" if abs(value) < 999.5 * scale else f"{value / scale:.0f} {unit}"
    return f"{value:.0f} B"


def percent_text(value: float) -> str:
    """A share."""
    return f"{100 * value:.1f} %"


def _digits(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 999.95 else f"{value:.4g}"
