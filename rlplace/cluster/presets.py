"""Device kinds: speeds and sizes of an accelerator, built in (``presets.toml``) or of an installed package."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

from msgspec import Meta, field

from rlplace import plugins as extensions
from rlplace.cluster.fabrics import FAMILIES
from rlplace.errors import InputError, show, unknown_name
from rlplace.limits import MAX_BYTES
from rlplace.records import Record, Text, build, check

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


def _built_in() -> dict[str, DeviceKind]:
    """Returns the kinds of ``presets.toml``, where their sources stand, and a server's processor."""
    data = tomllib.loads(Path(__file__).with_name("presets.toml").read_text(encoding="utf-8"))
    kinds = {name: build(DeviceKind, {"name": name, **fields}, name) for name, fields in data.items()}
    return {**kinds, "cpu": cpu_kind(32, 256_000_000_000)}


KINDS: Mapping[str, DeviceKind] = MappingProxyType(_built_in())
"""All built-in kinds by name."""

RESERVED = ("host",)
"""Names that stand for something else in the text of a cluster."""


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
    """Like `device_kind`, but None for unknown names."""
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
