"""Interconnects of preset clusters: the topology of every host and of the network, and their fabrics.

Inside a host: NVLink ports through a non-blocking switch, a direct link per peer (V100 cube mesh, MI300X xGMI), or PCIe: a port
per device and direction, the uplink of a switch that several devices share, the bus between sockets, and host memory where
copies are staged through it. Between hosts: one or several network cards, and the uplinks of the groups of hosts that a
transfer leaves and enters (`rlplace.cluster.tiers`). `rlplace.cluster.topology` lowers it to channels.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from rlplace.cluster.fabric import Fabric
from rlplace.cluster.presets import FAMILIES, DeviceKind
from rlplace.cluster.tiers import Tiers, common_depth, tiers_of
from rlplace.cluster.topology import Resource, Topology, TransferPath
from rlplace.errors import InputError

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
# Between two sockets, by the PCIe generation of the host: NCCL's figures for Skylake and Sapphire Rapids (src/graph/topo.h),
# and copies between sockets measured at 39 to 51 GB/s on gen 5 hosts.
SOCKET_BYTES_PER_S = {3: 10e9, 4: 22e9, 5: 45e9}
# One socket's memory for copies, both directions together (our assumption: a quarter to a half of its channels).
HOST_MEMORY_BYTES_PER_S = 60e9

# NVLink2 links between the eight V100 of one host (hybrid cube mesh); 0 means PCIe.
_CUBE = (
    (0, 1, 1, 2, 2, 0, 0, 0), (1, 0, 2, 1, 0, 2, 0, 0), (1, 2, 0, 2, 0, 0, 1, 0), (2, 1, 2, 0, 0, 0, 0, 1),
    (2, 0, 0, 0, 0, 1, 1, 2), (0, 2, 0, 0, 1, 0, 2, 1), (0, 0, 1, 0, 1, 2, 0, 2), (0, 0, 0, 1, 2, 1, 2, 0),
)  # fmt: skip
_NETWORK = re.compile(r"(ib|eth)=(?:(\d{1,3})x)?(\d+(?:\.\d+)?)g", re.IGNORECASE)


@dataclass(frozen=True)
class Network:
    """Network cards of a host.

    Attributes:
        technology: ``"ib"`` or ``"eth"``.
        bits_per_s: Line rate of one card.
        cards: Number of cards; the devices of the host are assigned to them in order.
    """

    technology: str
    bits_per_s: float
    cards: int = 1

    def __str__(self) -> str:
        cards = f"{self.cards}x" if self.cards > 1 else ""
        return f"{self.technology}={cards}{self.bits_per_s / 1e9:g}g"

    @property
    def bytes_per_s(self) -> float:
        """Usable bytes per second of one card in one direction."""
        return self.bits_per_s / 8 * NETWORK_EFFICIENCY[self.technology]


def parse_network(text: str) -> Network:
    """Parses ``ib=400g``, ``eth=25g`` or, with several cards in a host, ``ib=8x400g``."""
    match = _NETWORK.fullmatch(text)
    if match is None or not 0 < float(match[3]) <= 100_000 or match[2] == "0":
        raise InputError(f"cluster: network {text[:40]!r} is not of the form eth=25g, ib=400g or ib=8x400g")
    return Network(match[1].lower(), float(match[3]) * 1e9, int(match[2] or 1))


@dataclass(frozen=True)
class Host:
    """Connections of the devices of a host.

    Attributes:
        fabric: ``"nvlink"`` (where the kind has it) or ``"pcie"``.
        network: Its network cards.
        memory_bytes: Of the host itself; 0: not known.
    """

    fabric: str
    network: Network
    memory_bytes: int = 0


def build_topology(
    kinds: Sequence[DeviceKind], host_of: Sequence[int], hosts: Sequence[Host], tiers: Tiers | None = None
) -> Topology:
    """Returns the resources of these hosts and a path for every ordered pair of devices.

    Args:
        kinds: D device kinds.
        host_of: D host numbers.
        hosts: Interconnect of each host.
        tiers: Of these hosts; None: all meet in one network.
    """
    builder = PathBuilder(kinds, host_of, hosts, tiers)
    count = len(kinds)
    paths = {(i, j): builder.path(i, j) for i in range(count) for j in range(count) if i != j}
    return Topology(count, tuple(builder.resources), paths)


def build_fabrics(kinds: Sequence[DeviceKind], host_of: Sequence[int], hosts: Sequence[Host]) -> tuple[Fabric, ...]:
    """Returns one fabric a host and interconnect generation, where measurements of its collectives were published."""
    members: dict[tuple[int, str], list[int]] = {}
    for device, (kind, host) in enumerate(zip(kinds, host_of, strict=True)):
        if kind.fabric is not None and kind.nvlink is not None and hosts[host].fabric == "nvlink":
            members.setdefault((host, kind.fabric), []).append(device)
    fabrics = []
    slots = _slots(kinds, host_of, len(hosts))[0]
    for (_, name), devices in members.items():
        cube = kinds[devices[0]].nvlink == "cube"
        if len(devices) < 2 or (cube and max(slots[d] for d in devices) >= len(_CUBE)):
            continue  # sixteen V100 on a switch: no table was published
        rate = kinds[devices[0]].nvlink_bytes_per_s
        pairs = [(i, j, _CUBE[slots[i]][slots[j]] * rate) for i in devices for j in devices if i < j] if cube else []
        fabrics.append(Fabric(tuple(devices), *FAMILIES[name], tuple(pair for pair in pairs if pair[2] > 0)))
    return tuple(fabrics)


def _slots(kinds: Sequence[DeviceKind], host_of: Sequence[int], num_hosts: int) -> tuple[list[int], list[int]]:
    """Returns position of each device among the accelerators of its host, and how many accelerators each host has.

    The position decides the links of a cube mesh, the socket, the PCIe switch and the network card.
    """
    slots, filled = [], [0] * num_hosts
    for kind, host in zip(kinds, host_of, strict=True):
        slots.append(filled[host])
        filled[host] += not kind.host_processor
    return slots, filled


def positions(host_of: Sequence[int]) -> list[int]:
    """Returns the position of each device among those of its host, processors included."""
    found, filled = [], dict.fromkeys(host_of, 0)
    for host in host_of:
        found.append(filled[host])
        filled[host] += 1
    return found


class PathBuilder:
    """Paths between devices, and the resources that they need, each made on first use."""

    def __init__(
        self, kinds: Sequence[DeviceKind], host_of: Sequence[int], hosts: Sequence[Host], tiers: Tiers | None = None
    ) -> None:
        self.kinds, self.host_of, self.hosts = kinds, host_of, hosts
        self.tiers = tiers_of((), len(hosts)) if tiers is None else tiers
        self.slots, self.filled = _slots(kinds, host_of, len(hosts))
        self.local = positions(host_of)
        self.generation = [0] * len(hosts)  # of a host's own PCIe: that of its newest accelerator
        for kind, host in zip(kinds, host_of, strict=True):
            own = 0 if kind.host_processor else kind.pcie_generation
            self.generation[host] = max(self.generation[host], own)
        self.resources: list[Resource] = []
        self.numbers: dict[tuple[int, str], int] = {}
        self.halves: dict[tuple[str, int], tuple[int, ...]] = {}
        self.between: dict[tuple[int, int], tuple[int, ...]] = {}

    def resource(self, owner: int, name: str, bytes_per_s: float, latency_s: float = 0.0) -> int:
        """Returns the number of a resource of a host, or of group g of a tier, number H + g; alike ones have the same names."""
        if (owner, name) not in self.numbers:
            self.numbers[owner, name] = len(self.resources)
            self.resources.append(Resource(f"{name} of host {owner}", bytes_per_s, latency_s))
        return self.numbers[owner, name]

    def path(self, i: int, j: int) -> TransferPath:
        if self.host_of[i] != self.host_of[j]:
            return self.network(i, j)
        a, b = self.kinds[i], self.kinds[j]
        if a.host_processor and b.host_processor:
            ends = (("out", i), ("in", j))
            over = [self.resource(self.host_of[d], f"copy {way} {self.local[d]}", CPU_BYTES_PER_S) for way, d in ends]
            return TransferPath(tuple(over), CPU_LATENCY_S)
        return self.nvlink(i, j) or self.pcie(i, j)

    def nvlink(self, i: int, j: int) -> TransferPath | None:
        """Returns a path over the switch, or over the direct link of the pair if it has one."""
        a, b, host = self.kinds[i], self.kinds[j], self.host_of[i]
        if self.hosts[host].fabric != "nvlink" or a.nvlink is None or a.nvlink != b.nvlink:
            return None
        rate, fabric = min(a.nvlink_bytes_per_s, b.nvlink_bytes_per_s), a.nvlink
        if fabric == "cube" and self.filled[host] > len(_CUBE):
            rate, fabric = 6 * rate, "switch"  # sixteen V100 in one host sit on a switch with six links each
        if fabric == "switch":
            ends = [self.resource(host, f"nvlink {way} {self.local[d]}", rate) for way, d in (("out", i), ("in", j))]
            return TransferPath((ends[0], self.resource(host, "nvswitch", math.inf), ends[1]), NVLINK_LATENCY_S)
        width = _CUBE[self.slots[i]][self.slots[j]] if fabric == "cube" else 1
        if width == 0:
            return None
        pair = f"{self.local[i]}-{self.local[j]}"
        over = tuple(self.resource(host, f"link {way} {pair}", width * rate) for way in ("out", "in"))
        return TransferPath(over, NVLINK_LATENCY_S)

    def pcie(self, i: int, j: int) -> TransferPath:
        """Returns a path over the PCIe tree: own port, switch uplinks and socket bus where they part ways, the other's port."""
        a, b, host = self.kinds[i], self.kinds[j], self.host_of[i]
        switches = [self.switch(d) for d in (i, j)]
        sockets = [self.slots[d] // DEVICES_PER_SOCKET for d in (i, j) if not self.kinds[d].host_processor]
        over = [self.port("out", i)]
        if switches[0] != switches[1]:
            over += self.uplink("out", i)
        staged = not (a.host_processor or b.host_processor or (a.pcie_peer and b.pcie_peer))
        if staged:
            over += [self.resource(host, f"memory {socket}", HOST_MEMORY_BYTES_PER_S) for socket in sockets]
        if sockets[0] != sockets[-1]:  # a host processor is on all sockets
            bus = self.resource(host, f"sockets {sockets[0]}-{sockets[1]}", SOCKET_BYTES_PER_S[self.generation[host]])
            over.insert(len(over) - staged, bus)
        if switches[0] != switches[1]:
            over += self.uplink("in", j)
        over.append(self.port("in", j))
        return TransferPath(tuple(over), STAGED_LATENCY_S, 0.5) if staged else TransferPath(tuple(over), PCIE_LATENCY_S)

    def network(self, i: int, j: int) -> TransferPath:
        """Returns a path over cards and tiers; over uplinks of PCIe switches where a host has fewer cards than these."""
        ends = self.host_of[i], self.host_of[j]
        a, b = (self.hosts[host].network for host in ends)
        latency = NETWORK_LATENCY_S["ib" if a.technology == b.technology == "ib" else "eth"]
        if ends not in self.between:
            own, other = (self.tiers.chain[host] for host in ends)
            depth = int(common_depth(own, other))
            out = [self.border("out", group) for group in own[depth:][::-1].tolist() if group >= 0]
            self.between[ends] = *out, *(self.border("in", group) for group in other[depth:].tolist() if group >= 0)
        return TransferPath(self.to_network("out", i) + self.between[ends] + self.to_network("in", j), latency)

    def border(self, way: str, group: int) -> int:
        """Returns the uplink of a group of hosts, in one direction."""
        tier = self.tiers.table[self.tiers.of[group]]
        return self.resource(len(self.hosts) + group, f"tier {way}", tier.bytes_per_s, tier.latency_s / 2)

    def to_network(self, way: str, device: int) -> tuple[int, ...]:
        if (way, device) not in self.halves:
            half = (self.port(way, device), *self.to_card(way, device), self.card(way, device))
            self.halves[way, device] = half if way == "out" else half[::-1]
        return self.halves[way, device]

    def port(self, way: str, device: int) -> int:
        kind, host, local = self.kinds[device], self.host_of[device], self.local[device]
        if kind.host_processor:
            return self.resource(host, f"processor {way} {local}", HOST_MEMORY_BYTES_PER_S)
        return self.resource(host, f"pcie {way} {local}", PCIE_BYTES_PER_S[kind.pcie_generation])

    def card(self, way: str, device: int) -> int:
        host = self.host_of[device]
        network = self.hosts[host].network
        number = min(self.slots[device] * network.cards // max(1, self.filled[host]), network.cards - 1)
        return self.resource(host, f"nic {way} {number}", network.bytes_per_s)

    def to_card(self, way: str, device: int) -> list[int]:
        host, share = self.host_of[device], self.kinds[device].pcie_per_switch
        switches = -(-self.filled[host] // share)
        return self.uplink(way, device) if self.hosts[host].network.cards < switches else []

    def uplink(self, way: str, device: int) -> list[int]:
        """Returns the shared uplink of a device's PCIe switch; none where every device has a root port of its own."""
        kind = self.kinds[device]
        if kind.host_processor or kind.pcie_per_switch == 1:
            return []
        host = self.host_of[device]
        return [self.resource(host, f"uplink {way} {self.switch(device)}", PCIE_BYTES_PER_S[self.generation[host]])]

    def switch(self, device: int) -> int:
        kind = self.kinds[device]
        return -1 if kind.host_processor else self.slots[device] // kind.pcie_per_switch
