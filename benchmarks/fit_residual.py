"""Fits the bounded residual of a curve: a network of a few dozen numbers, trained by damped least squares on log time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from rlplace.cost.curve import Sizes, feature_matrix, kernel_seconds, roofline_seconds, work_seconds
from rlplace.cost.fit import OpTiming
from rlplace.cost.table import DIMS, Curve, Residual

RESIDUAL_FEATURES: dict[str, tuple[str, ...]] = {
    "gemm": ("log_m", "log_n", "log_k", "waves_128", "wave_waste_128", "edge_waste_128"),
    "bmm": ("log_batch", "log_m", "log_n", "log_k", "waves_128", "wave_waste_128", "edge_waste_128", "edge_waste_64"),
    "norm": ("log_rows", "log_columns"),
    "softmax": ("log_rows", "log_columns"),
}
"""Features by op class; other classes have no residual."""

_LIMITS = {"gemm": (2.0, 0.3), "bmm": (4.0, 0.1), "norm": (3.0, 0.1), "softmax": (3.0, 0.1)}
"""Largest factor and weight decay by op class. Plain products stay close to their curve, so that they keep growing with their
sizes; batched ones stray further, because narrow operands leave tiles empty."""


def fit_residual(
    curve: Curve,
    rows: Sequence[OpTiming],
    *,
    op: str,
    peak_flops: float,
    bandwidth_bytes_per_s: float,
    processors: float,
    hidden: int = 8,
    bound: float | None = None,
    decay: float | None = None,
    seed: int = 0,
) -> Curve:
    """The curve with a residual fitted to timed ops of its class.

    Args:
        curve: Fitted before.
        rows: Timed ops with `dims`.
        op: Op class, decides the features.
        peak_flops: As the curve was fitted.
        bandwidth_bytes_per_s: As the curve was fitted.
        processors: Streaming multiprocessors of the device.
        hidden: Hidden units; 0 makes the correction linear in the features.
        bound: Largest factor; None: the class's.
        decay: Weight of the parameters against the log error of one row; None: the class's.
        seed: Seed of the initial parameters.

    Returns:
        The curve with its residual, or without one when the class has no features.
    """
    names = RESIDUAL_FEATURES.get(op)
    if names is None or not rows:
        return curve
    bound = _LIMITS[op][0] if bound is None else bound
    weight = _LIMITS[op][1] if decay is None else decay
    flops, size, seconds = (
        np.array([getattr(r, n) for r in rows], dtype=np.float64) for n in ("flops", "size_bytes", "seconds")
    )
    device = {"peak_flops": peak_flops, "bandwidth_bytes_per_s": bandwidth_bytes_per_s}
    work = work_seconds(curve, flops, size, **device)
    least = roofline_seconds(flops, size, **device)
    fixed = (curve.floor_s or 0.0) + curve.overhead_s
    inputs = feature_matrix(names, sizes_of(rows), processors)
    mean, scale = inputs.mean(axis=0), np.maximum(inputs.std(axis=0), 1e-3)
    low, high = inputs.min(axis=0), inputs.max(axis=0)
    inputs = (inputs - mean) / scale
    rng = np.random.default_rng(seed)
    net = _Net(len(names), hidden)
    start = net.first(rng)
    log_bound = float(np.log(bound))

    def errors(values: NDArray[np.float64]) -> NDArray[np.float64]:
        factor = np.exp(log_bound * np.tanh(net.output(values, inputs)[0]))
        predicted = fixed + np.maximum(work * factor, least)
        return np.concatenate([np.log(predicted / seconds), weight * values])

    def jacobian(values: NDArray[np.float64]) -> NDArray[np.float64]:
        output, slope = net.output(values, inputs)
        squashed = np.tanh(output)
        above = np.maximum(work * np.exp(log_bound * squashed), least)
        chain = above / (fixed + above) * log_bound * (1 - squashed**2)
        # Below the roofline the prediction does not move; keep a small slope so that such rows can leave it.
        chain = np.where(above <= least, 0.1 * chain, chain)
        return np.concatenate([chain[:, None] * slope, weight * np.eye(len(values))])

    values = least_squares(errors, start, jacobian, method="lm", max_nfev=200).x
    weights, bias = net.layers(values)
    residual = Residual(
        features=names,
        mean=tuple(_short(mean)),
        scale=tuple(_short(scale)),
        low=tuple(_short(low)),
        high=tuple(_short(high)),
        weights=tuple(tuple(tuple(_short(row)) for row in matrix) for matrix in weights),
        bias=tuple(tuple(_short(row)) for row in bias),
        bound=bound,
    )
    return msgspec.structs.replace(curve, residual=residual)


def choose_residual(
    curve: Curve,
    rows: Sequence[OpTiming],
    *,
    op: str,
    peak_flops: float,
    bandwidth_bytes_per_s: float,
    processors: float,
    folds: int = 5,
) -> Curve:
    """The curve with the residual that does best on rows it was not fitted to, or without one.

    Candidates are no residual, a linear one and networks of 4 and 8 hidden units; `folds`-fold cross-validation of the curve's
    own rows decides, and a larger candidate must win by more than 3 %. Fewer than 12 rows get none.

    Args:
        curve: Fitted to `rows`.
        rows: Timed ops with `dims`.
        op: Op class.
        peak_flops: As the curve was fitted.
        bandwidth_bytes_per_s: As the curve was fitted.
        processors: Streaming multiprocessors of the device.
        folds: Parts of the cross-validation.
    """
    if op not in RESIDUAL_FEATURES or len(rows) < 12:
        return curve
    device: dict[str, Any] = {
        "peak_flops": peak_flops,
        "bandwidth_bytes_per_s": bandwidth_bytes_per_s,
        "processors": processors,
    }
    part = np.random.default_rng(0).permutation(len(rows)) % folds

    def score(hidden: int | None) -> float:
        found = []
        for fold in range(folds):
            inside = [row for row, number in zip(rows, part, strict=True) if number != fold]
            outside = [row for row, number in zip(rows, part, strict=True) if number == fold]
            fitted = curve if hidden is None else fit_residual(curve, inside, op=op, hidden=hidden, **device)
            work = kernel_seconds(
                fitted, [r.flops for r in outside], [r.size_bytes for r in outside], sizes_of(outside), **device
            )
            fixed = (curve.floor_s or 0.0) + curve.overhead_s
            found.append(np.abs(np.log((work + fixed) / np.array([r.seconds for r in outside]))))
        return float(np.concatenate(found).mean())

    best, best_score = None, score(None)
    for hidden in (0, 4, 8):
        if len(rows) < 6 * hidden:
            break
        now = score(hidden)
        if now < 0.97 * best_score:
            best, best_score = hidden, now
    return curve if best is None else fit_residual(curve, rows, op=op, hidden=best, **device)


def sizes_of(rows: Sequence[OpTiming]) -> Sizes:
    """Sizes of timed ops as `rlplace.cost.curve` takes them."""
    sizes = {name: np.array([float(row.dims.get(name, 1)) for row in rows]) for name in DIMS}
    sizes["flops"] = np.array([row.flops for row in rows])
    sizes["bytes"] = np.array([row.size_bytes for row in rows])
    return sizes


def _short(values: NDArray[np.float64]) -> list[float]:
    """Five significant digits: a fit has no more, and files stay small."""
    return [float(f"{value:.5g}") for value in values]


class _Net:
    """One tanh layer of `hidden` units (none: linear), one output; parameters as one vector."""

    def __init__(self, inputs: int, hidden: int) -> None:
        self.inputs, self.hidden = inputs, hidden

    def first(self, rng: np.random.Generator) -> NDArray[np.float64]:
        if not self.hidden:
            return np.zeros(self.inputs + 1)
        return np.concatenate(
            [
                rng.normal(0, 1 / np.sqrt(self.inputs), self.hidden * self.inputs),
                rng.normal(0, 0.5, self.hidden),
                rng.normal(0, 0.1, self.hidden),
                [0.0],
            ]
        )

    def layers(self, values: NDArray[np.float64]) -> tuple[list[NDArray[np.float64]], list[NDArray[np.float64]]]:
        """Weights and biases by layer."""
        if not self.hidden:
            return [values[None, :-1]], [values[-1:]]
        cut = self.hidden * self.inputs
        first = values[:cut].reshape(self.hidden, self.inputs)
        return [first, values[None, cut + self.hidden : -1]], [values[cut : cut + self.hidden], values[-1:]]

    def output(self, values: NDArray[np.float64], x: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Outputs [R] and their derivatives by the parameters [R, P]."""
        weights, bias = self.layers(values)
        if not self.hidden:
            return x @ weights[0][0] + bias[0], np.concatenate([x, np.ones((len(x), 1))], axis=1)
        inner = np.tanh(x @ weights[0].T + bias[0])
        back = (1 - inner**2) * weights[1][0]
        by_first = (back[:, :, None] * x[:, None, :]).reshape(len(x), -1)
        return inner @ weights[1][0] + bias[1], np.concatenate([by_first, back, inner, np.ones((len(x), 1))], axis=1)
