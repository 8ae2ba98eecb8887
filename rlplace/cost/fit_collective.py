"""Fits the curve of a collective to measured times: few straight pieces, joined, never falling."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlplace.errors import InputError
from rlplace.problem.fabric import CollectiveKind, Curve, bus_factor, joined_curve

_MIN_SECONDS_PER_BYTE = 1e-15  # a flat stretch still has a finite rate
_MAX_SECONDS_PER_BYTE = 1e6


def fit_collective_curve(
    size_bytes: ArrayLike,
    seconds: ArrayLike,
    *,
    kind: CollectiveKind,
    group_size: int,
    breaks: Sequence[float] = (0,),
    algorithm: str = "",
) -> Curve:
    """Least squares of the relative error over joined straight pieces.

    Args:
        size_bytes: M message sizes (whole tensor).
        seconds: M measured times, positive.
        kind: The collective.
        group_size: Devices that took part.
        breaks: Where pieces begin, the first at 0. Pieces that hold no measurement beyond their start are left out.
        algorithm: As in `Curve`.

    Raises:
        InputError: No positive measurement of two different sizes.
    """
    size = np.asarray(size_bytes, dtype=np.float64)
    time = np.asarray(seconds, dtype=np.float64)
    if len(np.unique(size)) < 2 or not (np.isfinite(time) & (time > 0)).all():
        raise InputError(f"cannot fit a curve of {kind}: needs positive times of at least two message sizes")
    starts = [0.0, *(float(b) for b in breaks if b > 0 and (size <= b).sum() >= 2 and (size > b).any())]
    knots = np.array([*starts, max(float(size.max()), starts[-1] + 1.0)])
    rise = _rises(_hats(size, knots) / time[:, None])
    slope = np.clip(rise[1:] / np.diff(knots), _MIN_SECONDS_PER_BYTE, _MAX_SECONDS_PER_BYTE)
    rates = bus_factor(kind, group_size) / slope
    stretches = list(zip(starts, rates.tolist(), strict=True))
    return joined_curve(group_size, float(rise[0]), stretches, kind=kind, algorithm=algorithm)


def _rises(weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """float64 [K]: height of the first knot and the rises to the next ones, so that ``weights @ heights`` is closest to ones.

    No rise is negative: what would fall stays level.
    """
    from scipy.optimize import nnls

    steps = np.cumsum(weights[:, ::-1], axis=1)[:, ::-1]
    return nnls(steps, np.ones(len(steps)))[0]


def _hats(size: NDArray[np.float64], knots: NDArray[np.float64]) -> NDArray[np.float64]:
    """float64 [M, K]: weights that interpolate values at the knots; the last piece goes on beyond the last knot."""
    weights = np.zeros((len(size), len(knots)))
    at = np.clip(np.searchsorted(knots, size, side="right") - 1, 0, len(knots) - 2)
    part = (size - knots[at]) / (knots[at + 1] - knots[at])
    rows = np.arange(len(size))
    weights[rows, at] = 1 - part
    weights[rows, at + 1] = part
    return weights
