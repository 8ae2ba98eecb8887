"""The `Cluster` record: devices, what they can do, and how they are joined."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from rlplace.cluster.fabrics import FAMILIES
from rlplace.cluster.presets import DTYPES, DeviceKind
from rlplace.errors import InputError, unknown_name
from rlplace.files import fingerprint
from rlplace.problem import Device, Links
from rlplace.problem.check import MAX_BYTES
from rlplace.problem.fabric import check_fabrics

MAX_DEVICES = 1024
"""Devices that one cluster may have; the link matrices grow with the square."""


@dataclass(frozen=True, eq=False)
class Cluster:
    """A set of devices with their links.

    Attributes:
        name: For people: the preset text or what the file says; not part of the fingerprint.
        devices: D devices.
        kinds: D kinds, what each device can do; their names are the devices' `kind`.
        links: Communication between the devices.
        hosts: D host numbers; devices of one host share its sockets' buses and its network card.
        text: What `parse` understands as this cluster (preset text or file path), or None.
    """

    name: str
    devices: tuple[Device, ...]
    kinds: tuple[DeviceKind, ...]
    links: Links
    hosts: tuple[int, ...]
    text: str | None = None

    def __post_init__(self) -> None:
        for matrix in (self.links.bandwidth_bytes_per_s, self.links.latency_s):
            matrix.setflags(write=False)
        check_cluster(self)

    @staticmethod
    def preset(text: str) -> Cluster:
        """Builds a cluster from preset text such as ``"a100-80g:4"`` or ``"h100:2x8,ib=400g"``; see `rlplace.cluster.parse`."""
        from rlplace.cluster.parse import preset

        return preset(text)

    @staticmethod
    def load(path: str | Path) -> Cluster:
        """Reads and checks a cluster file (TOML); see docs/formats.md."""
        from rlplace.cluster.toml import load_cluster

        return load_cluster(path)

    @staticmethod
    def detect() -> Cluster:
        """The devices of this machine: its accelerators, else its processor; see `rlplace.cluster.detect`."""
        from rlplace.cluster.detect import detect

        return detect()

    def save(self, path: str | Path) -> None:
        """Writes the cluster as TOML, atomically, with every link written out."""
        from rlplace.cluster.toml import save_cluster

        save_cluster(self, path)

    def to_problem_devices(self) -> tuple[tuple[Device, ...], Links]:
        """Devices and links as a `Problem` takes them."""
        return self.devices, self.links

    @property
    def num_devices(self) -> int:
        return len(self.devices)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the canonical JSON of all that matters for pricing; not of `name` and `text`."""
        from rlplace.cluster.toml import cluster_to_dict

        return fingerprint(cluster_to_dict(self))


def check_cluster(cluster: Cluster) -> None:
    """Checks every number of a cluster.

    Raises:
        InputError: Names the first device, kind or link that is wrong.
    """
    count = len(cluster.devices)
    if not 1 <= count <= MAX_DEVICES:
        raise InputError(f"cluster: {count} devices; a cluster has 1 to {MAX_DEVICES}")
    if len(cluster.kinds) != count or len(cluster.hosts) != count:
        raise InputError("cluster: kinds and hosts must be given for every device")
    seen: set[str] = set()
    for device, kind in zip(cluster.devices, cluster.kinds, strict=True):
        where = f"cluster: device {device.name[:80]!r}"
        if not device.name or device.name in seen:
            raise InputError(f"{where}: names must be unique and not empty")
        seen.add(device.name)
        if device.kind != kind.name:
            raise InputError(f"{where}: kind {device.kind!r} does not match {kind.name!r}")
        if device.memory_bytes is None or not 0 < device.memory_bytes <= MAX_BYTES:
            raise InputError(f"{where}: memory_bytes must be positive, found {device.memory_bytes}; a device needs memory")
        if not 0 <= device.reserved_bytes < device.memory_bytes:
            raise InputError(f"{where}: reserved_bytes {device.reserved_bytes} is outside 0..{device.memory_bytes}")
        check_kind(kind)
    if any(not 0 <= host < MAX_DEVICES for host in cluster.hosts):
        raise InputError(f"cluster: host numbers must be in 0..{MAX_DEVICES - 1}")
    try:
        check_fabrics(cluster.links.fabrics, count)
    except InputError as error:
        raise InputError(f"cluster: {error}") from None


def check_kind(kind: DeviceKind) -> None:
    """Checks every number of a device kind."""
    where = f"cluster: kind {kind.name[:80]!r}"
    if not kind.name:
        raise InputError("cluster: a kind needs a name")
    if "float32" not in kind.peak_flops:
        raise InputError(f"{where}: peak_flops needs at least float32")
    for dtype, value in kind.peak_flops.items():
        _check_range(value, 1e3, 1e19, f"{where}: peak_flops.{dtype}", dtype)
    if "float32" not in kind.gemm_efficiency:
        raise InputError(f"{where}: gemm_efficiency needs at least float32")
    for dtype, value in kind.gemm_efficiency.items():
        _check_range(value, 1e-6, 1.0, f"{where}: gemm_efficiency.{dtype}", dtype)
    _check_range(kind.memory_bandwidth_bytes_per_s, 1e3, 1e17, f"{where}: memory_bandwidth_bytes_per_s")
    if not 0 < kind.memory_bytes <= MAX_BYTES:
        raise InputError(f"{where}: memory_bytes must be positive, found {kind.memory_bytes}")
    for name in ("reserved_bytes", "communication_bytes"):
        if not 0 <= getattr(kind, name) <= MAX_BYTES:
            raise InputError(f"{where}: {name} {getattr(kind, name)} is outside 0..{MAX_BYTES}")
    for name in ("launch_s", "gemm_half_s", "bandwidth_half_s"):
        _check_range(getattr(kind, name), 0.0, 1.0, f"{where}: {name}")
    if not 1 <= kind.processors <= 1_000_000:
        raise InputError(f"{where}: processors {kind.processors} is outside 1..1000000")
    if kind.nvlink is not None:
        _check_range(kind.nvlink_bytes_per_s, 1e3, 1e17, f"{where}: nvlink_bytes_per_s")
    if kind.fabric is not None and kind.fabric not in FAMILIES:
        raise InputError(f"{where}: {unknown_name('fabric', kind.fabric, FAMILIES)}")
    _check_range(kind.pcie_per_switch, 1, 64, f"{where}: pcie_per_switch")


def _check_range(value: float, low: float, high: float, where: str, dtype: str | None = None) -> None:
    if dtype is not None and dtype not in DTYPES:
        raise InputError(f"{where}: unknown dtype; known: {', '.join(DTYPES)}")
    if not low <= value <= high:
        raise InputError(f"{where}: {value} is outside {low:g}..{high:g}")
