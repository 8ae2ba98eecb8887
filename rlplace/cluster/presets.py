"""Device kinds: datasheet facts and sustained fractions of the accelerators that presets name.

Peaks are dense (no sparsity), GB is 1e9 bytes. Sources, quoted beside each number:

* datasheet: the vendors' product sheets, halved where they quote 2:4 sparsity or both directions of a link.
* kernels: medians of public fp32 kernel timings (NeuSight, ASPLOS'25, MIT licence), by total FLOPs of a call.
* MAMF: best achieved matmul rates, "Machine Learning Engineering" (S. Bekman), bf16. That is the best of many shapes; those of
  models reach 0.75 to 0.95 of it, so the largest sustained fraction here is 0.85 of it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

from msgspec import Meta, field

from rlplace import extensions
from rlplace.cluster.fabrics import FAMILIES
from rlplace.errors import InputError, show, unknown_name
from rlplace.problem.check import MAX_BYTES
from rlplace.records import Record, Text, check

DType = Literal["float64", "float32", "tf32", "float16", "bfloat16"]
"""Keys of `DeviceKind.peak_flops` and `gemm_efficiency`; tf32 is what cuDNN convolutions of float32 tensors run in."""

CONTEXT_BYTES = 600_000_000
"""CUDA context with lazily loaded kernels (0.47 GiB on an A100) and library workspaces."""

COMMUNICATION_BYTES = 1_500_000_000
"""Buffers of the collective library, reserved as soon as a cluster has several accelerators (1 to 2 GiB is usual)."""


_Memory = Annotated[int, Meta(ge=0, le=MAX_BYTES)]
_Seconds = Annotated[float, Meta(ge=0, le=1)]
_Rate = Annotated[float, Meta(ge=1e3, le=1e17)]


class DeviceKind(Record, frozen=True):
    """What one kind of accelerator can do.

    Attributes:
        name: For example ``"a100-80g"``.
        peak_flops: FLOP/s by `DType`; a missing dtype runs at the float32 rate.
        gemm_efficiency: Largest sustained fraction of `peak_flops` by `DType`; a missing one takes float32's.
        memory_bandwidth_bytes_per_s: Bandwidth of the device memory.
        memory_bytes: Capacity.
        launch_s: Time that the smallest kernel takes, its share of the host's dispatch included.
        reserved_bytes: Context and workspaces.
        communication_bytes: Further bytes reserved when a cluster has several accelerators.
        gemm_half_s: A matrix product that takes this long at peak reaches 71 % of `gemm_efficiency` (see `rlplace.cost`).
        bandwidth_half_s: The same for memory traffic.
        processors: Streaming multiprocessors, compute units or cores: how many tiles of a product run at a time.
        pcie_generation: Host link, x16.
        pcie_peer: Whether two devices of one host copy directly; otherwise every copy is staged through host memory.
        nvlink: Fabric inside a host: ``"switch"`` (any pair at full rate), ``"cube"`` (V100 hybrid cube mesh), ``"mesh"`` (one
            link to every peer), or None.
        nvlink_bytes_per_s: Usable rate of one direction: of the port for a switch, of a single link for cube and mesh.
        fabric: Measured collectives of that fabric: a name of `rlplace.cluster.fabrics.FAMILIES`, or None.
        pcie_per_switch: Devices that share the uplink of a PCIe switch.
        network: Default network between hosts of this kind, as in the CLUSTER option (``"ib=200g"``, or ``"ib=8x200g"`` for
            eight cards a host).
        host_processor: The host's own processor: reached over PCIe by the accelerators of its host.
    """

    name: Text
    peak_flops: Mapping[DType, Annotated[float, Meta(ge=1e3, le=1e19)]]
    memory_bandwidth_bytes_per_s: _Rate
    memory_bytes: Annotated[int, Meta(gt=0, le=MAX_BYTES)]
    gemm_efficiency: Mapping[DType, Annotated[float, Meta(ge=1e-6, le=1)]] = field(
        default_factory=lambda: MappingProxyType({"float32": 0.7})
    )
    launch_s: _Seconds = 6e-6
    reserved_bytes: _Memory = CONTEXT_BYTES
    communication_bytes: _Memory = COMMUNICATION_BYTES
    gemm_half_s: _Seconds = 150e-6
    bandwidth_half_s: _Seconds = 30e-6
    processors: Annotated[int, Meta(ge=1, le=1_000_000)] = 108
    pcie_generation: Literal[3, 4, 5] = 4
    pcie_peer: bool = True
    nvlink: Literal["switch", "cube", "mesh"] | None = None
    nvlink_bytes_per_s: float = 0.0
    fabric: str | None = None
    pcie_per_switch: Annotated[int, Meta(ge=1, le=64)] = 1
    network: str = "eth=25g"
    host_processor: bool = False

    def __post_init__(self) -> None:
        for name in ("peak_flops", "gemm_efficiency"):
            if "float32" not in getattr(self, name):
                raise InputError(f"{name} needs at least float32")
        if self.nvlink is not None:
            check(_Rate, self.nvlink_bytes_per_s, "nvlink_bytes_per_s")
        if self.fabric is not None and self.fabric not in FAMILIES:
            raise unknown_name("fabric", self.fabric, FAMILIES)


# Host processors dispatch nothing to themselves; a pass over memory costs about a microsecond of loop set-up. The preset is one
# 32-core server socket: 32 cores x 2.5 GHz x 32 FLOP per cycle (two 256-bit FMA units), eight DDR5 channels.
CPU_CORE_FLOPS = 80e9
CPU_CORE_BANDWIDTH = 12e9
CPU_SOCKET_BANDWIDTH = 200e9


def cpu_kind(cores: int, memory_bytes: int, name: str = "cpu") -> DeviceKind:
    """A host processor with `cores` cores, scaled from the constants of one core."""
    peak = CPU_CORE_FLOPS * cores
    return DeviceKind(
        name=name,
        peak_flops=MappingProxyType({"float64": peak / 2, "float32": peak, "bfloat16": peak, "float16": peak / 4}),
        memory_bandwidth_bytes_per_s=min(CPU_CORE_BANDWIDTH * cores, CPU_SOCKET_BANDWIDTH),
        memory_bytes=memory_bytes,
        gemm_efficiency=MappingProxyType({"float32": 0.7, "bfloat16": 0.4, "float16": 0.2}),
        launch_s=2e-6,
        reserved_bytes=0,
        communication_bytes=0,
        gemm_half_s=20e-6,
        bandwidth_half_s=5e-6,
        processors=cores,
        host_processor=True,
    )


def _kind(
    name: str,
    peaks_tflops: dict[DType, float],
    bandwidth_gb_per_s: float,
    memory_gb: float,
    efficiency: dict[DType, float],
    **rest: object,
) -> DeviceKind:
    return DeviceKind(
        name=name,
        peak_flops=MappingProxyType({dtype: peak * 1e12 for dtype, peak in peaks_tflops.items()}),
        memory_bandwidth_bytes_per_s=bandwidth_gb_per_s * 1e9,
        memory_bytes=int(memory_gb * 1e9),
        gemm_efficiency=MappingProxyType(efficiency),
        **rest,  # type: ignore[arg-type]
    )


_KINDS = (
    # V100 SXM2 32 GB (datasheet). No bfloat16 and no tf32. fp32 0.88 (kernels). NVLink2: one link sustains 22.6 of 25 GB/s.
    _kind(
        "v100", {"float64": 7.8, "float32": 15.7, "float16": 125}, 900, 32, {"float32": 0.87, "float16": 0.70},
        launch_s=7e-6, gemm_half_s=260e-6, processors=80, pcie_generation=3, nvlink="cube", nvlink_bytes_per_s=22.6e9,
        fabric="nvlink2", pcie_per_switch=2, network="ib=4x100g",
    ),
    # A100 SXM 40 GB (datasheet). fp32 0.79 to 0.81 (kernels, PCIe card). NVLink3: 300 GB/s each way, 88 % usable for copies.
    _kind(
        "a100-40g", {"float64": 9.7, "float32": 19.5, "tf32": 156, "float16": 312, "bfloat16": 312}, 1555, 40,
        {"float32": 0.81, "tf32": 0.70, "float16": 0.74, "bfloat16": 0.74},
        gemm_half_s=230e-6, nvlink="switch", nvlink_bytes_per_s=264e9,
        fabric="nvlink3", pcie_per_switch=2, network="ib=8x200g",
    ),
    # A100 SXM 80 GB (datasheet). fp32 0.90 to 0.91 (kernels); bf16 271 of 312 TFLOP/s (MAMF) x 0.85.
    _kind(
        "a100-80g", {"float64": 9.7, "float32": 19.5, "tf32": 156, "float16": 312, "bfloat16": 312}, 2039, 80,
        {"float32": 0.91, "tf32": 0.70, "float16": 0.74, "bfloat16": 0.74},
        gemm_half_s=128e-6, nvlink="switch", nvlink_bytes_per_s=264e9,
        fabric="nvlink3", pcie_per_switch=2, network="ib=8x200g",
    ),
    # H100 SXM (datasheet). fp32 0.76 (kernels); bf16 794 of 989 (MAMF) x 0.85. NVLink4: 396 of 450 GB/s measured for a copy.
    _kind(
        "h100", {"float64": 34, "float32": 67, "tf32": 494.5, "float16": 989, "bfloat16": 989}, 3350, 80,
        {"float32": 0.76, "tf32": 0.65, "float16": 0.68, "bfloat16": 0.68},
        launch_s=5e-6, reserved_bytes=700_000_000, gemm_half_s=150e-6, processors=132, pcie_generation=5,
        nvlink="switch", nvlink_bytes_per_s=396e9, fabric="nvlink4", network="ib=8x400g",
    ),
    # H200 SXM (datasheet): the compute of an H100 with faster and larger memory.
    _kind(
        "h200", {"float64": 34, "float32": 67, "tf32": 494.5, "float16": 989, "bfloat16": 989}, 4800, 141,
        {"float32": 0.76, "tf32": 0.65, "float16": 0.68, "bfloat16": 0.68},
        launch_s=5e-6, reserved_bytes=700_000_000, gemm_half_s=150e-6, processors=132, pcie_generation=5,
        nvlink="switch", nvlink_bytes_per_s=396e9, fabric="nvlink4", network="ib=8x400g",
    ),
    # L4 (datasheet, 72 W): power-limited, sustains 0.28 of its fp32 peak (kernels); tensor-core fractions scaled alike.
    _kind(
        "l4", {"float32": 30.3, "tf32": 60, "float16": 121, "bfloat16": 121}, 300, 24,
        {"float32": 0.28, "tf32": 0.40, "float16": 0.50, "bfloat16": 0.50}, gemm_half_s=26e-6, processors=58,
    ),
    # T4 (datasheet, 70 W, 15 GB usable): sustains 0.40 of its fp32 peak (kernels). No bfloat16 and no tf32.
    _kind(
        "t4", {"float32": 8.1, "float16": 65}, 320, 15, {"float32": 0.40, "float16": 0.40},
        launch_s=7e-6, gemm_half_s=49e-6, processors=40, pcie_generation=3,
    ),
    # RTX 4090 (datasheet; half precision with fp32 accumulation). The driver disables peer copies.
    _kind(
        "rtx4090", {"float32": 82.6, "tf32": 82.6, "float16": 165.2, "bfloat16": 165.2}, 1008, 24,
        {"float32": 0.65, "tf32": 0.65, "float16": 0.85, "bfloat16": 0.85}, launch_s=5e-6, gemm_half_s=60e-6,
        processors=128, pcie_peer=False,
    ),
    # MI300X (datasheet). bf16 668 of 1300 (MAMF, ROCm 6.3) x 0.85; fp32 fraction as MI210 (kernels). xGMI: 48 GB/s per peer.
    _kind(
        "mi300x", {"float64": 81.7, "float32": 163.4, "tf32": 653.7, "float16": 1307, "bfloat16": 1307}, 5300, 192,
        {"float32": 0.60, "tf32": 0.45, "float16": 0.43, "bfloat16": 0.43},
        launch_s=9e-6, reserved_bytes=1_000_000_000, gemm_half_s=60e-6, processors=304, pcie_generation=5,
        nvlink="mesh", nvlink_bytes_per_s=48e9, fabric="xgmi", network="ib=8x400g",
    ),
    cpu_kind(32, 256_000_000_000),
)  # fmt: skip

KINDS: Mapping[str, DeviceKind] = MappingProxyType({kind.name: kind for kind in _KINDS})
"""All built-in kinds by name."""

RESERVED = ("host",)
"""Names that stand for something else in the text of a cluster."""


def device_kind(name: str) -> DeviceKind:
    """Looks up a preset kind, built in or of an installed package (docs/plugins.md).

    Raises:
        InputError: Unknown name; says the nearest one.
    """
    kind = find_kind(name)
    if kind is None:
        raise unknown_name("device kind", name, kind_names())
    return kind


def find_kind(name: Any) -> DeviceKind | None:
    """Like `device_kind`, None for unknown names."""
    if name in KINDS:
        return KINDS[name]
    extension = extensions.find(extensions.DEVICES, name, {*KINDS, *RESERVED})
    return None if extension is None else _kind_of(extension)


def kind_names() -> list[str]:
    """The built-in kinds and those of installed packages, which are not imported for that."""
    return [*KINDS, *extensions.names(extensions.DEVICES, {*KINDS, *RESERVED})]


@functools.cache
def _kind_of(extension: extensions.Extension) -> DeviceKind:
    """The kind that an installed package offers: a `DeviceKind`, or a function of no arguments that returns one."""
    kind = extension.load()
    if callable(kind) and not isinstance(kind, DeviceKind):
        try:
            kind = kind()
        except Exception as error:  # another package's code may raise anything
            raise extensions.wrong(extension, f"it failed with {type(error).__name__}: {error}") from error
    if not isinstance(kind, DeviceKind):
        raise extensions.wrong(extension, f"expected a DeviceKind or a function that returns one, found {show(kind)}")
    if kind.name != extension.name or kind.name != kind.name.lower():
        raise extensions.wrong(extension, f"its kind is named {show(kind.name)}; both names must be the same and lower case")
    try:
        check(DeviceKind, kind, "its kind")
    except InputError as error:
        raise extensions.wrong(extension, str(error)) from error
    return kind
