"""Curves of devices and dtypes without a fit: class constants on datasheet numbers, and curves of related devices."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import cast

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlplace.cluster.presets import KINDS, DeviceKind, DType
from rlplace.cost.curve import Curve, Sizes, kernel_seconds
from rlplace.cost.table import CostTable, Key
from rlplace.model.graph.opgraph import OpGraph


@dataclass(frozen=True)
class OpClass:
    """Use of a device by an op class.

    Attributes:
        matrix: Runs on matrix units: `gemm_efficiency` and the dtype's peak apply; otherwise the float32 vector rate.
        compute: Factor on `gemm_efficiency` (matrix), or fraction of the vector peak.
        bandwidth: Largest fraction of memory bandwidth.
        half: Factor on the kind's `gemm_half_s`; batched and fused kernels need more work to fill a device.
        kernels: Kernels of one forward or update op.
        backward_kernels: Kernels of one backward op.
        backward_compute: Factor on `compute` in backward.
    """

    matrix: bool
    compute: float
    bandwidth: float
    half: float = 1.0
    kernels: float = 1.0
    backward_kernels: float = 1.0
    backward_compute: float = 1.0


# Fractions of bandwidth: medians at 0.3 to 1 GB of the public kernel timings (elementwise 0.84, softmax 0.63, layer norm 0.6).
# Batched products: 0.84 against 0.81 of peak above 1e12 FLOP, reached later. Fused attention: 0.6 to 0.75 of the plain product,
# backward 0.86 of forward (63 % against 73 % of an A100's peak, FlashAttention-2; 595 TFLOP/s and 500 of cuDNN on an H100, head
# width 128, figures 5 and 6 of FlashAttention-3, where products reach 790; from torch 2.10 on, cuDNN is what Hopper runs).
# Optimizers run as multi-tensor kernels, so a parameter costs a small share of a launch.
CLASSES: dict[str, OpClass] = {
    "gemm": OpClass(True, 1.0, 0.85, backward_kernels=2),
    "bmm": OpClass(True, 0.95, 0.80, half=2.5, backward_kernels=2),
    "attention": OpClass(True, 0.75, 0.80, half=2.5, backward_kernels=3, backward_compute=0.86),
    "conv": OpClass(True, 0.75, 0.75, backward_kernels=2, backward_compute=0.9),
    "recurrent": OpClass(True, 0.35, 0.60, half=2.0, kernels=4, backward_kernels=6),
    "scan": OpClass(False, 0.20, 0.60),
    "elementwise": OpClass(False, 0.50, 0.88),
    "reduction": OpClass(False, 0.40, 0.75),
    "norm": OpClass(False, 0.40, 0.62, backward_kernels=2),
    "softmax": OpClass(False, 0.40, 0.65),
    "embedding": OpClass(False, 0.40, 0.60),
    "gather": OpClass(False, 0.40, 0.60),
    "copy": OpClass(False, 0.50, 0.85),
    "view": OpClass(False, 0.50, 0.85, kernels=0, backward_kernels=0),
    "random": OpClass(False, 0.40, 0.80),
    "optimizer": OpClass(False, 0.50, 0.80, kernels=0.2),
    "module": OpClass(True, 0.70, 0.70, kernels=4, backward_kernels=6),
    "other": OpClass(False, 0.30, 0.60),
}

TF32_CLASSES = ("conv", "recurrent")
"""Classes that cuDNN runs; its tf32 is on by default, that of matrix products is off."""

RELATED: Mapping[str, str] = {
    "h100": "h200", "h800": "h200", "gh200": "h200", "b200": "h200", "b300": "h200", "gb200": "h200", "h200": "a100-80g",
    "a800": "a100-80g",
}  # fmt: skip
"""Whose fitted fractions a kind borrows where it has none of its own: the same chip, or the nearest one with a full power
budget. Leaving one device out (docs/cost-model/accuracy.md) shows what that is worth; power-limited cards lend none."""

HALF_PRECISION_HALF_S = 16e-6
"""`gemm_half_s` of attention and convolutions in half precision and tf32. Kernels in float32 take longer to fill a device, for
its peak is a fifteenth or an eighth."""

TF32_CONVOLUTION = 0.28
"""Sustained fraction of the tf32 peak of convolutions, whose channels cuDNN moves last and back. With the half point above: all
convolutions of a ResNet-50 step of 64 images on one H200 (benchmarks/gpu) take 0.98 of what was measured; 256 images on an
A100-80 in 272.9 ms as published, where the other ops leave 155 ms for the 162 predicted; and on an A100-40 the forward takes
1.18 times as long an image with 32 images as with 256, published 1.19 (NVIDIA DeepLearningExamples, ResNet-50 v1.5: PyTorch
training, TensorFlow inference latency in TF32)."""

HALF_PRECISION_PRODUCT_S = 2e-6
"""Both half points of plain and batched products in half precision, beside the launch. 41 bf16 products of cuBLAS on an H100
SXM, from 9 us to 10 ms, many of them bound by memory, are off by 6 % with these and 0.8 of the peak; with 16 and 30 us those
below 30 us came out 57 % too slow (github.com/waynehacking8/blackwell-tensorcore-kernels, results/reference/deepgemm.txt)."""

FLASH_ATTENTION_2 = 1.62
"""Times as long as cuDNN on an H100, which torch runs since 2.10: causal forwards 335 for 539 TFLOP/s with 16,384 positions and
319 for 518 with 4,096, backwards 322 for 516 (FlashAttention-3, figures 5 and 6, heads of 128)."""

MEMORY_EFFICIENT = 2.1
"""Times as long as FlashAttention-2, of CUTLASS's kernels: a forward on an A100 with 8,096 positions and heads of 128 reaches
108 TFLOP/s (github.com/facebookresearch/xformers, pull request 389) for 228 (FlashAttention-2); about twice as long on an A40,
too (issue 1074). No backwards are published; they are taken to be as far behind."""

_CUDNN = ("h100", "h200", "h800", "h20", "gh200", "b200", "b300", "gb200")
_NOT_NVIDIA = ("mi300x", "mi325x", "mi355x", "gaudi3")


def tf32_classes(graph: OpGraph) -> Collection[str]:
    """Returns classes whose float32 ops run in tf32, as PyTorch was set when the graph was captured."""
    recorded = graph.capture.get("tf32", TF32_CLASSES)
    return [name for name in recorded if name in CLASSES] if isinstance(recorded, list | tuple) else TF32_CLASSES


def precision_of(kind: DeviceKind, op: str, dtype: str, tf32: Collection[str] = TF32_CLASSES) -> str:
    """Returns the precision of an op's arithmetic: float32 of the classes `tf32` in tf32, dtypes without units in float32."""
    if not CLASSES[op].matrix:
        return "float64" if dtype == "float64" and "float64" in kind.peak_flops else "float32"
    if dtype == "float32" and op in tf32 and "tf32" in kind.peak_flops:
        return "tf32"
    return dtype if dtype in kind.peak_flops else "float32"


EMULATED = 0.6
"""Rate of matrix products in a 16-bit type without units, as a part of their float32 rate: their inputs and outputs are
converted. torch.matmul in bfloat16 beside float32, best of sizes up to 10240 (github.com/zzc0721/torch-performance-test-data):
V100S 9.9 of 13.6 TFLOP/s, T4 2.3 to 2.5 of 4.2 to 4.4, RTX 2080 5.1 of 9.2."""


def emulated(curve: Curve, kind: DeviceKind, op: str, dtype: str) -> Curve:
    """Returns the curve of products in a 16-bit type: slower than float32 where the kind has no units and no timings."""
    lacks = CLASSES[op].matrix and dtype in ("float16", "bfloat16") and dtype not in kind.peak_flops
    slower = msgspec.structs.replace(curve, compute_efficiency=EMULATED * curve.compute_efficiency)
    return slower if lacks and curve.basis == "scaled" else curve


def unlike_widths(kind: DeviceKind, sizes: Sizes) -> NDArray[np.bool_]:
    """Marks attention [N] that the usual kernel of a device does not take, for values of another width than queries.

    FlashAttention takes no unlike widths. On Hopper and on large Blackwell devices cuDNN, which torch prefers there, takes 192
    and 128, as DeepSeek-V3 has (pytorch, pull request 172621), and any up to 128 (sdp_utils.cpp, check_cudnn_tensor_shapes).
    """
    query, value = sizes["width"], sizes["value_width"]
    taken = (np.maximum(query, value) <= 128) | ((query == 192) & (value == 128))
    return (value > 1) & ~(taken & (base_name(kind.name) in _CUDNN))


def slower_attention(curve: Curve, kind: DeviceKind, dtype: str) -> Curve:
    """Returns the curve of attention that `unlike_widths` marks: torch's memory-efficient kernels run.

    They run for all widths in float32 and on devices older than FlashAttention-2. AMD's library has one kernel for both.
    """
    times = MEMORY_EFFICIENT * _flash_times(kind, dtype)
    if not times or curve.basis == "calibrated":
        return curve
    source = f"memory-efficient attention, {times:.1f} times as long: {curve.source}"
    return msgspec.structs.replace(curve, compute_efficiency=curve.compute_efficiency / times, basis="scaled", source=source)


def _flash_times(kind: DeviceKind, dtype: str) -> float:
    """Returns how many times as long FlashAttention-2 takes as the usual kernel of a device; 0 where one kernel does all."""
    name = base_name(kind.name)
    several = dtype in ("float16", "bfloat16") and "bfloat16" in kind.peak_flops and not kind.host_processor
    return (FLASH_ATTENTION_2 if name in _CUDNN else 1.0) if several and name not in _NOT_NVIDIA else 0.0


def context_attention_times(kind: DeviceKind, dtype: str, dims: Mapping[str, int], *, ring: bool, backward: bool) -> float:
    """Returns how many times as long attention takes in a context group as the usual kernel does for as much work.

    A ring runs FlashAttention-2, with values as wide as queries. A causal mask of a part of the queries, which are the last of
    the keys, has that or, for unlike widths, the memory-efficient kernel (torch.nn.attention.bias.CausalBias).

    Args:
        kind: The device.
        dtype: Of queries, keys and values.
        dims: Sizes of the attention, see `rlplace.model.aten.dims_of`.
        ring: Keys and values go around; otherwise those of all positions are gathered.
        backward: In the backward pass, whose five products are three over the width of queries and two over that of values.
    """
    flash = _flash_times(kind, dtype)
    if not flash or not (ring or dims.get("causal")):
        return 1.0
    query = dims.get("width", 1)
    value = dims.get("value_width", query)
    usual = 1.0
    if unlike_widths(kind, {"width": np.array([query]), "value_width": np.array([dims.get("value_width", 0)])})[0]:
        usual = MEMORY_EFFICIENT * flash
    of_queries, of_values = (3, 2) if backward else (1, 1)
    padded = (of_queries + of_values) * max(query, value) / (of_queries * query + of_values * value)
    taken = flash * padded if ring else flash if query == value else MEMORY_EFFICIENT * flash
    return taken / usual


def peak_of(kind: DeviceKind, precision: str) -> float:
    """Returns the FLOP/s that `Curve.compute_efficiency` of that precision is a fraction of."""
    return kind.peak_flops.get(cast(DType, precision), kind.peak_flops["float32"])


def seconds_on(
    kind: DeviceKind, precision: str, curve: Curve, flops: ArrayLike, size_bytes: ArrayLike, sizes: Sizes
) -> NDArray[np.float64]:
    """Returns seconds [N] of single calls on a device kind, without launch; see `rlplace.cost.table.kernel_seconds`."""
    peak, bandwidth = peak_of(kind, precision), kind.memory_bandwidth_bytes_per_s
    return kernel_seconds(
        curve, flops, size_bytes, sizes, peak_flops=peak, bandwidth_bytes_per_s=bandwidth, processors=kind.processors
    )


def datasheet_curve(kind: DeviceKind, op: str, precision: str, direction: str) -> Curve:
    """Returns a curve from the class constants and the numbers of the device kind."""
    item = CLASSES[op]
    efficiency = item.compute
    peak = peak_of(kind, precision)
    if op == "conv" and precision == "tf32":  # no slower than in float32, where its peak is hardly higher
        efficiency = max(TF32_CONVOLUTION, efficiency * kind.gemm_efficiency["float32"] * kind.peak_flops["float32"] / peak)
    elif item.matrix:
        efficiency *= kind.gemm_efficiency.get(cast(DType, precision), kind.gemm_efficiency["float32"])
    if direction in ("backward", "backward_weight"):
        efficiency *= item.backward_compute
    half_s, bandwidth_half_s = kind.gemm_half_s, kind.bandwidth_half_s
    if precision in ("float16", "bfloat16", "tf32") and not kind.host_processor:
        product = op in ("gemm", "bmm")
        half_s = min(half_s, HALF_PRECISION_PRODUCT_S if product else HALF_PRECISION_HALF_S)
        bandwidth_half_s = min(bandwidth_half_s, HALF_PRECISION_PRODUCT_S) if product else bandwidth_half_s
    return Curve(
        compute_efficiency=min(max(efficiency, 1e-6), 1.0),
        compute_half_flops=min(peak * half_s * item.half, 1e18),
        bandwidth_efficiency=item.bandwidth,
        bandwidth_half_bytes=kind.memory_bandwidth_bytes_per_s * bandwidth_half_s,
        saturation=0.5,
        basis="scaled",
        source="datasheet peaks, class constants",
    )


def find_curve(kind: DeviceKind, costs: CostTable, op: str, precision: str, direction: str) -> Curve:
    """Returns the best available curve of a device kind: its own, that of a related direction, precision or device, or
    datasheet.

    A product of a backward pass is the same kernel as one of a forward pass and keeps the basis of the forward curve. Every
    other loan is "scaled", whatever the curve was where it comes from. A kind whose efficiencies or half points a cluster file
    has changed keeps those values: published fits are then ignored.

    Args:
        kind: The device.
        costs: Curves by the name of the kind; a kind called "name/..." uses those of "name".
        op: Op class.
        precision: Precision of the op's arithmetic, see `precision_of`.
        direction: One of `rlplace.cost.curve.DIRECTIONS`.
    """
    name = base_name(kind.name)
    own = costs.kinds[name].curves if name in costs.kinds else {}
    by_hand = _given_by_hand(kind, name)
    if by_hand:
        own = {key: curve for key, curve in own.items() if curve.basis != "fitted"}
    for key in _own_keys(op, precision, direction):
        curve = own.get(key)
        if curve is None:
            continue
        same = key[0] == op and key[1] == precision and (op in ("gemm", "bmm") or key[2] != "forward")
        if same or key == (op, precision, direction):
            return curve
        return msgspec.structs.replace(curve, basis="scaled", source=f"{'/'.join(key)} curve: {curve.source}")
    other = name
    while not by_hand and other in RELATED:
        other = RELATED[other]
        lent = costs.kinds[other].curves if other in costs.kinds else {}
        for key in _own_keys(op, precision, direction):
            if key in lent:
                return _carried(lent[key], kind, other)
    return datasheet_curve(kind, op, precision, direction)


def _given_by_hand(kind: DeviceKind, name: str) -> bool:
    """Returns whether a preset's constants of op times were replaced."""
    preset = KINDS.get(name)
    fields = ("gemm_efficiency", "gemm_half_s", "bandwidth_half_s")
    return preset is not None and any(getattr(kind, field) != getattr(preset, field) for field in fields)


def base_name(name: str) -> str:
    """Returns the kind that a device with numbers of its own was derived from."""
    return name.partition("/")[0]


def _own_keys(op: str, precision: str, direction: str) -> list[Key]:
    keys = [(op, precision, direction)]
    if direction == "backward_weight":
        keys.append((op, precision, "backward"))
    if direction in ("backward", "backward_weight") and (op in ("gemm", "bmm", "conv") or not CLASSES[op].matrix):
        keys.append((op, precision, "forward"))
    if not CLASSES[op].matrix and precision != "float32":
        keys += [(op, "float32", direction), (op, "float32", "forward")]
    if op == "copy":  # reads and writes as an elementwise op does
        keys.append(("elementwise", "float32", "forward"))
    return keys


def _carried(curve: Curve, kind: DeviceKind, other: str) -> Curve:
    """Returns the curve of another device at this one's peaks: equal fractions, half points that take equally long."""
    if other in KINDS:
        bandwidth = kind.memory_bandwidth_bytes_per_s / KINDS[other].memory_bandwidth_bytes_per_s
        compute = peak_of(kind, "float32") / peak_of(KINDS[other], "float32")
        curve = msgspec.structs.replace(
            curve,
            compute_half_flops=min(curve.compute_half_flops * compute, 1e18),
            bandwidth_half_bytes=min(curve.bandwidth_half_bytes * bandwidth, 1e18),
        )
    return msgspec.structs.replace(curve, basis="scaled", source=f"fractions of {other}: {curve.source}")
