"""The `Cluster` record: devices, what they can do, and how they are joined."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from rlplace.cluster.presets import DeviceKind
from rlplace.errors import InputError
from rlplace.files import fingerprint
from rlplace.problem import Device, Links
from rlplace.problem.check import MAX_BYTES
from rlplace.problem.fabric import check_fabrics
from rlplace.records import check

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
    for kind in {id(kind): kind for kind in cluster.kinds}.values():
        check(DeviceKind, kind, f"cluster: kind {kind.name[:80]!r}")
    if any(not 0 <= host < MAX_DEVICES for host in cluster.hosts):
        raise InputError(f"cluster: host numbers must be in 0..{MAX_DEVICES - 1}")
    try:
        check_fabrics(cluster.links.fabrics, count)
    except InputError as error:
        raise InputError(f"cluster: {error}") from None
