"""Whole numbers for the solver: seconds become ticks, exactly where that is possible.

CP-SAT works on integers. Where all times of a problem are multiples of one unit, as in problems written by hand, a tick is that
unit and nothing is lost. Elsewhere a tick is a small fraction of the step and every time is rounded down, so that the optimum
in ticks is a lower bound of the optimum in seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

HORIZON_TICKS = 1 << 28
"""Ticks in the longest step considered, where times have no common unit: rounding costs less than 4e-9 of it for each time on
the critical chain."""

_MAX_DENOMINATOR = 10**9
_EXACT_TICKS = 1 << 40

_LONGER_THAN_ANY = 1 << 41
"""Ticks that times are cut down to: longer than every step that is considered, and sums of them stay within 64 bits."""


@dataclass(frozen=True)
class Ticks:
    """Seconds to ticks and back.

    Attributes:
        per_s: Ticks in a second.
        exact: Whether every time of the problem is a whole number of ticks.
    """

    per_s: float
    exact: bool

    def down(self, seconds: NDArray[np.float64]) -> NDArray[np.int64]:
        """int64, the ticks of times, rounded down where they are not whole; inf and NaN become -1."""
        finite = np.isfinite(seconds)
        raw = np.where(finite, seconds, 0.0) * self.per_s
        # A product that is whole but for rounding must not lose a tick.
        whole = np.rint(raw) if self.exact else np.floor(raw * (1 + 1e-15))
        return np.where(finite, np.minimum(whole, _LONGER_THAN_ANY), -1).astype(np.int64)

    def seconds(self, ticks: float) -> float:
        """Seconds of a number of ticks."""
        return float(ticks) / self.per_s


def choose_ticks(times_s: NDArray[Any], horizon_s: float) -> Ticks:
    """The unit for a set of times.

    Args:
        times_s: Float [.], every op and transfer time in seconds; inf and NaN are left out.
        horizon_s: Longest step that is considered.
    """
    values = np.unique(times_s[np.isfinite(times_s) & (times_s > 0)])
    common = _common_unit(values.tolist(), horizon_s)
    if common is not None:
        return Ticks(common, True)
    # A step that takes no time at all cannot be improved: any unit will do.
    return Ticks(HORIZON_TICKS / horizon_s if horizon_s > 0 else 1.0, False)


def _common_unit(values: list[float], horizon_s: float) -> float | None:
    """Ticks per second of the largest unit that all values are multiples of, or None."""
    denominator, numerator = 1, 0
    fractions = []
    for value in values:
        fraction = Fraction(value).limit_denominator(_MAX_DENOMINATOR)
        if abs(float(fraction) - value) > 1e-14 * value:
            return None
        denominator = math.lcm(denominator, fraction.denominator)
        if denominator > _MAX_DENOMINATOR or denominator * horizon_s > _EXACT_TICKS:
            return None
        fractions.append(fraction)
    for fraction in fractions:
        numerator = math.gcd(numerator, int(fraction * denominator))
    return denominator / max(numerator, 1)
