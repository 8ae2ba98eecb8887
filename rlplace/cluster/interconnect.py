"""Links between devices: who can talk to whom, how fast, and over which shared channels.

A channel carries one transfer at a time. Every device has a port for each direction and fabric, so that one transfer leaves
and one enters at a time; fabrics with a link of its own per pair (V100 cube mesh, MI300X) have a port for each peer. PCIe
transfers also hold the bus of the host's socket; transfers between hosts hold the network card of either host.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlplace.cluster.presets import DeviceKind
from rlplace.errors import InputError
from rlplace.problem import Links

# Usable bytes per second of PCIe x16, one direction: gen 5 measured 55 of 63 GB/s, 88 %; the others in proportion.
PCIE_BYTES_PER_S = {3: 12e9, 4: 26e9, 5: 55e9}
PCIE_LATENCY_S = 15e-6
STAGED_LATENCY_S = 25e-6  # through host memory: two copies and their synchronisation
NVLINK_LATENCY_S = 10e-6  # a stream-ordered copy with its launch
CPU_BYTES_PER_S = 10e9  # one memory copy between host processes
CPU_LATENCY_S = 5e-6
NETWORK_EFFICIENCY = {"ib": 0.88, "eth": 0.85}
NETWORK_LATENCY_S = {"ib": 25e-6, "eth": 50e-6}
DEVICES_PER_SOCKET = 4

# NVLink2 links between the eight V100 of one host (hybrid cube mesh); 0 means PCIe.
_CUBE = (
    (0, 1, 1, 2, 2, 0, 0, 0), (1, 0, 2, 1, 0, 2, 0, 0), (1, 2, 0, 2, 0, 0, 1, 0), (2, 1, 2, 0, 0, 0, 0, 1),
    (2, 0, 0, 0, 0, 1, 1, 2), (0, 2, 0, 0, 1, 0, 2, 1), (0, 0, 1, 0, 1, 2, 0, 2), (0, 0, 0, 1, 2, 1, 2, 0),
)  # fmt: skip
_NETWORK = re.compile(r"(ib|eth)=(\d+(?:\.\d+)?)g", re.IGNORECASE)


@dataclass(frozen=True)
class Network:
    """Network card of a host.

    Attributes:
        technology: ``"ib"`` or ``"eth"``.
        bits_per_s: Line rate.
    """

    technology: str
    bits_per_s: float

    @property
    def bytes_per_s(self) -> float:
        """Usable bytes per second in one direction."""
        return self.bits_per_s / 8 * NETWORK_EFFICIENCY[self.technology]


def parse_network(text: str) -> Network:
    """Parses ``ib=400g`` or ``eth=25g``."""
    match = _NETWORK.fullmatch(text)
    if match is None or not 0 < float(match[2]) <= 100_000:
        raise InputError(f"cluster: network {text[:40]!r} is not of the form eth=25g or ib=400g")
    return Network(match[1].lower(), float(match[2]) * 1e9)


@dataclass(frozen=True)
class Host:
    """What a host's devices are joined by.

    Attributes:
        fabric: ``"nvlink"`` (where the kind has it) or ``"pcie"``.
        network: Its network card.
    """

    fabric: str
    network: Network


class _Channels:
    """Hands out channel numbers by name, in order of first use."""

    def __init__(self) -> None:
        self._number: dict[tuple[object, ...], int] = {}

    def __call__(self, *name: object) -> int:
        return self._number.setdefault(name, len(self._number))


def build_links(kinds: Sequence[DeviceKind], host_of: Sequence[int], hosts: Sequence[Host]) -> Links:
    """Bandwidth, latency and channels of every ordered pair of devices.

    Args:
        kinds: D device kinds.
        host_of: D host numbers.
        hosts: What joins the devices of each host.
    """
    count = len(kinds)
    bandwidth, latency = np.zeros((count, count)), np.zeros((count, count))
    channel = _Channels()
    # Position among the accelerators of its host decides the links of a cube mesh and the socket.
    slot, filled = [], [0] * len(hosts)
    for kind, host in zip(kinds, host_of, strict=True):
        slot.append(filled[host])
        filled[host] += not kind.host_processor
    rows: list[tuple[tuple[int, ...], ...]] = []
    for i in range(count):
        row: list[tuple[int, ...]] = []
        for j in range(count):
            if i == j:
                row.append(())
            elif host_of[i] != host_of[j]:
                a, b = hosts[host_of[i]].network, hosts[host_of[j]].network
                technology = "ib" if a.technology == b.technology == "ib" else "eth"
                bandwidth[i, j] = min(a.bytes_per_s, b.bytes_per_s)
                latency[i, j] = NETWORK_LATENCY_S[technology]
                row.append((channel("out", i), channel("nic out", host_of[i]), channel("nic in", host_of[j]), channel("in", j)))
            else:
                host = host_of[i]
                size = filled[host]
                bandwidth[i, j], latency[i, j], fabric = _inside(kinds[i], kinds[j], slot[i], slot[j], size, hosts[host].fabric)
                if fabric == "switch":
                    row.append((channel("nvlink out", i), channel("nvlink in", j)))
                elif fabric == "mesh":
                    row.append((channel("nvlink out", i, j), channel("nvlink in", j, i)))
                else:
                    buses = sorted(
                        {(host, slot[d] // DEVICES_PER_SOCKET) for d in (i, j) if not kinds[d].host_processor} or {(host, 0)}
                    )
                    row.append((channel("out", i), *(channel("bus", *bus) for bus in buses), channel("in", j)))
        rows.append(tuple(row))
    return Links(bandwidth_bytes_per_s=bandwidth, latency_s=latency, channels=tuple(rows))


def _inside(a: DeviceKind, b: DeviceKind, slot_a: int, slot_b: int, size: int, fabric: str) -> tuple[float, float, str]:
    """Bandwidth, latency and kind of fabric between two devices of one host that has `size` accelerators."""
    if a.host_processor and b.host_processor:
        return CPU_BYTES_PER_S, CPU_LATENCY_S, "bus"
    if fabric == "nvlink" and a.nvlink is not None and a.nvlink == b.nvlink:
        rate = min(a.nvlink_bytes_per_s, b.nvlink_bytes_per_s)
        if a.nvlink == "switch":
            return rate, NVLINK_LATENCY_S, "switch"
        if a.nvlink == "mesh":
            return rate, NVLINK_LATENCY_S, "mesh"
        if size > len(_CUBE):  # sixteen V100 in one host sit on a switch with six links each
            return 6 * rate, NVLINK_LATENCY_S, "switch"
        if _CUBE[slot_a][slot_b]:
            return _CUBE[slot_a][slot_b] * rate, NVLINK_LATENCY_S, "mesh"
    rate = min(PCIE_BYTES_PER_S[d.pcie_generation] for d in (a, b) if not d.host_processor)
    if a.host_processor or b.host_processor or (a.pcie_peer and b.pcie_peer):
        return rate, PCIE_LATENCY_S, "bus"
    return rate / 2, STAGED_LATENCY_S, "bus"
