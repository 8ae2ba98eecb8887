"""Fits the bounded residual of a curve: one layer of tanh units on features of the shape, trained on log time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from rlplace.cost.curve import DIMS, TILES, Curve, Residual, Sizes, feature_matrix, roofline_seconds, work_seconds
from rlplace.measure.fit import OpTiming

_RESULT = tuple(f"{name}_{a}x{b}" for a, b in TILES for name in ("waves", "wave_waste")) + tuple(
    f"edge_{name}_{side}" for name in ("m", "n") for side in (32, 64, 128, 256)
)
_PRODUCT = ("log_m", "log_n", "log_k", "log_intensity", "edge_k_32", *_RESULT)
_ALIGNED = tuple(f"{name}_by_{by}" for name in ("m", "n", "k") for by in (2, 4, 8))
_ROW = ("log_rows", "log_columns", "row_waves", "row_in_registers", "edge_columns_32", "columns_by_2", "columns_by_4")
RESIDUAL_FEATURES: dict[str, tuple[str, ...]] = {
    "gemm": _PRODUCT + _ALIGNED,
    "bmm": ("log_batch", *_PRODUCT, *_ALIGNED),
    "conv": ("log_image", *(f"edge_image_{side}" for side in (2, 4, 6)), *_PRODUCT, *_ALIGNED),
    "norm": _ROW,
    "softmax": _ROW,
}
"""Features by op class; other classes have no residual."""

LEAST_FLOPS = {"conv": 0.25}  # Winograd's F(4 x 4, 3 x 3): 36 products where the definition has 144
BOUND = {"gemm": 4.0, "bmm": 8.0, "conv": 6.0, "norm": 3.0, "softmax": 4.0}
DECAY = {"gemm": 0.3e-3, "bmm": 0.1e-3, "conv": 1e-3, "norm": 0.1e-3, "softmax": 0.1e-3}
"""Weight of the squared parameters against the mean Huber loss of log time; chosen by cross-validation of the fitted half."""

UNITS = 16
_HUBER = 0.1
_GROWTH, _MARGIN = 20.0, 0.03
"""Weight of the squared log by which a doubled product takes less than 3 % more."""
_FEWEST = 12


def fit_residual(
    curve: Curve,
    rows: Sequence[OpTiming],
    *,
    op: str,
    peak_flops: float,
    bandwidth_bytes_per_s: float,
    processors: float,
    presets: Sequence[Mapping[str, float]] = (),
    units: int | None = None,
    seed: int = 0,
) -> Curve:
    """Returns the curve with a residual fitted to timed ops of its class.

    Args:
        curve: Fitted before.
        rows: Timed ops with `dims`.
        op: Op class, decides the features.
        peak_flops: As the curve was fitted.
        bandwidth_bytes_per_s: As the curve was fitted.
        processors: Streaming multiprocessors of the device.
        presets: Peak and bandwidth of the kinds that the curve is for, where they differ from the timed card's.
        units: Hidden units; None: 16, fewer where there are less than 20 rows a unit.
        seed: Seed of the initial parameters.

    Returns:
        The curve with its residual, or without one when the class has no features, or fewer than 12 rows.
    """
    names = RESIDUAL_FEATURES.get(op)
    if names is None or len(rows) < _FEWEST:
        return curve
    units = max(2, min(UNITS, len(rows) // 20)) if units is None else units
    flops, size, seconds = (
        np.array([getattr(r, n) for r in rows], dtype=np.float64) for n in ("flops", "size_bytes", "seconds")
    )
    device = {"peak_flops": peak_flops, "bandwidth_bytes_per_s": bandwidth_bytes_per_s}
    inputs = feature_matrix(names, sizes_of(rows), processors)
    low, high = inputs.min(axis=0), inputs.max(axis=0)
    mean, scale = inputs.mean(axis=0), np.maximum(inputs.std(axis=0), 1e-3)
    work, least, taken, x = (
        torch.from_numpy(values)
        for values in (
            work_seconds(curve, flops, size, **device),
            roofline_seconds(LEAST_FLOPS.get(op, 1.0) * flops, size, **device),
            seconds,
            (inputs - mean) / scale,
        )
    )
    pairs = _doubled(curve, names, op, [device, *presets], processors, (low, high, mean, scale))
    fixed, log_bound = (curve.floor_s or 0.0) + curve.overhead_s, float(np.log(BOUND[op]))
    rng = np.random.default_rng(seed)
    shapes = ((units, len(names)), (units,), (1, units), (1,))
    spread = (1 / np.sqrt(len(names)), 0.5, 0.1, 0.0)
    parameters = [
        torch.from_numpy(rng.normal(0, s or 1e-9, shape)).requires_grad_() for shape, s in zip(shapes, spread, strict=True)
    ]
    optimizer = torch.optim.LBFGS(
        parameters, max_iter=1000, history_size=20, line_search_fn="strong_wolfe", tolerance_grad=1e-9, tolerance_change=1e-11
    )

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        first, first_bias, last, last_bias = parameters
        net = (torch.tanh(x @ first.T + first_bias) @ last.T + last_bias)[:, 0]
        predicted = torch.maximum(work * torch.exp(log_bound * torch.tanh(net)), least)
        errors = torch.log((fixed + predicted) / taken)
        value = torch.nn.functional.huber_loss(errors, torch.zeros_like(errors), delta=_HUBER)
        if pairs is not None:  # [4, P]: shapes, and what they take with one size doubled
            inside, flat, most = pairs
            factor = torch.exp(log_bound * torch.tanh((torch.tanh(inside @ first.T + first_bias) @ last.T + last_bias)[..., 0]))
            log_s = torch.log(torch.maximum(flat * factor, most))
            value = value + _GROWTH * (torch.relu(log_s[0] + _MARGIN - log_s[1:]) ** 2).mean()
        value = value + DECAY[op] * sum((values**2).sum() for values in (first, first_bias, log_bound * last, last_bias))
        value.backward()
        return value

    optimizer.step(loss)
    first, first_bias, last, last_bias = (values.detach().numpy() for values in parameters)
    residual = Residual(
        features=names,
        mean=tuple(_short(mean)),
        scale=tuple(_short(scale)),
        low=tuple(_short(low)),
        high=tuple(_short(high)),
        weights=tuple(tuple(tuple(_short(row)) for row in matrix) for matrix in (first, last)),
        bias=(tuple(_short(first_bias)), tuple(_short(last_bias))),
        bound=BOUND[op],
        least_flops=LEAST_FLOPS.get(op, 1.0),
    )
    return msgspec.structs.replace(curve, residual=residual)


def _doubled(
    curve: Curve, names: tuple[str, ...], op: str, devices: Sequence[Mapping[str, float]], processors: float,
    limits: tuple[NDArray[np.float64], ...],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:  # fmt: skip
    """Returns of products of powers of two: features [4, P, F], curve and roofline [4, P] as they are and with m, n, k doubled.

    Larger products take longer; where sizes were not timed, nothing else says so.
    """
    if op != "gemm":
        return None
    base = np.stack(np.meshgrid(*[2.0 ** np.arange(4, 16)] * 3), axis=-1).reshape(-1, 3)
    found = []
    for index in (None, 0, 1, 2):
        m, n, k = (base * np.where(np.arange(3) == index, 2.0, 1.0) if index is not None else base).T
        sizes = {name: np.ones(len(m)) for name in DIMS} | {"m": m, "n": n, "k": k}
        sizes |= {"flops": 2.0 * m * n * k, "bytes": 4.0 * (m * n + n * k + m * k)}
        low, high, mean, scale = limits
        inside = (np.clip(feature_matrix(names, sizes, processors), low, high) - mean) / scale
        numbers = [{"flops": sizes["flops"], "size_bytes": sizes["bytes"], **device} for device in devices]
        flat, most = ([price(**own) for own in numbers] for price in (partial(work_seconds, curve), roofline_seconds))
        found.append((np.concatenate([inside] * len(devices)), np.concatenate(flat), np.concatenate(most)))
    inside, flat, most = (torch.from_numpy(np.stack(values)) for values in zip(*found, strict=True))
    return inside, flat, most


def sizes_of(rows: Sequence[OpTiming]) -> Sizes:
    """Returns sizes of timed ops as `rlplace.cost.table` takes them."""
    sizes = {name: np.array([float(row.dims.get(name, 1)) for row in rows]) for name in DIMS}
    sizes["flops"] = np.array([row.flops for row in rows])
    sizes["bytes"] = np.array([row.size_bytes for row in rows])
    return sizes


def _short(values: NDArray[np.float64]) -> list[float]:
    """Returns five significant digits: a fit has no more, and files stay small."""
    return [float(f"{value:.5g}") for value in values]
