"""Links of clusters whose hosts come in few classes, worked out for the pairs that are asked for.

Hosts are alike where they have the same devices in the same order and the same interconnect. A cluster of at most three hosts
of each class has a pair of every sort: two devices of one host, of two hosts of one class, of hosts of two classes. Its
topology is lowered once; any pair has the rate, the latency and the resources of the pair that represents it, and the lane of a
resource follows from how many of its users come before the device that chooses. So nothing here grows with the square of the
number of devices. `HostLinks.whole` writes all pairs out, and equals `rlplace.cluster.topology.lower` of the whole topology.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlplace.cluster.fabric import Fabric
from rlplace.cluster.interconnect import Host, PathBuilder, build_fabrics, positions
from rlplace.cluster.links import MAX_WRITTEN, Channels, Links
from rlplace.cluster.presets import DeviceKind
from rlplace.cluster.topology import MAX_LANES, DividedTopology, Topology, divided_topology, repeated, written_links
from rlplace.errors import InputError
from rlplace.files import without_collections

_STAND_INS = 3  # hosts of a class: one for itself, two for its peers, so that peers are several


class _Standing(NamedTuple):
    """Facts about hosts of each class, from those that represent them.

    Attributes:
        lowered: Pairs of devices of the standing hosts.
        row: int [S, S], row of a pair of standing devices in `lowered`.
        first: int [classes, 2], first device of the first and the second host that represent a class.
        owner: int [R], the standing host of a resource; local: int [R], its number among those of its host.
        before: int [2, R, L + 1], senders and receivers of the resource's own host among its first devices.
        outside: bool [2, R], whether devices of all other hosts send and receive over it.
    """

    lowered: DividedTopology
    row: NDArray[np.int64]
    first: NDArray[np.int64]
    owner: NDArray[np.int64]
    local: NDArray[np.int64]
    before: NDArray[np.int64]
    outside: NDArray[np.bool_]


class HostLinks:
    """Links of D devices in hosts, by pair.

    Args:
        kinds: D device kinds.
        host_of: D host numbers.
        hosts: Interconnect of each host.
    """

    def __init__(self, kinds: Sequence[DeviceKind], host_of: Sequence[int], hosts: Sequence[Host]) -> None:
        self.hosts, self._kinds, self._faster = tuple(hosts), kinds, 1.0
        self._host = np.array(host_of, dtype=np.int64)
        self.num_devices = len(self._host)
        order = np.argsort(self._host, kind="stable")
        starts = np.searchsorted(self._host[order], np.arange(len(hosts) + 1))
        self._local = np.empty_like(order)
        self._local[order] = np.arange(self.num_devices) - starts[self._host[order]]
        made_of = np.fromiter(map(id, kinds), dtype=np.int64)[order]
        classes: dict[tuple[object, ...], list[int]] = {}
        for host, (link, begin, end) in enumerate(zip(hosts, starts.tolist(), starts[1:].tolist(), strict=False)):
            if begin < end:
                classes.setdefault((made_of[begin:end].tobytes(), link.fabric, link.network), []).append(host)
        self._start, self._in_hosts = starts, self._host[order] * self.num_devices + order
        self._classes = list(classes.values())
        self._class = np.zeros(len(hosts), dtype=np.int64)
        for number, members in enumerate(self._classes):
            self._class[members] = number

    @cached_property
    def fabrics(self) -> tuple[Fabric, ...]:
        """Devices joined by one interconnect, with the times of their collectives."""
        built = build_fabrics(self._kinds, self._host.tolist(), self.hosts)
        return built if self.of_presets else tuple(fabric.quicker(self._faster) for fabric in built)

    def sorts(self, groups: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the sort of groups as `Wires.sorts` says: by the places of their devices on hosts of which classes."""
        host = self._host[groups]
        width = self._standing.lowered.width
        lane = groups[:, :1] % int(np.lcm.reduce(width[width > 0]))  # a device so much further takes the same lanes
        facts = np.concatenate([host - host[:, :1], self._class[host], self._local[groups], lane], axis=1)
        numbers: dict[bytes, int] = {}
        return np.array([numbers.setdefault(row.tobytes(), len(numbers)) for row in facts], dtype=np.int64)

    @property
    def of_presets(self) -> bool:
        """Absence of `quicker`: the links are those of the hosts as they are."""
        return self._faster == 1.0

    def quicker(self, factor: float) -> HostLinks:
        """Returns all links with their bandwidth multiplied; latencies stay."""
        found = copy(self)
        found._faster *= factor
        for name in ("fabrics", "whole"):
            found.__dict__.pop(name, None)
        return found

    @cached_property
    def _standing(self) -> _Standing:
        members = [members[:_STAND_INS] for members in self._classes]
        standing = [host for own in members for host in own]
        devices = [
            [int(key % self.num_devices) for key in self._in_hosts[self._start[host] : self._start[host + 1]]]
            for host in standing
        ]
        host_of = [number for number, own in enumerate(devices) for _ in own]
        kinds = [self._kinds[device] for own in devices for device in own]
        with without_collections():
            builder, count = PathBuilder(kinds, host_of, [self.hosts[host] for host in standing]), len(kinds)
            paths = {(i, j): builder.path(i, j) for i in range(count) for j in range(count) if i != j}
            owner = np.array([host for host, _ in builder.numbers], dtype=np.int64)
            pairs = np.array(list(paths), dtype=np.int64).reshape(-1, 2)
            before, outside = self._users(np.array(host_of), owner, pairs, [path.over for path in paths.values()])
            further = np.zeros((2, len(owner) + 1), dtype=np.int64)
            further[:, :-1] = outside * (self.num_devices - count)  # devices that others represent are in no such host
            found = divided_topology(Topology(count, tuple(builder.resources), paths), further)
        row = np.full((count, count), -1)
        row[found.pairs[:, 0], found.pairs[:, 1]] = np.arange(len(found.pairs))
        starts = np.cumsum([0, *map(len, devices)])
        at = np.cumsum([0, *map(len, members)])
        first = np.array([[starts[begin], starts[begin + (end - begin > 1)]] for begin, end in pairwise(at)])
        names = sorted({name for _, name in builder.numbers})
        local = np.array([names.index(name) for _, name in builder.numbers], dtype=np.int64)
        return _Standing(found, row, first, owner, local, before, outside)

    @staticmethod
    def _users(
        host_of: NDArray[np.int64], owner: NDArray[np.int64], pairs: NDArray[np.int64], over: Sequence[Sequence[int]]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Returns `before` and `outside` of `_Standing`."""
        lengths = [len(resources) for resources in over]
        resources = np.fromiter((r for path in over for r in path), np.int64)
        seen = np.zeros((2, len(owner), len(host_of)), dtype=bool)
        for way in (0, 1):
            seen[way, resources, np.repeat(pairs[:, way], lengths)] = True
        own = owner[:, None] == host_of
        local = np.array(positions(host_of.tolist()), dtype=np.int64)
        before = np.zeros((2, len(owner), int(local.max()) + 2), dtype=np.int64)
        for way in (0, 1):
            resource, device = np.nonzero(seen[way] & own)
            before[way, resource, local[device] + 1] = 1
        return before.cumsum(axis=2), (seen & ~own).any(axis=2)

    def _pairs(self, senders: ArrayLike, receivers: ArrayLike) -> list[NDArray[np.int64]]:
        """Returns senders and receivers as arrays [P], and the row of the pair that represents each, -1 for a device alone."""
        i, j = np.asarray(senders, dtype=np.int64), np.asarray(receivers, dtype=np.int64)
        (one, other), stand = (self._host[i], self._host[j]), self._standing
        classes = self._class[one], self._class[other]
        second = ((classes[0] == classes[1]) & (one != other)).astype(np.int64)
        return [i, j, stand.row[stand.first[classes[0], 0] + self._local[i], stand.first[classes[1], second] + self._local[j]]]

    def rates(self, senders: ArrayLike, receivers: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Returns bytes per second and latency in seconds, float64 [P] each, as `Wires.rates` says."""
        _, _, row = self._pairs(senders, receivers)
        found = self._standing.lowered
        return np.where(row < 0, 0.0, self._faster * found.rate[row]), np.where(row < 0, 0.0, found.late[row])

    def held(self, senders: ArrayLike, receivers: ArrayLike) -> NDArray[np.int64]:
        """Returns the channels of each pair, int64 [P, K], as `Wires.held` says; numbers are not those of `whole`."""
        i, j, row = self._pairs(senders, receivers)
        stand, count = self._standing, len(self._standing.owner)
        found, over = stand.lowered, stand.lowered.over[row]
        senders_own = stand.owner[over] == stand.owner[found.over[row, :1]]  # a path begins at a port of its sender
        host = np.where(senders_own, self._host[i][:, None], self._host[j][:, None])
        way = found.by_receiver[over].astype(np.int64)
        chooser = np.where(way == 1, j[:, None], i[:, None])
        earlier = np.searchsorted(self._in_hosts, host * self.num_devices + chooser) - self._start[host]
        position = stand.before[way, over, earlier] + stand.outside[way, over] * (chooser - earlier)
        key = (host * count + stand.local[over]) * MAX_LANES + position % found.width[over]
        key[~found.kept[row] | (row < 0)[:, None]] = -1
        key[repeated(key)] = -1
        return key

    @cached_property
    def whole(self) -> Links:
        """Matrices of all pairs.

        Raises:
            InputError: There are too many devices for that.
        """
        count = self.num_devices
        if count > MAX_WRITTEN:
            raise InputError(
                f"links: {count} devices; placements and cluster files with all links look at every pair of devices, and are "
                f"for at most {MAX_WRITTEN}; plan whole strategies, which look at classes of hosts"
            )
        pairs = np.argwhere(~np.eye(count, dtype=bool))
        if not len(pairs):
            return Links(np.zeros((1, 1)), np.zeros((1, 1)), (((),),), self.fabrics)
        return written_links(count, pairs, *self.rates(*pairs.T), self.held(*pairs.T), self.fabrics)

    @property
    def bandwidth_bytes_per_s(self) -> NDArray[np.float64]:
        """Matrix or channels of `whole`."""
        return self.whole.bandwidth_bytes_per_s

    @property
    def latency_s(self) -> NDArray[np.float64]:
        """Matrix or channels of `whole`."""
        return self.whole.latency_s

    @property
    def channels(self) -> Channels | None:
        """Matrix or channels of `whole`."""
        return self.whole.channels

    @property
    def effective_channels(self) -> Channels:
        """Matrix or channels of `whole`."""
        return self.whole.effective_channels
