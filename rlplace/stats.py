"""Means of ratios, such as one planner's step times over another's: geometric means, bootstrap intervals, counts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000
"""Bootstrap samples."""

LEAST = 3
"""Fewest ratios for which an interval is computed."""

TIE = 1e-3
"""Ratios nearer to 1 than this are a tie."""


def geometric_mean(values: Sequence[float]) -> float | None:
    """Returns the geometric mean of values; None without any."""
    return math.exp(sum(math.log(value) for value in values) / len(values)) if values else None


def interval(
    logs: Sequence[float] | NDArray[np.float64], *, resamples: int = RESAMPLES, seed: int = 0, least: int = LEAST
) -> tuple[float | None, float | None]:
    """Returns the 95 % bootstrap interval of a geometric mean from the logs of its values; None below `least` of them."""
    values = np.asarray(logs, dtype=np.float64)
    if len(values) < least:
        return None, None
    draws = np.random.default_rng(seed).integers(0, len(values), (resamples, len(values)))
    low, high = np.exp(np.percentile(values[draws].mean(axis=1), [2.5, 97.5]))
    return float(low), float(high)


def wins_ties_losses(ratios: Sequence[float], tie: float = TIE) -> tuple[int, int, int]:
    """Returns numbers of ratios below 1, equal to 1 (within `tie`), and above."""
    wins, losses = sum(ratio < 1 - tie for ratio in ratios), sum(ratio > 1 + tie for ratio in ratios)
    return wins, len(ratios) - wins - losses, losses
