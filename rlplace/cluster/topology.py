"""Topologies: physical resources, the path of every pair of devices over them, and their lowering to channels.

A resource (a port, a link, a bus, a network card, host memory) has a capacity. The simulator knows only channels, each of
which carries one transfer at a time, so capacity sharing is lowered to exclusive use:

* A transfer holds every resource on its path for its whole duration, at the rate of the slowest one.
* A resource that one transfer can fill is one channel.
* A resource of k times the capacity that any single transfer can use becomes k lanes, each a channel of its own; a pair's lane
  follows from its sender or its receiver, whichever are fewer on that resource. Lanes are rounded down (one more when that
  slows a lone transfer by at most a tenth), so that lanes together never move more than the resource can.
* A resource without a capacity (a non-blocking switch) adds its latency and is no channel.
* A lane in the middle of a path is dropped where an exclusive resource of the same path already keeps its users apart.

Sharing by max-min fairness would give two transfers half the rate each at the same time; one after the other, both end no
later than the last would, and the mean is earlier. That is the price of channels (docs/cost-model/links.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rlplace.errors import InputError
from rlplace.problem import Links

_LANE_SLACK = 0.1  # a lane may be this much slower than a lone transfer could be
MAX_LANES = 64


@dataclass(frozen=True)
class Resource:
    """One physical resource, in one direction where it is duplex.

    Attributes:
        name: For people, unique.
        bytes_per_s: Capacity; inf for what never limits, such as a non-blocking switch.
        latency_s: What crossing it adds.
    """

    name: str
    bytes_per_s: float = math.inf
    latency_s: float = 0.0


@dataclass(frozen=True)
class Path:
    """How a transfer gets from one device to another.

    Attributes:
        over: Numbers of the resources that it holds, in order; one that it crosses twice is named twice.
        latency_s: Fixed cost beside the resources' latencies: launch, handshake.
        efficiency: Fraction of its slowest link that it reaches; 0.5 where data is stored in between and sent on.
    """

    over: tuple[int, ...]
    latency_s: float = 0.0
    efficiency: float = 1.0


@dataclass(frozen=True)
class Topology:
    """Resources and paths.

    Attributes:
        num_devices: D.
        resources: R resources.
        paths: Path by (sender, receiver); a pair without one has no link.
    """

    num_devices: int
    resources: tuple[Resource, ...]
    paths: Mapping[tuple[int, int], Path]


def check_topology(topology: Topology) -> None:
    """Checks every number.

    Raises:
        InputError: Names the first resource or path that is wrong.
    """
    names: set[str] = set()
    for resource in topology.resources:
        where = f"topology: resource {resource.name[:80]!r}"
        if not resource.name or resource.name in names:
            raise InputError(f"{where}: names must be unique and not empty")
        names.add(resource.name)
        if not 1e-3 <= resource.bytes_per_s <= 1e18 and resource.bytes_per_s != math.inf:
            raise InputError(f"{where}: bytes_per_s {resource.bytes_per_s} is not a positive rate")
        if not 0 <= resource.latency_s <= 1e9:
            raise InputError(f"{where}: latency_s {resource.latency_s} is not a time")
    for (i, j), path in topology.paths.items():
        where = f"topology: path from {i} to {j}"
        if i == j or not (0 <= i < topology.num_devices and 0 <= j < topology.num_devices):
            raise InputError(f"{where}: does not join two devices of {topology.num_devices}")
        if any(not 0 <= r < len(topology.resources) for r in path.over):
            raise InputError(f"{where}: names a resource that does not exist")
        if all(topology.resources[r].bytes_per_s == math.inf for r in path.over):
            raise InputError(f"{where}: crosses nothing with a capacity; give one of its resources bytes_per_s")
        if not 0 <= path.latency_s <= 1e9 or not 0 < path.efficiency <= 1:
            raise InputError(f"{where}: latency_s must be a time and efficiency in 0..1")


def lower(topology: Topology) -> Links:
    """Bandwidth, latency and channels of every ordered pair; see the module docstring.

    Returns:
        Links of D devices, without fabrics.
    """
    count = topology.num_devices
    bandwidth, latency = np.zeros((count, count)), np.zeros((count, count))
    capacity = [resource.bytes_per_s for resource in topology.resources]
    delay = [resource.latency_s for resource in topology.resources]
    users: dict[int, list[tuple[int, int]]] = {}
    demand = [0.0] * len(capacity)
    for (i, j), path in topology.paths.items():
        rate = _lone_rate(path, capacity)
        bandwidth[i, j] = rate
        latency[i, j] = path.latency_s + sum(delay[r] for r in path.over)
        for r in set(path.over):
            if capacity[r] != math.inf:
                users.setdefault(r, []).append((i, j))
                demand[r] = max(demand[r], rate * path.over.count(r))
    lanes = {r: _lanes(pairs, capacity[r], demand[r]) for r, pairs in users.items()}
    idle = _redundant(topology, lanes, users)
    numbers: dict[tuple[int, int], int] = {}
    rows: list[list[tuple[int, ...]]] = [[()] * count for _ in range(count)]
    for i, j in sorted(topology.paths):
        path = topology.paths[i, j]
        held = []
        for r in dict.fromkeys(path.over):
            if r not in lanes:
                continue
            width, side, order = lanes[r]
            if width > 1:
                bandwidth[i, j] = min(bandwidth[i, j], capacity[r] / width / path.over.count(r))
            if r in idle and r not in (path.over[0], path.over[-1]):
                continue
            lane = order[(i, j)[side]] % width
            held.append(numbers.setdefault((r, lane), len(numbers)))
        rows[i][j] = tuple(held)
    return Links(bandwidth, latency, tuple(tuple(row) for row in rows))


_Lanes = tuple[int, int, dict[int, int]]  # how many, keyed by sender (0) or receiver (1), position of each such device


def _lone_rate(path: Path, capacity: Sequence[float]) -> float:
    """Bytes per second of a transfer that has its path to itself."""
    rate = path.efficiency * min(capacity[r] for r in path.over)
    if len(set(path.over)) < len(path.over):
        rate = min(rate, *(capacity[r] / path.over.count(r) for r in path.over))
    return rate


def _lanes(pairs: Sequence[tuple[int, int]], capacity: float, demand: float) -> _Lanes:
    width = min(MAX_LANES, max(1, math.floor(capacity / demand + _LANE_SLACK)))
    senders, receivers = sorted({i for i, _ in pairs}), sorted({j for _, j in pairs})
    side = 0 if len(senders) <= len(receivers) else 1
    return width, side, {device: position for position, device in enumerate((senders, receivers)[side])}


def _redundant(topology: Topology, lanes: Mapping[int, _Lanes], users: Mapping[int, Sequence[tuple[int, int]]]) -> set[int]:
    """Resources of which no two transfers that could run together share a lane."""
    found: set[int] = set()
    for r, (width, side, order) in lanes.items():
        if width < len(order):
            continue
        common: dict[int, set[int]] = {}  # by device: exclusive resources on all its paths over r
        for pair in users[r]:
            others = {o for o in topology.paths[pair].over if o != r and o not in found and o in lanes and lanes[o][0] == 1}
            device = pair[side]
            common[device] = common[device] & others if device in common else others
        if all(common.values()):
            found.add(r)
    return found
