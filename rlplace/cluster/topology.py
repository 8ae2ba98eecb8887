"""Topologies: physical resources, the path of every pair of devices over them, and their lowering to channels.

A resource (a port, a link, a bus, a network card, host memory) has a capacity. The simulator knows only channels, each of
which carries one transfer at a time, so capacity sharing is lowered to exclusive use:

* A transfer holds every resource on its path for its whole duration, at the rate of the slowest one.
* A resource that one transfer can fill is one channel.
* A resource of k times the capacity that any single transfer can use becomes k lanes, each a channel of its own; a pair's lane
  follows from its sender or its receiver, whichever are more on that resource. Lanes are rounded down (one more when that
  slows a lone transfer by at most a tenth), so that lanes together never move more than the resource can.
* A resource without a capacity (a non-blocking switch) adds its latency and is no channel.
* A lane in the middle of a path is dropped where another channel of the same paths already keeps its users apart.

Sharing by max-min fairness would give two transfers half the rate each at the same time; one after the other, both end no
later than the last would, and the mean is earlier. That is the price of channels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, NamedTuple

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from rlplace.cluster.fabric import Fabric
from rlplace.cluster.links import Links
from rlplace.records import Record, Text

_LANE_SLACK = 0.1  # a lane may be this much slower than a lone transfer could be
MAX_LANES = 1 << 17
"""Lanes of a resource: as many as a cluster has devices, since an uplink of many hosts may carry all of them at once."""


class Resource(Record, frozen=True):
    """One physical resource, in one direction where it is duplex.

    Attributes:
        name: Unique.
        bytes_per_s: Capacity; inf never limits (a non-blocking switch).
        latency_s: Added to every transfer that crosses it.
    """

    name: Text
    bytes_per_s: Annotated[float, Meta(ge=1e-3, le=1e18)] = math.inf
    latency_s: Annotated[float, Meta(ge=0, le=1e9)] = 0.0


class TransferPath(NamedTuple):
    """The resources that a transfer from one device to another uses.

    Attributes:
        over: Numbers of the resources that it holds, in order; one that it crosses twice is listed twice.
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
    paths: Mapping[tuple[int, int], TransferPath]


class DividedTopology(NamedTuple):
    """P ordered pairs of devices with a path over at most K of R resources, and how these are shared.

    Attributes:
        pairs: int [P, 2], in order.
        over: int [P, K], resources in order; -1 past the end.
        rate: float64 [P], bytes per second.
        late: float64 [P], seconds before the first byte.
        width: int [R + 1], lanes of each resource; resource R is past the end.
        by_receiver: bool [R + 1], whether the receiver of a transfer chooses its lane, or its sender.
        position: int [P, K], the number of the choosing device among those that use the resource.
        kept: bool [P, K], whether the lane becomes a channel.
    """

    pairs: NDArray[np.int64]
    over: NDArray[np.int64]
    rate: NDArray[np.float64]
    late: NDArray[np.float64]
    width: NDArray[np.int64]
    by_receiver: NDArray[np.bool_]
    position: NDArray[np.int64]
    kept: NDArray[np.bool_]


def divided_topology(topology: Topology, further: NDArray[np.int64] | None = None) -> DividedTopology:
    """Divides the resources of a topology with at least one path among lanes; see the module docstring.

    Args:
        topology: Resources and paths.
        further: int [2, R + 1], senders and receivers that use each resource beside the devices of the topology, which stand
            for them; None: there are no more.
    """
    pairs, paths, over, crossings = _incidence(topology)
    # resource -1 is past the end of a shorter path: it neither limits nor delays
    capacity = np.array([*(resource.bytes_per_s for resource in topology.resources), math.inf])
    delay = np.array([*(resource.latency_s for resource in topology.resources), 0.0])
    rate = np.array([path.efficiency for path in paths]) * capacity[over].min(axis=1)
    rate = np.minimum(rate, (capacity[over] / crossings).min(axis=1))
    late = np.array([path.latency_s for path in paths]) + delay[over].sum(axis=1)
    users = np.zeros((2, len(capacity)), dtype=np.int64) if further is None else further
    width, by_receiver, position, choosers = _lanes(pairs, over, capacity, rate[:, None] * crossings, users)
    rate = np.minimum(rate, (capacity / width)[over].min(axis=1, where=width[over] > 1, initial=math.inf))
    slowest = (capacity[over] / crossings).argmin(axis=1)
    kept = _kept(over, np.isfinite(capacity), slowest, width, position, choosers)
    return DividedTopology(pairs, over, rate, late, width, by_receiver, position, kept)


def lower(topology: Topology) -> Links:
    """Computes bandwidth, latency and channels of every ordered pair; see the module docstring.

    Returns:
        Links of D devices, without fabrics.
    """
    count = topology.num_devices
    if not topology.paths:
        return Links(np.zeros((count, count)), np.zeros((count, count)), (((),) * count,) * count)
    found = divided_topology(topology)
    key = found.over * MAX_LANES + found.position % found.width[found.over]
    return written_links(count, found.pairs, found.rate, found.late, np.where(found.kept, key, -1))


def written_links(
    count: int,
    pairs: NDArray[np.int64],
    rate: NDArray[np.float64],
    late: NDArray[np.float64],
    key: NDArray[np.int64],
    fabrics: tuple[Fabric, ...] = (),
) -> Links:
    """Writes links of pairs out as matrices of devices by devices.

    Args:
        count: D devices.
        pairs: int [P, 2], in order.
        rate: float64 [P], bytes per second.
        late: float64 [P], seconds.
        key: int [P, K], what each pair holds, by any numbers; -1: nothing. Channels are numbered in order of first use.
        fabrics: Of the devices.
    """
    bandwidth, latency = np.zeros((count, count)), np.zeros((count, count))
    rows: list[list[tuple[int, ...]]] = [[()] * count for _ in range(count)]
    bandwidth[pairs[:, 0], pairs[:, 1]] = rate
    latency[pairs[:, 0], pairs[:, 1]] = late
    number = _number(key)
    held = (number >= 0) & ~repeated(key)
    for length in np.unique(held.sum(axis=1)).tolist():
        alike = np.flatnonzero(held.sum(axis=1) == length)
        channels = number[alike][held[alike]].reshape(len(alike), length)
        for (i, j), row in zip(pairs[alike].tolist(), map(tuple, channels.tolist()), strict=True):
            rows[i][j] = row
    return Links(bandwidth, latency, tuple(tuple(row) for row in rows), fabrics)


def repeated(key: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Marks the numbers of each row that stand further left in it, bool [P, K]."""
    return np.array([(key[:, :column] == key[:, [column]]).any(axis=1) for column in range(key.shape[1])]).T


def _incidence(topology: Topology) -> tuple[NDArray[np.int64], list[TransferPath], NDArray[np.int64], NDArray[np.int64]]:
    """Returns pairs int [P, 2] in order; paths; their resources int [P, K], -1 past the end; crossings of each [P, K]."""
    pairs = np.fromiter(chain.from_iterable(topology.paths), np.int64).reshape(-1, 2)
    order = np.lexsort((pairs[:, 1], pairs[:, 0]))
    paths = list(topology.paths.values())
    paths = [paths[index] for index in order.tolist()]
    lengths = np.fromiter((len(path.over) for path in paths), np.int64, len(paths))
    over = np.full((len(paths), lengths.max()), -1)
    over[np.arange(over.shape[1]) < lengths[:, None]] = np.fromiter(chain.from_iterable(path.over for path in paths), np.int64)
    crossings = np.zeros_like(over)
    for column in range(over.shape[1]):
        crossings += over == over[:, [column]]
    return pairs[order], paths, over, crossings


def _lanes(
    pairs: NDArray[np.int64],
    over: NDArray[np.int64],
    capacity: NDArray[np.float64],
    demand: NDArray[np.float64],
    further: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.int64], NDArray[np.int64]]:
    """Returns how each resource is divided among lanes, which the sender or the receiver of a transfer chooses.

    Returns:
        `width`, `by_receiver` and `position` of `DividedTopology`, and int [R + 1], devices that choose lanes of each.
    """
    most = np.zeros(len(capacity))
    np.maximum.at(most, over, np.where(over >= 0, demand, 0.0))
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where((most > 0) & np.isfinite(capacity), capacity / most, 1.0)
    lanes = np.floor(ratio + _LANE_SLACK)
    ranks = [_rank(over, pairs[:, way], len(capacity)) for way in (0, 1)]
    senders, receivers = ranks[0][1] + further[0], ranks[1][1] + further[1]
    by_receiver = np.where(lanes > 1, receivers > senders, receivers <= senders)  # one lane: the fewer, see `_kept`
    choosers = np.where(by_receiver, receivers, senders)
    width = np.clip(lanes, 1, np.clip(choosers, 1, MAX_LANES)).astype(np.int64)
    return width, by_receiver, np.where(by_receiver[over], ranks[1][0], ranks[0][0]), choosers


def _rank(over: NDArray[np.int64], device: NDArray[np.int64], rows: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the number of each path's device among the distinct ones that use a resource [P, K], and their count [R + 1]."""
    devices = int(device.max()) + 1
    seen = np.zeros((rows, devices), dtype=bool)
    seen[over, device[:, None]] = True
    order = np.cumsum(seen, axis=1) - 1
    return order[over, device[:, None]], seen.sum(axis=1)


def _kept(
    over: NDArray[np.int64],
    limits: NDArray[np.bool_],
    slowest: NDArray[np.int64],
    width: NDArray[np.int64],
    position: NDArray[np.int64],
    every: NDArray[np.int64],
) -> NDArray[np.bool_]:
    """Marks the resources of each path that become channels: bool [P, K].

    The ends of a path always do, so that every transfer holds something of its sender and of its receiver. In the middle, a
    resource with a lane for each device that chooses one is left out where all paths of such a device over it begin or end in
    one exclusive port, or share one exclusive bottleneck of several devices: these keep them apart already.

    Args:
        over: [P, K] resources.
        limits: [R + 1], whether a resource has a capacity.
        slowest: [P], column of the slowest resource.
        width: int [R + 1], lanes of each resource.
        position: int [P, K], number of the device that chooses the lane, among those that use the resource.
        every: int [R + 1], devices that choose a lane, with those that no path here is of.
    """
    rows, count = np.arange(len(over)), len(limits)
    last = (over >= 0).sum(axis=1) - 1
    ends = np.zeros(over.shape, dtype=bool)
    ends[:, 0] = ends[rows, last] = True
    choosers = np.ones(count, dtype=np.int64)
    np.maximum.at(choosers, over, position + 1)
    covered = np.zeros((count, int(choosers.max())), dtype=bool)
    single = limits & (width == 1)
    for column, firm in ((np.zeros_like(last), single), (last, single), (slowest, single & (choosers > 1))):
        cover = over[rows, column][:, None]
        valid = firm[cover] & (cover != over)
        low, high = np.full(covered.shape, count), np.full(covered.shape, -1)
        np.minimum.at(low, (over, position), np.where(valid, cover, -1))
        np.maximum.at(high, (over, position), np.where(valid, cover, count))
        covered |= low == high
    covered |= np.arange(covered.shape[1]) >= choosers[:, None]
    needless = (width >= np.maximum(every, choosers)) & covered.all(axis=1)
    return limits[over] & (over >= 0) & (ends | ~needless[over])


def _number(key: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns channel numbers in order of first use; -1 stays."""
    values, first, index = np.unique(key, return_index=True, return_inverse=True)
    first[values < 0] = -1
    number = np.empty(len(values), dtype=np.int64)
    number[np.argsort(first, kind="stable")] = np.arange(len(values)) - int(values[0] < 0)
    return number[index].reshape(key.shape)
