"""Device kinds: speeds and sizes of an accelerator, built in (``presets.toml``) or of an installed package.

`FAMILIES` has the collective curves of known fabrics, by the name in `DeviceKind.fabric`. `benchmarks/links.py` makes their
coefficients from the published tables and scores them on the sizes that were not used. MB below is 2^20 bytes.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

from msgspec import Meta, field

from rlplace import plugins as extensions
from rlplace.cluster.fabric import Basis, CollectiveCurve, Fabric, Piece, joined_curve
from rlplace.errors import InputError, show, unknown_name
from rlplace.limits import MAX_BYTES
from rlplace.records import Record, Text, build, check

MB = 1 << 20
FIT_BREAKS_MB = (0, 4, 32)
"""Where small, medium and large messages begin."""

# NVLink4 with NVSwitch (H100, H200). Bus bandwidth of 8 GiB messages on H200, "Machine Learning Engineering" (S. Bekman):
# 363 GB/s at 4 devices and 365 flat without in-switch reduction; 414 at 5 and 473 at 8 with it. One ring rate and one
# in-switch rate of the algorithm (bus bandwidth over bus factor) reproduce the four within 2.3 %.
NVLINK4_RING_BYTES_PER_S = 364e9
NVLINK4_SWITCH_BYTES_PER_S = 264.5e9
# Latencies of NCCL 2.27's tuning logs, as autoparallel (BSD-3-Clause) tabulates them.
_NVLINK4_REDUCE_S = {2: 10e-6, 4: 15e-6, 5: 19e-6, 8: 31e-6}
_NVLINK4_GATHER_S = {2: 8e-6, 4: 17e-6, 8: 30e-6}

# xGMI of MI300X: bus bandwidth 47.7 GB/s at 2 and 312.9 at 8 devices, "Machine Learning Engineering"; in between a line, for
# every further device brings one more link. Latency: a 10 us launch and NCCL's 3.4 us (Simple protocol) a hop, 2(n-1) hops.
_XGMI = {n: (10e-6 + 3.4e-6 * 2 * (n - 1), 47.7e9 + (312.9e9 - 47.7e9) * (n - 2) / 6) for n in range(2, 9)}


def _fitted(group_size: int, latency_us: float, small: float, medium: float, large: float) -> CollectiveCurve:
    """Returns a fitted all-reduce: time of an empty message, bus bandwidth in GB/s from each of `FIT_BREAKS_MB` up."""
    rates = (small * 1e9, medium * 1e9, large * 1e9)
    stretches = [(start * MB, rate) for start, rate in zip(FIT_BREAKS_MB, rates, strict=True)]
    return joined_curve(group_size, latency_us * 1e-6, stretches, algorithm="ring")


# `python -m benchmarks.links --coefficients`; the V100 pair is joined by one link.
_NVLINK2 = (
    _fitted(2, 24.09, 22.77, 22.62, 22.56),
    _fitted(4, 45.76, 73.15, 96.92, 85.22),
    _fitted(8, 52.92, 67.93, 153.7, 135.7),
)
_NVLINK3 = (
    _fitted(2, 38.42, 181.1, 172.0, 195.1),
    _fitted(4, 41.92, 165.9, 208.1, 220.3),
    _fitted(8, 91.72, 1722.0, 193.8, 228.9),
)


def _nvlink4() -> tuple[CollectiveCurve, ...]:
    curves = []
    for size, latency in _NVLINK4_REDUCE_S.items():
        in_switch = size >= 5
        rate = NVLINK4_SWITCH_BYTES_PER_S * 2 * (size - 1) / size if in_switch else NVLINK4_RING_BYTES_PER_S
        curves.append(CollectiveCurve(size, (Piece(0.0, latency, rate),), algorithm="nvls" if in_switch else "ring"))
    for size, latency in _NVLINK4_GATHER_S.items():
        curves.append(CollectiveCurve(size, (Piece(0.0, latency, NVLINK4_RING_BYTES_PER_S),), "all_gather", "ring"))
    return tuple(curves)


_VTRAIN = (
    "all-reduce tables of vTrain (MICRO 2024, github.com/VIA-Research/vTrain, MIT), fitted on 1, 4, 8, 32, 128, 512, 1024 MB"
)
FAMILIES: dict[str, tuple[tuple[CollectiveCurve, ...], Basis, str]] = {
    "nvlink2": (_NVLINK2, "fitted", f"V100 {_VTRAIN}"),
    "nvlink3": (_NVLINK3, "fitted", f"A100 {_VTRAIN}"),
    "nvlink4": (_nvlink4(), "fitted", "H200 bus bandwidths of ml-engineering (S. Bekman), latencies of NCCL 2.27 tuning logs"),
    "xgmi": (
        tuple(CollectiveCurve(size, (Piece(0.0, *pair),), algorithm="ring") for size, pair in _XGMI.items()),
        "fitted",
        "MI300X bus bandwidths of ml-engineering (S. Bekman), latency from NCCL constants",
    ),
}
"""Interconnect generations by name: curves, their basis and their source; all as in `Fabric`."""


def _scaled(like: str, times: float, why: str) -> tuple[tuple[CollectiveCurve, ...], Basis, str]:
    """Returns the family of links so many times as fast as those of another: a message of S bytes takes what S / times took."""
    base = Fabric((0, 1), *FAMILIES[like]).slower(1 / times, size=times)
    return base.curves, "datasheet", f"{why}, else as {like}: {base.source}"


_NVLINK5_SOURCE = "838 instead of 473 GB/s for all-reduces of eight devices (github.com/NVIDIA/nccl/issues/1807)"
FAMILIES |= {
    "nvlink3-400": _scaled("nvlink3", 200 / 300, "links of 200 instead of 300 GB/s"),
    "nvlink4-400": _scaled("nvlink4", 200 / 450, "links of 200 instead of 450 GB/s"),
    "nvlink5": _scaled("nvlink4", 838 / 473, _NVLINK5_SOURCE),
    "xgmi4": _scaled("xgmi", 76.8 / 64, "links of 76.8 instead of 64 GB/s"),
    "gaudi3": _scaled("xgmi", 75 / 64, "links of 75 instead of 64 GB/s"),
}


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
    """Speeds and sizes of one kind of accelerator.

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
        fabric: Measured collectives of that fabric: a name of `FAMILIES`, or None.
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
    """Returns a host processor with `cores` cores, scaled from the constants of one core."""
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


class PresetSource(Record, frozen=True):
    """Origin of a preset's numbers, as ``presets.toml`` tells it.

    Attributes:
        datasheet: Where peaks, memory and rates of links are published.
        products: Sustained fractions of matrix products: measured (this card, by others), related (a card of the same chip or
            generation) or assumed; then how.
        links: Usable rates of links, in the same words.
    """

    datasheet: Text
    products: Annotated[str, Meta(pattern="^(measured|related|assumed): .")]
    links: Annotated[str, Meta(pattern="^(measured|related|assumed): .")]


def _built_in() -> tuple[Mapping[str, DeviceKind], Mapping[str, PresetSource]]:
    """Returns the kinds of ``presets.toml`` and a server's processor, and the origin of their numbers."""
    data = tomllib.loads(Path(__file__).with_name("presets.toml").read_text(encoding="utf-8"))
    told = ("datasheet", "products", "links")
    sources = {name: build(PresetSource, {key: fields.pop(key) for key in told}, name) for name, fields in data.items()}
    kinds = {name: build(DeviceKind, {"name": name, **fields}, name) for name, fields in data.items()}
    words = "32 cores at 2.5 GHz with two 256-bit FMA units, eight channels of DDR5"
    sources["cpu"] = PresetSource(words, "assumed: `rlplace calibrate` measures", "assumed: copies in memory")
    kinds["cpu"] = cpu_kind(32, 256_000_000_000)
    return MappingProxyType(kinds), MappingProxyType(sources)


KINDS: Mapping[str, DeviceKind]
"""All built-in kinds by name."""
SOURCES: Mapping[str, PresetSource]
"""Origin of their numbers, by name."""
KINDS, SOURCES = _built_in()

RESERVED = ("host",)
"""Names with another meaning in the text of a cluster."""


def device_kind(name: str) -> DeviceKind:
    """Returns a preset kind, built in or of an installed package (docs/plugins.md).

    Raises:
        InputError: Unknown name; the message suggests the nearest one.
    """
    kind = find_kind(name)
    if kind is None:
        raise unknown_name("device kind", name, kind_names())
    return kind


def find_kind(name: Any) -> DeviceKind | None:
    """Returns a preset kind like `device_kind`, None for an unknown name."""
    if name in KINDS:
        return KINDS[name]
    extension = extensions.find(extensions.DEVICES, name, {*KINDS, *RESERVED})
    return None if extension is None else _kind_of(extension)


def kind_names() -> list[str]:
    """Returns the built-in kinds and those of installed packages, which are not imported for that."""
    return [*KINDS, *extensions.names(extensions.DEVICES, {*KINDS, *RESERVED})]


@functools.cache
def _kind_of(extension: extensions.Extension) -> DeviceKind:
    """Returns the kind that an installed package offers: a `DeviceKind`, or a function of no arguments that returns one."""
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
