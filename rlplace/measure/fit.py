"""Fits a curve to timed calls: robust least squares of log time, with a prior for what the timings leave open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import msgspec
import numpy as np
from numpy.typing import NDArray

from rlplace.cost.curve import Curve, work_seconds
from rlplace.errors import InputError

DEFAULT_PRIOR = Curve(0.7, 1e9, 0.8, 1e6, floor_s=6e-6)

SATURATIONS = (1.0, 0.75, 0.5, 0.35)
_HUBER = 0.15  # log units: rows further off than about 15 % count linearly
_PRIOR_WEIGHT = 0.02  # of one row per log unit
_MAX_EFFICIENCY = 0.999


@dataclass(frozen=True)
class OpTiming:
    """One timed op.

    Attributes:
        flops: Work of the whole op.
        size_bytes: Bytes read plus written.
        seconds: Measured time of the whole op.
        calls: Kernels of equal work that the op consists of; FLOPs and bytes are split between them.
        dims: Sizes by name of `rlplace.cost.curve.DIMS`, for residuals and measured shapes.
    """

    flops: float
    size_bytes: float
    seconds: float
    calls: float = 1.0
    dims: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))


def fit_op_curve(
    rows: Sequence[OpTiming],
    *,
    peak_flops: float,
    bandwidth_bytes_per_s: float,
    basis: str,
    source: str,
    prior: Curve = DEFAULT_PRIOR,
    floor_s: float | None = None,
    overhead_s: float | None = None,
    saturations: Sequence[float] = SATURATIONS,
) -> Curve:
    """Fits floor, two efficiencies, their half points and the saturation to timed ops of one class, dtype and direction.

    Args:
        rows: Timed ops, at least one; a useful fit needs about 20 log-spaced shapes.
        peak_flops: FLOP/s of the device at that dtype.
        bandwidth_bytes_per_s: Memory bandwidth of the device.
        basis: "fitted" or "calibrated".
        source: For display: origin of the rows.
        prior: Values of coefficients that the rows do not determine.
        floor_s: None: the fitted fixed time of a call is the floor. Else this is the floor of the curve, and what the rows
            need beyond it is kept as `overhead_s` (for timings that include launch and synchronisation of a single call).
        overhead_s: With `floor_s`: the overhead where it is known; else it is fitted.
        saturations: Exponents to try.

    Returns:
        The curve, without residual.

    Raises:
        InputError: No rows, or a row whose numbers are not positive and finite.
    """
    from scipy.optimize import least_squares

    if not rows:
        raise InputError("fit_op_curve: no timed ops; measure some first")
    flops, size, seconds, calls = (
        np.array([getattr(row, name) for row in rows], dtype=np.float64) for name in ("flops", "size_bytes", "seconds", "calls")
    )
    if not (np.isfinite(flops) & np.isfinite(size) & (flops >= 0) & (size >= 0)).all():
        raise InputError("fit_op_curve: FLOPs and bytes must be finite and not negative")
    if not (np.isfinite(seconds) & (seconds > 0) & (calls > 0)).all():
        raise InputError("fit_op_curve: seconds and calls must be positive")
    if any(value is not None and not 0 <= value <= 1 for value in (floor_s, overhead_s)):
        raise InputError("fit_op_curve: floor_s and overhead_s must be between 0 and 1 s")
    fixed_prior = prior.floor_s if prior.floor_s else DEFAULT_PRIOR.floor_s
    assert fixed_prior is not None
    start = _pack(prior, fixed_prior)

    def predict(values: NDArray[np.float64], saturation: float) -> NDArray[np.float64]:
        curve = _unpack(values, saturation)
        work = work_seconds(
            curve, flops / calls, size / calls, peak_flops=peak_flops, bandwidth_bytes_per_s=bandwidth_bytes_per_s
        )
        return calls * (np.exp(values[0]) + work)

    def residuals(values: NDArray[np.float64], saturation: float) -> NDArray[np.float64]:
        if known is not None:
            values = np.concatenate([[known], values[1:]])
        errors = np.log(predict(values, saturation) / seconds)
        return np.concatenate([_huber_root(errors), _PRIOR_WEIGHT * (values - start)])

    best: tuple[float, NDArray[np.float64], float] | None = None
    known = None if overhead_s is None or floor_s is None else np.log(floor_s + overhead_s)
    for saturation in saturations:
        for shift in (0.0, 2.0):
            guess = start.copy()
            guess[0] = np.log(max(float((seconds / calls).min()) * 0.5, 1e-9))
            guess[2] += shift
            guess[4] -= shift
            solved = least_squares(residuals, guess, method="lm", args=(saturation,))
            if best is None or solved.cost < best[0] - 1e-9:
                best = (solved.cost, solved.x, saturation)
    assert best is not None
    curve = _unpack(best[1], best[2])
    fixed = float(np.exp(best[1][0] if known is None else known))
    if floor_s is None:
        return msgspec.structs.replace(curve, floor_s=fixed, basis=basis, source=source)
    return msgspec.structs.replace(curve, floor_s=floor_s, overhead_s=max(0.0, fixed - floor_s), basis=basis, source=source)


def _pack(curve: Curve, fixed_s: float) -> NDArray[np.float64]:
    """Returns unbounded parameters: log floor, logit and log half point of compute, logit and log half point of bandwidth."""
    return np.array(
        [
            np.log(max(fixed_s, 1e-9)),
            _logit(curve.compute_efficiency),
            np.log(max(curve.compute_half_flops, 1.0)),
            _logit(curve.bandwidth_efficiency),
            np.log(max(curve.bandwidth_half_bytes, 1.0)),
        ]
    )


def _unpack(values: NDArray[np.float64], saturation: float) -> Curve:
    return Curve(
        compute_efficiency=_expit(values[1]),
        compute_half_flops=float(np.exp(np.clip(values[2], 0.0, 41.0))),
        bandwidth_efficiency=_expit(values[3]),
        bandwidth_half_bytes=float(np.exp(np.clip(values[4], 0.0, 41.0))),
        saturation=saturation,
    )


def _logit(value: float) -> float:
    value = min(max(value / _MAX_EFFICIENCY, 1e-5), 1 - 1e-5)
    return float(np.log(value / (1 - value)))


def _expit(value: float) -> float:
    return float(max(_MAX_EFFICIENCY / (1 + np.exp(-np.clip(value, -30, 30))), 1e-6))


def _huber_root(errors: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns values whose squares are Huber's loss: rows far off pull linearly."""
    size = np.abs(errors)
    return np.sign(errors) * np.where(size <= _HUBER, size, np.sqrt(np.maximum(2 * _HUBER * size - _HUBER**2, 0.0)))
