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

from rlplace.cost.table import Curve, Residual

Sizes = Mapping[str, NDArray[np.float64]]
"""Float arrays [N] by name of `rlplace.cost.table.DIMS`; sizes that an op class does not have are 1."""

Feature = Callable[[Sizes, float], NDArray[np.float64]]


def _log(name: str) -> Feature:
    return lambda sizes, processors: np.log2(np.maximum(sizes[name], 1.0))


def _intensity(sizes: Sizes, processors: float) -> NDArray[np.float64]:
    return np.log2(np.maximum(sizes["flops"], 1.0)) - np.log2(np.maximum(sizes["bytes"], 1.0))


def _tiles(sizes: Sizes, side: tuple[int, int]) -> NDArray[np.float64]:
    return sizes["batch"] * np.ceil(sizes["m"] / side[0]) * np.ceil(sizes["n"] / side[1])


def _wave_waste(*side: int) -> Feature:
    """log2 of (processor slots in whole waves) / (tiles): 0 when the last wave is full."""

    def feature(sizes: Sizes, processors: float) -> NDArray[np.float64]:
        tiles = _tiles(sizes, (side[0], side[1]))
        return np.log2(np.ceil(tiles / processors) * processors / tiles)

    return feature


def _edge_waste(*side: int) -> Feature:
    """log2 of (area covered by whole tiles) / (area of the product)."""

    def feature(sizes: Sizes, processors: float) -> NDArray[np.float64]:
        covered = _tiles(sizes, (side[0], side[1])) * side[0] * side[1]
        return np.log2(covered / (sizes["batch"] * sizes["m"] * sizes["n"]))

    return feature


def _waves(*side: int) -> Feature:
    """log2 of waves of tiles, fractions included."""

    def feature(sizes: Sizes, processors: float) -> NDArray[np.float64]:
        return np.log2(_tiles(sizes, (side[0], side[1])) / processors)

    return feature


FEATURES: Mapping[str, Feature] = {
    **{f"log_{name}": _log(name) for name in ("batch", "m", "n", "k", "heads", "queries", "keys", "width", "rows", "columns")},
    "log_flops": _log("flops"),
    "log_bytes": _log("bytes"),
    "log_intensity": _intensity,
    "waves_128": _waves(128, 128),
    "wave_waste_128": _wave_waste(128, 128),
    "edge_waste_128": _edge_waste(128, 128),
    "wave_waste_64": _wave_waste(64, 64),
    "edge_waste_64": _edge_waste(64, 64),
}
"""Features by name: functions of sizes and of the number of processors (streaming multiprocessors) of the device."""


def feature_matrix(names: tuple[str, ...], sizes: Sizes, processors: float) -> NDArray[np.float64]:
    """Features as columns [N, F]."""
    return np.stack([FEATURES[name](sizes, processors) for name in names], axis=1)


def residual_factor(residual: Residual, sizes: Sizes, processors: float) -> NDArray[np.float64]:
    """Factors [N] on the curve's time, between 1 / bound and bound."""
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
    """Seconds of single calls without launch and without residual.

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
    """The bound that no prediction may go below: [N] seconds at full peak and full bandwidth."""
    flops, size_bytes = np.asarray(flops, dtype=np.float64), np.asarray(size_bytes, dtype=np.float64)
    return np.maximum(flops / np.asarray(peak_flops), size_bytes / bandwidth_bytes_per_s)


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
    """Seconds [N] of single calls without launch: curve, residual and roofline.

    Args:
        curve: The curve, with or without a residual.
        flops: [N], FLOPs of one call.
        size_bytes: [N], bytes that one call reads and writes.
        sizes: Dims [N] by name, for the residual.
        peak_flops: FLOP/s of the device at that precision.
        bandwidth_bytes_per_s: Memory bandwidth of the device.
        processors: Streaming multiprocessors of the device, for the residual.
    """
    work = work_seconds(curve, flops, size_bytes, peak_flops=peak_flops, bandwidth_bytes_per_s=bandwidth_bytes_per_s)
    if curve.residual is None:
        return work
    known = {**sizes, "flops": np.asarray(flops, dtype=np.float64), "bytes": np.asarray(size_bytes, dtype=np.float64)}
    least = roofline_seconds(flops, size_bytes, peak_flops=peak_flops, bandwidth_bytes_per_s=bandwidth_bytes_per_s)
    return np.maximum(work * residual_factor(curve.residual, known, processors), least)
