"""Time of kernels on a launch floor and two saturating efficiencies.

    t = launches * floor + max(flops / (e peak g(flops)), bytes / (e_b bandwidth g_b(bytes))),   g(x) = (x / (x + half)) ** s

The form is the one that fits public kernel timings with few numbers; s = 1 makes every call pay a fixed time (the pipeline
fill of a kernel), s = 1/2 lets the efficiency climb more slowly.

The learned correction of a curve: features of a call's shape and a small network with a bounded output.

The features are logarithms of sizes and the waste of covering a product with tiles of whole processors. A prediction is the
curve's time multiplied by at most `bound`, divided by at most `bound`, and never below the roofline.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlplace.cost.table import DIMS, Curve, Residual

Sizes = Mapping[str, NDArray[np.float64]]
"""Float arrays [N] by name of `rlplace.cost.table.DIMS`; sizes that an op class does not have are 1."""

Feature = Callable[[Sizes, float], NDArray[np.float64]]


def _log(name: str) -> Feature:
    return lambda sizes, processors: np.log2(np.maximum(sizes[name], 1.0))


def _intensity(sizes: Sizes, processors: float) -> NDArray[np.float64]:
    return np.log2(np.maximum(sizes["flops"], 1.0)) - np.log2(np.maximum(sizes["bytes"], 1.0))


def _waves(sizes: Sizes, processors: float, side: tuple[int, int]) -> NDArray[np.float64]:
    """Returns waves of tiles over the processors, fractions included."""
    return sizes["batch"] * np.ceil(sizes["m"] / side[0]) * np.ceil(sizes["n"] / side[1]) / processors


def _log_waves(*side: int) -> Feature:
    return lambda sizes, processors: np.log2(_waves(sizes, processors, (side[0], side[1])))


def _wave_waste(*side: int) -> Feature:
    """log2 of (processor slots in whole waves) / (tiles): 0 when the last wave is full."""

    def feature(sizes: Sizes, processors: float) -> NDArray[np.float64]:
        waves = _waves(sizes, processors, (side[0], side[1]))
        return np.log2(np.ceil(waves) / waves)

    return feature


def _edge(name: str, side: int) -> Feature:
    """log2 of (what whole tiles cover) / (size)."""
    return lambda sizes, processors: np.log2(np.ceil(sizes[name] / side) * side / sizes[name])


def _aligned(name: str, by: int) -> Feature:
    """1 where loads of `by` elements fit."""
    return lambda sizes, processors: (sizes[name] % by == 0).astype(np.float64)


def _in_registers(sizes: Sizes, processors: float) -> NDArray[np.float64]:
    """1 where a warp holds a row: softmax of up to 1,024 columns is another kernel."""
    return (sizes["columns"] <= 1024).astype(np.float64)


def _row_waves(sizes: Sizes, processors: float) -> NDArray[np.float64]:
    return np.log2(np.maximum(sizes["rows"], 1.0) / processors)


TILES = ((256, 128), (128, 128), (128, 64), (64, 64), (32, 32), (128, 32), (32, 128))
"""Rows and columns of the result that a block of a product's kernel makes."""

FEATURES: Mapping[str, Feature] = {
    **{
        f"log_{name}": _log(name)
        for name in ("batch", "m", "n", "k", "heads", "queries", "keys", "width", "rows", "columns", "image", "flops", "bytes")
    },
    "log_intensity": _intensity,
    **{f"waves_{a}x{b}": _log_waves(a, b) for a, b in TILES},
    **{f"wave_waste_{a}x{b}": _wave_waste(a, b) for a, b in TILES},
    **{f"edge_{name}_{side}": _edge(name, side) for name in ("m", "n") for side in (32, 64, 128, 256)},
    **{f"edge_image_{side}": _edge("image", side) for side in (2, 4, 6)},
    "edge_k_32": _edge("k", 32),
    "edge_columns_32": _edge("columns", 32),
    **{f"{name}_by_{by}": _aligned(name, by) for name in ("m", "n", "k", "columns") for by in (2, 4, 8)},
    "row_in_registers": _in_registers,
    "row_waves": _row_waves,
}
"""Features by name: functions of sizes and of the number of processors (streaming multiprocessors) of the device."""


def feature_matrix(names: tuple[str, ...], sizes: Sizes, processors: float) -> NDArray[np.float64]:
    """Features as columns [N, F]."""
    return np.stack([FEATURES[name](sizes, processors) for name in names], axis=1)


def extrapolates(residual: Residual, sizes: Sizes) -> NDArray[np.bool_]:
    """Calls [N] of which a size is unknown, or less than half or more than double of any that was fitted."""
    outside = _unknown(residual, sizes)
    for name, low, high in zip(residual.features, residual.low, residual.high, strict=True):
        if name.startswith("log_"):
            value = FEATURES[name](sizes, 1.0)
            outside |= (value < low - 1.0) | (value > high + 1.0)
    return outside


def _unknown(residual: Residual, sizes: Sizes) -> NDArray[np.bool_]:
    """Calls [N] without any of the sizes that the residual reads."""
    own = [sizes[name.removeprefix("log_")] > 1.0 for name in residual.features if name.removeprefix("log_") in DIMS[:-2]]
    return ~np.logical_or.reduce(own) if own else np.zeros(len(sizes["flops"]), dtype=bool)


def residual_factor(residual: Residual, sizes: Sizes, processors: float) -> NDArray[np.float64]:
    """Returns factors [N] on the curve's time, between 1 / bound and bound."""
    value = np.clip(feature_matrix(residual.features, sizes, processors), np.array(residual.low), np.array(residual.high))
    value = (value - np.array(residual.mean)) / np.array(residual.scale)
    for layer, (weights, bias) in enumerate(zip(residual.weights, residual.bias, strict=True)):
        value = value @ np.array(weights).T + np.array(bias)
        if layer < len(residual.weights) - 1:
            value = np.tanh(value)
    return residual.bound ** np.tanh(value[:, 0])


def saturated(amount: ArrayLike, half: ArrayLike, saturation: ArrayLike) -> NDArray[np.float64]:
    """`amount` divided by the efficiency factor g that it reaches; 0 stays 0.

    Args:
        amount: FLOPs or bytes of one call [N].
        half: The amount at which x / (x + half) is one half.
        saturation: Exponent of g.
    """
    amount = np.asarray(amount, dtype=np.float64)
    safe = np.maximum(amount, 1e-30)
    return np.where(amount > 0, amount * (1.0 + np.asarray(half, dtype=np.float64) / safe) ** saturation, 0.0)


def work_seconds(
    curve: Curve, flops: ArrayLike, size_bytes: ArrayLike, *, peak_flops: ArrayLike, bandwidth_bytes_per_s: float
) -> NDArray[np.float64]:
    """Returns seconds of single calls without launch and without residual.

    Args:
        curve: The curve with the two efficiencies.
        flops: [N], FLOPs of one call.
        size_bytes: [N], bytes that one call reads and writes.
        peak_flops: FLOP/s that `compute_efficiency` is a fraction of.
        bandwidth_bytes_per_s: Bytes per second that `bandwidth_efficiency` is a fraction of.
    """
    compute = saturated(flops, curve.compute_half_flops, curve.saturation) / (curve.compute_efficiency * np.asarray(peak_flops))
    memory = saturated(size_bytes, curve.bandwidth_half_bytes, curve.saturation)
    return np.maximum(compute, memory / (curve.bandwidth_efficiency * bandwidth_bytes_per_s))


def roofline_seconds(
    flops: ArrayLike, size_bytes: ArrayLike, *, peak_flops: ArrayLike, bandwidth_bytes_per_s: float
) -> NDArray[np.float64]:
    """Returns the bound that no prediction may go below: [N] seconds at full peak and full bandwidth."""
    flops, size_bytes = np.asarray(flops, dtype=np.float64), np.asarray(size_bytes, dtype=np.float64)
    return np.maximum(flops / np.asarray(peak_flops), size_bytes / bandwidth_bytes_per_s)


def _unaligned(curve: Curve, sizes: Sizes) -> NDArray[np.float64]:
    """Returns factors [N] on the compute term."""
    factors = np.array([*curve.unaligned[::-1], 1.0])  # of 1, 2, 4 and 8
    return factors[np.log2(sizes["align"]).astype(np.int64)]


def kernel_seconds(
    curve: Curve,
    flops: ArrayLike,
    size_bytes: ArrayLike,
    sizes: Sizes,
    *,
    peak_flops: float,
    bandwidth_bytes_per_s: float,
    processors: float,
) -> NDArray[np.float64]:
    """Returns seconds [N] of single calls without launch: curve, residual and roofline.

    Args:
        curve: The curve, with or without a residual.
        flops: [N], FLOPs of one call.
        size_bytes: [N], bytes that one call reads and writes.
        sizes: Dims [N] by name, for the residual; `align` is the largest of 8, 4, 2 and 1 that divides the rows of a product.
        peak_flops: FLOP/s of the device at that precision.
        bandwidth_bytes_per_s: Memory bandwidth of the device.
        processors: Streaming multiprocessors of the device, for the residual.
    """
    peak = peak_flops / _unaligned(curve, sizes) if curve.unaligned and "align" in sizes else peak_flops
    work = work_seconds(curve, flops, size_bytes, peak_flops=peak, bandwidth_bytes_per_s=bandwidth_bytes_per_s)
    if curve.residual is None:
        return work
    known = {**sizes, "flops": np.asarray(flops, dtype=np.float64), "bytes": np.asarray(size_bytes, dtype=np.float64)}
    done = curve.residual.least_flops * np.asarray(flops, dtype=np.float64)
    least = roofline_seconds(done, size_bytes, peak_flops=peak_flops, bandwidth_bytes_per_s=bandwidth_bytes_per_s)
    factor = np.where(_unknown(curve.residual, known), 1.0, residual_factor(curve.residual, known, processors))
    return np.maximum(work * factor, least)
