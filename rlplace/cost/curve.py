"""Time of kernels on a launch floor and two saturating efficiencies.

    t = launches * floor + max(flops / (e peak g(flops)), bytes / (e_b bandwidth g_b(bytes))),   g(x) = (x / (x + half)) ** s

The form is the one that fits public kernel timings with few numbers; s = 1 makes every call pay a fixed time (the pipeline
fill of a kernel), s = 1/2 lets the efficiency climb more slowly.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlplace.cost.residual import Sizes, residual_factor
from rlplace.cost.table import Curve


def saturated(amount: ArrayLike, half: ArrayLike, saturation: ArrayLike) -> NDArray[np.float64]:
    """`amount` divided by the efficiency factor g that it reaches; 0 stays 0.

    Args:
        amount: FLOPs or bytes of one call [N].
        half: The amount at which x / (x + half) is one half.
        saturation: Exponent of g.
    """
    amount = np.asarray(amount, dtype=np.float64)
    safe = np.maximum(amount, 1e-30)
    result: NDArray[np.float64] = np.where(
        amount > 0, amount * (1.0 + np.asarray(half, dtype=np.float64) / safe) ** saturation, 0.0
    )
    return result


def work_seconds(
    curve: Curve, flops: ArrayLike, size_bytes: ArrayLike, *, peak_flops: ArrayLike, bandwidth_bytes_per_s: float
) -> NDArray[np.float64]:
    """Seconds of single calls without launch and without residual.

    Args:
        curve: Its two efficiencies.
        flops: [N] of one call.
        size_bytes: [N] of one call.
        peak_flops: FLOP/s that `compute_efficiency` is a fraction of.
        bandwidth_bytes_per_s: What `bandwidth_efficiency` is a fraction of.
    """
    compute = saturated(flops, curve.compute_half_flops, curve.saturation) / (curve.compute_efficiency * np.asarray(peak_flops))
    memory = saturated(size_bytes, curve.bandwidth_half_bytes, curve.saturation)
    result: NDArray[np.float64] = np.maximum(compute, memory / (curve.bandwidth_efficiency * bandwidth_bytes_per_s))
    return result


def roofline_seconds(
    flops: ArrayLike, size_bytes: ArrayLike, *, peak_flops: ArrayLike, bandwidth_bytes_per_s: float
) -> NDArray[np.float64]:
    """The bound that no prediction may go below: [N] seconds at full peak and full bandwidth."""
    flops, size_bytes = np.asarray(flops, dtype=np.float64), np.asarray(size_bytes, dtype=np.float64)
    result: NDArray[np.float64] = np.maximum(flops / np.asarray(peak_flops), size_bytes / bandwidth_bytes_per_s)
    return result


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
        curve: With or without a residual.
        flops: [N] of one call.
        size_bytes: [N] of one call.
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
