"""Roofline op times.

    time = launches * floor + max(flops / (peak * e), bytes / (bandwidth * b))
    e = e_max(class, dtype) * sqrt(flops / (flops + peak * half))        and b likewise with bytes

The floor is the smallest kernel with its share of host dispatch. Efficiency saturates with the size of a call: the square-root
form follows the public fp32 kernel medians (0.25 / 0.58 / 0.75 of peak at 5e8 / 3e9 / 5e10 FLOP on an A100) within about ten
points and lets tiny calls cost the floor. Views cost nothing. float32 matrix products run at the float32 rate and float32
convolutions at the tf32 rate, as PyTorch's defaults have it (``matmul.allow_tf32=False``, ``cudnn.allow_tf32=True``).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.cluster.presets import DeviceKind
from rlplace.graph.opgraph import BACKWARD, BACKWARD_WEIGHT, OP_KINDS, OpGraph

VERSION = 1
"""Of the cost model; part of a problem's source, so that a change of constants shows."""


@dataclass(frozen=True)
class OpClass:
    """How an op kind uses a device.

    Attributes:
        matrix: Runs on matrix units: `gemm_efficiency` and the dtype's peak apply; otherwise the float32 vector rate.
        compute: Factor on `gemm_efficiency` (matrix), or fraction of the vector peak.
        bandwidth: Largest fraction of memory bandwidth.
        half: Factor on the kind's `gemm_half_s`; batched and fused kernels need more work to fill a device.
        backward_launches: Kernels of its backward.
        launches: Kernels of its forward or update.
    """

    matrix: bool
    compute: float
    bandwidth: float
    half: float = 1.0
    backward_launches: float = 1.0
    launches: float = 1.0


# Fractions of bandwidth: medians at 0.3 to 1 GB of the public kernel timings (elementwise 0.84, softmax 0.63, layer norm 0.6).
# Batched products: 0.84 against 0.81 of peak above 1e12 FLOP, reached later. Fused attention: 0.6 to 0.7 of the plain product.
# Optimizers run as multi-tensor kernels, so a parameter costs a small share of a launch.
CLASSES: dict[str, OpClass] = {
    "gemm": OpClass(True, 1.0, 0.85, backward_launches=2),
    "bmm": OpClass(True, 0.95, 0.80, half=2.5, backward_launches=2),
    "attention": OpClass(True, 0.65, 0.80, half=2.5, backward_launches=2),
    "conv": OpClass(True, 0.75, 0.75, backward_launches=2),
    "recurrent": OpClass(True, 0.35, 0.60, half=2.0, launches=4, backward_launches=6),
    "scan": OpClass(False, 0.20, 0.60),
    "elementwise": OpClass(False, 0.50, 0.88),
    "reduction": OpClass(False, 0.40, 0.75),
    "norm": OpClass(False, 0.40, 0.62, backward_launches=2),
    "softmax": OpClass(False, 0.40, 0.65),
    "embedding": OpClass(False, 0.40, 0.60),
    "gather": OpClass(False, 0.40, 0.60),
    "copy": OpClass(False, 0.50, 0.85),
    "view": OpClass(False, 0.50, 0.85, launches=0, backward_launches=0),
    "random": OpClass(False, 0.40, 0.80),
    "optimizer": OpClass(False, 0.50, 0.80, launches=0.2),
    "module": OpClass(True, 0.70, 0.70, launches=4, backward_launches=6),
    "other": OpClass(False, 0.30, 0.60),
}

_TF32_KINDS = ("conv", "recurrent")  # what cuDNN runs


def op_times(graph: OpGraph, kind: DeviceKind) -> NDArray[np.float64]:
    """Seconds of every op on a device kind.

    Args:
        graph: N ops.
        kind: The device.

    Returns:
        float64 [N].
    """
    return times(
        op_kind=_codes(graph.op_kind, OP_KINDS),
        op_dtype=graph.op_dtype,
        backward=(graph.op_phase == BACKWARD) | (graph.op_phase == BACKWARD_WEIGHT),
        flops=graph.op_flops,
        size_bytes=graph.op_bytes.astype(np.float64),
        kind=kind,
    )


def times(
    *,
    op_kind: NDArray[np.int64],
    op_dtype: tuple[str, ...],
    backward: NDArray[np.bool_],
    flops: NDArray[np.float64],
    size_bytes: NDArray[np.float64],
    kind: DeviceKind,
) -> NDArray[np.float64]:
    """Seconds of ops given by their numbers; `op_kind` indexes `OP_KINDS`, all arrays are [N]."""
    dtypes = sorted(set(op_dtype))
    dtype = _codes(op_dtype, dtypes)
    classes = [CLASSES[name] for name in OP_KINDS]
    peak = np.array([[_peak(kind, name, d) for d in dtypes] for name in OP_KINDS])[op_kind, dtype]
    efficiency = np.array([[_efficiency(kind, name, d) for d in dtypes] for name in OP_KINDS])[op_kind, dtype]
    half_s = kind.gemm_half_s * np.array([c.half for c in classes])[op_kind]
    bandwidth = kind.memory_bandwidth_bytes_per_s * np.array([c.bandwidth for c in classes])[op_kind]
    launches = np.where(
        backward,
        np.array([c.backward_launches for c in classes])[op_kind],
        np.array([c.launches for c in classes])[op_kind],
    )
    calls = np.maximum(launches, 1.0)
    compute = _saturating(flops, calls, peak * half_s) / (peak * efficiency)
    memory = _saturating(size_bytes, calls, kind.memory_bandwidth_bytes_per_s * kind.bandwidth_half_s) / bandwidth
    result = launches * kind.launch_s + np.maximum(compute, memory)
    result[(launches == 0) | ((flops == 0) & (size_bytes == 0))] = 0.0  # views, and backward ops that launch nothing
    seconds: NDArray[np.float64] = result
    return seconds


def _saturating(
    amount: NDArray[np.float64], calls: NDArray[np.float64], half: NDArray[np.float64] | float
) -> NDArray[np.float64]:
    """`amount` divided by the saturation that calls of `amount / calls` reach; grows with the square root while small."""
    scaled: NDArray[np.float64] = np.sqrt(amount) * np.sqrt(amount + calls * half)
    return scaled


def _codes(values: tuple[str, ...], names: tuple[str, ...] | list[str]) -> NDArray[np.int64]:
    number = {name: index for index, name in enumerate(names)}
    return np.fromiter((number[value] for value in values), dtype=np.int64, count=len(values))


def _precision(kind: DeviceKind, op_kind: str, dtype: str) -> str:
    """The entry of `peak_flops` that an op runs at."""
    if dtype == "float32" and op_kind in _TF32_KINDS and "tf32" in kind.peak_flops:
        return "tf32"
    return dtype if dtype in kind.peak_flops else "float32"


def _peak(kind: DeviceKind, op_kind: str, dtype: str) -> float:
    if CLASSES[op_kind].matrix:
        return kind.peak_flops[_precision(kind, op_kind, dtype)]
    return kind.peak_flops["float64"] if dtype == "float64" and "float64" in kind.peak_flops else kind.peak_flops["float32"]


def _efficiency(kind: DeviceKind, op_kind: str, dtype: str) -> float:
    item = CLASSES[op_kind]
    if not item.matrix:
        return item.compute
    base = kind.gemm_efficiency.get(_precision(kind, op_kind, dtype), kind.gemm_efficiency["float32"])
    return item.compute * base
