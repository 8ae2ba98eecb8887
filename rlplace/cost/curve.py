"""Time of one kernel: a launch floor, two saturating efficiencies, and a learned correction.

    t = launches * floor + max(flops / (e peak g(flops)), bytes / (e_b bandwidth g_b(bytes))),   g(x) = (x / (x + half)) ** s

The form is the one that fits public kernel timings with few numbers; s = 1 makes every call pay a fixed time (the pipeline
fill of a kernel), s = 1/2 lets the efficiency climb more slowly.

The correction is a small network with a bounded output. Its features are logarithms of sizes and the waste of covering a
product with tiles of whole processors. A prediction is the curve's time multiplied by at most `bound`, divided by at most
`bound`, and never below the roofline.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Literal, get_args

import numpy as np
from msgspec import Meta
from numpy.typing import ArrayLike, NDArray

from rlplace.errors import InputError, unknown_name
from rlplace.records import Record, Whole

MAX_WEIGHTS = 10_000

Basis = Literal["measured", "fitted", "scaled", "calibrated", "extrapolated"]
"""Basis of a time: this very shape was timed (`measured`); a curve fitted on timings of that device (`fitted`: published
ones, `calibrated`: a user's own), beyond the sizes that were timed (`extrapolated`); or numbers carried over from a datasheet
or a related device (`scaled`)."""

Direction = Literal["forward", "backward", "update", "backward_weight"]
"""`backward` of products and convolutions is the gradient of the input; `backward_weight` that of the weight, priced by the
backward curve where it has none of its own. Other ops, and whole ops that were measured, have one backward."""

Precision = Literal["float64", "float32", "tf32", "float16", "bfloat16"]
"""Dtypes of the arithmetic. tf32 is the one in which cuDNN runs float32 convolutions."""

BASES: tuple[str, ...] = get_args(Basis)
DIRECTIONS: tuple[str, ...] = get_args(Direction)

DIMS = (
    "batch", "m", "n", "k", "heads", "queries", "keys", "width", "value_width", "causal", "rows", "columns", "image", "flops",
    "bytes",
)  # fmt: skip
"""Names of sizes that may identify a measured shape. All but the last two are sizes in `OpGraph.op_dims`."""

_Share = Annotated[float, Meta(ge=1e-6, le=1)]
_Work = Annotated[float, Meta(ge=0, le=1e18)]
KernelSeconds = Annotated[float, Meta(ge=0, le=1)]
_Weight = Annotated[float, Meta(ge=-1e6, le=1e6)]


Sizes = Mapping[str, NDArray[np.float64]]
"""Float arrays [N] by name of `DIMS`; sizes that an op class does not have are 1."""

Feature = Callable[[Sizes, float], NDArray[np.float64]]

TILES = ((256, 128), (128, 128), (128, 64), (64, 64), (32, 32), (128, 32), (32, 128))
"""Rows and columns of the result that a block of a product's kernel makes."""


def _log(name: str, sizes: Sizes, processors: float) -> NDArray[np.float64]:
    return np.log2(np.maximum(sizes[name], 1.0))


def _waves(rows: int, columns: int, sizes: Sizes, processors: float) -> NDArray[np.float64]:
    """Returns waves of tiles over the processors, fractions included."""
    return sizes["batch"] * np.ceil(sizes["m"] / rows) * np.ceil(sizes["n"] / columns) / processors


def _log_waves(rows: int, columns: int, sizes: Sizes, processors: float) -> NDArray[np.float64]:
    return np.log2(_waves(rows, columns, sizes, processors))


def _wave_waste(rows: int, columns: int, sizes: Sizes, processors: float) -> NDArray[np.float64]:
    """Returns log2 of (processor slots in whole waves) / (tiles): 0 when the last wave is full."""
    waves = _waves(rows, columns, sizes, processors)
    return np.log2(np.ceil(waves) / waves)


def _edge(name: str, side: int, sizes: Sizes, processors: float) -> NDArray[np.float64]:
    """Returns log2 of (size covered by whole tiles) / (size)."""
    return np.log2(np.ceil(sizes[name] / side) * side / sizes[name])


def _aligned(name: str, by: int, sizes: Sizes, processors: float) -> NDArray[np.float64]:
    """Returns 1 where loads of `by` elements fit."""
    return (sizes[name] % by == 0).astype(np.float64)


FEATURES: Mapping[str, Feature] = {
    **{f"log_{name}": partial(_log, name) for name in DIMS if name != "causal"},
    "log_intensity": lambda sizes, processors: _log("flops", sizes, processors) - _log("bytes", sizes, processors),
    **{f"waves_{a}x{b}": partial(_log_waves, a, b) for a, b in TILES},
    **{f"wave_waste_{a}x{b}": partial(_wave_waste, a, b) for a, b in TILES},
    **{f"edge_{name}_{side}": partial(_edge, name, side) for name in ("m", "n") for side in (32, 64, 128, 256)},
    **{f"edge_image_{side}": partial(_edge, "image", side) for side in (2, 4, 6)},
    **{f"edge_{name}_32": partial(_edge, name, 32) for name in ("k", "columns")},
    **{f"{name}_by_{by}": partial(_aligned, name, by) for name in ("m", "n", "k", "columns") for by in (2, 4, 8)},
    # A warp keeps a row in registers: softmax of up to 1,024 columns is another kernel.
    "row_in_registers": lambda sizes, processors: (sizes["columns"] <= 1024).astype(np.float64),
    "row_waves": lambda sizes, processors: np.log2(np.maximum(sizes["rows"], 1.0) / processors),
}
"""Features by name: functions of sizes and of the number of processors (streaming multiprocessors) of the device."""


class Residual(Record, frozen=True):
    """A small network that corrects a curve by a bounded factor.

    The part of a time above the floor is multiplied by ``bound ** tanh(net(x))``, where x are the features, clamped to the
    range that the network was fitted on and standardised, and net has tanh layers and one linear output. A net with one layer
    is a linear model.

    Attributes:
        features: F names, see `rlplace.cost.table.FEATURES`.
        mean: F means of the features.
        scale: F standard deviations of the features.
        low: F smallest values that were fitted; a shape beyond is corrected like one at the edge.
        high: F largest values that were fitted.
        weights: Per layer the matrix, rows are outputs.
        bias: Per layer the bias.
        bound: Largest factor, above 1; the smallest is its reciprocal.
        least_flops: Share of the counted FLOPs that the best algorithm does: a quarter in Winograd convolutions.
    """

    features: tuple[str, ...]
    mean: tuple[_Weight, ...]
    scale: tuple[Annotated[float, Meta(ge=1e-9, le=1e6)], ...]
    low: tuple[_Weight, ...]
    high: tuple[_Weight, ...]
    weights: tuple[tuple[tuple[_Weight, ...], ...], ...]
    bias: tuple[tuple[_Weight, ...], ...]
    bound: Annotated[float, Meta(ge=1, le=20)]
    least_flops: Annotated[float, Meta(gt=0, le=1)] = 1.0

    def __post_init__(self) -> None:
        width = len(self.features)
        if not width or any(len(getattr(self, name)) != width for name in ("mean", "scale", "low", "high")):
            raise InputError("mean, scale, low and high need one number per feature")
        if not self.weights or len(self.weights) != len(self.bias):
            raise InputError("needs one bias per layer of weights")
        for layer, (matrix, bias) in enumerate(zip(self.weights, self.bias, strict=True)):
            if not matrix or any(len(row) != width for row in matrix) or len(bias) != len(matrix):
                raise InputError(f"layer {layer} does not fit the {width} values before it")
            width = len(matrix)
        if width != 1:
            raise InputError(f"the last layer must have one output, it has {width}")
        count = sum(len(row) + 1 for matrix in self.weights for row in matrix)
        if count > MAX_WEIGHTS:
            raise InputError(f"{count} weights, the limit is {MAX_WEIGHTS}")
        if any(low > high for low, high in zip(self.low, self.high, strict=True)):
            raise InputError("a low is above its high")
        for name in self.features:
            if name not in FEATURES:
                raise unknown_name("feature", name, FEATURES)


class Curve(Record, frozen=True):
    """Time of one kernel against its work.

    ``t = floor + max(flops / (e peak g(flops)), bytes / (e_b bandwidth g_b(bytes)))`` with
    ``g(x) = (x / (x + half)) ** saturation``.

    Attributes:
        compute_efficiency: Largest fraction of the device's peak for that dtype, in (0, 1].
        compute_half_flops: FLOPs of a call at which x / (x + half) is one half.
        bandwidth_efficiency: Largest fraction of the device's memory bandwidth, in (0, 1].
        bandwidth_half_bytes: The same for bytes.
        floor_s: Time of the smallest kernel inside a step; None takes the device kind's `launch_s`.
        saturation: Exponent of g, in (0, 1].
        overhead_s: Time that the measuring method added to every time that the curve was fitted on (launch and synchronisation
            of a single call); not part of any prediction.
        basis: One of `BASES`.
        source: For display: data, software, method.
        residual: Optional correction.
        unaligned: Of products whose rows in memory are not all multiples of 8 elements: factors on the compute term for
            multiples of 4, of 2, and for odd ones; empty for none.
    """

    compute_efficiency: _Share
    compute_half_flops: _Work
    bandwidth_efficiency: _Share
    bandwidth_half_bytes: _Work
    floor_s: KernelSeconds | None = None
    saturation: _Share = 1.0
    overhead_s: KernelSeconds = 0.0
    basis: Basis = "scaled"
    source: str = ""
    residual: Residual | None = None
    unaligned: tuple[Annotated[float, Meta(ge=1, le=100)], ...] = ()

    def __post_init__(self) -> None:
        if len(self.unaligned) not in (0, 3):
            raise InputError(f"curve: unaligned has {len(self.unaligned)} factors; give three, for multiples of 4, 2 and 1")


class MeasuredShape(Record, frozen=True):
    """The time of one op of one shape; overrides the curve for ops of equal dims.

    Attributes:
        dims: Sizes by name, names from `DIMS`; an op matches when all of them are equal.
        seconds: Device time of the whole op (all its kernels), launch included, measuring overhead removed.
    """

    dims: Annotated[Mapping[str, Whole], Meta(min_length=1)]
    seconds: Annotated[float, Meta(ge=0, le=1e6)]

    def __post_init__(self) -> None:
        for name in self.dims:
            if name not in DIMS:
                raise unknown_name("dim", name, DIMS)


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
    """Divides `amount` by the efficiency factor g that it reaches; 0 stays 0.

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
