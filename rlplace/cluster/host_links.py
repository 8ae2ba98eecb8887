"""Links of clusters whose hosts come in few classes, worked out for the pairs that are asked for.

Hosts are alike where they have the same devices in the same order and the same interconnect, groups of a tier where as many
hosts, or smaller groups, of each class make them up. A cluster of at most three hosts of each class, or of three of the largest
groups with two of their members each, has a pair of every sort: two devices of one host, of two hosts of one class, of hosts of
two classes, in one group or in two. Its topology is lowered once; any pair has the rate, the latency and the resources of the
pair that represents it, and the lane of a resource follows from how many of its users come before the device that chooses. So
nothing here grows with the square of the number of devices. `HostLinks.whole` writes all pairs out, and equals
`rlplace.cluster.topology.lower` of the whole topology.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from copy import copy
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlplace.cluster.exchanges import Members, NodeLanes, Owned, Sorts, exchange_of
from rlplace.cluster.fabric import Fabric
from rlplace.cluster.interconnect import Host, PathBuilder, build_fabrics, positions
from rlplace.cluster.links import MAX_WRITTEN, AlikeRun, Channels, Links
from rlplace.cluster.presets import DeviceKind
from rlplace.cluster.tiers import Tier, common_depth, tiers_of
from rlplace.cluster.topology import MAX_LANES, DividedTopology, Topology, divided_topology, repeated, written_links
from rlplace.errors import InputError
from rlplace.files import without_collections

_STAND_INS = 3  # members of a class: one for itself, two for its peers, so that peers are several
_FEW = 64  # a group of less than so large a part of the devices asks for the fabrics of its hosts alone
_INNER_STAND_INS = 2  # of those inside a group that has peers: these have several themselves


class _Standing(NamedTuple):
    """Facts about hosts of each class, from those that represent them; nodes are groups of hosts, then hosts.

    Attributes:
        lowered: P pairs of devices of the standing hosts.
        used: int [P, K], resources of each pair that become channels; -1 past the last.
        row: int [S, S], row of a pair of standing devices in `lowered`.
        hosts: int [classes], the host that represents a class; first: int [classes], its first standing device.
        peer: int [classes, classes, L + 2], first standing device of a host of the second class that lies in so many groups
            of the host that represents the first; the last is that host itself, and -1 stands where there is none.
        owner: int [R], the node of a resource; local: int [R], its number among those of its node.
        depth: int [R], column of the owner in `HostLinks._nodes`.
        inside: bool [2, R], whether any device of the owner sends and receives over it: all, where the owner is a group.
        before: int [2, R, L + 1], such devices among the first ones of an owner that is a host.
        outside: bool [2, R], whether all devices outside of the owner do.
    """

    lowered: DividedTopology
    used: NDArray[np.int64]
    row: NDArray[np.int64]
    hosts: NDArray[np.int64]
    first: NDArray[np.int64]
    peer: NDArray[np.int64]
    owner: NDArray[np.int64]
    local: NDArray[np.int64]
    depth: NDArray[np.int64]
    inside: NDArray[np.bool_]
    before: NDArray[np.int64]
    outside: NDArray[np.bool_]


class HostLinks:
    """Links of D devices in hosts, by pair.

    Args:
        kinds: D device kinds.
        host_of: D host numbers.
        hosts: H interconnects, of each host.
        tiers: Groups of hosts with uplinks, inner ones first.
    """

    def __init__(
        self, kinds: Sequence[DeviceKind], host_of: Sequence[int], hosts: Sequence[Host], tiers: Sequence[Tier] = ()
    ) -> None:
        self.hosts, self._kinds, self._faster = tuple(hosts), kinds, 1.0
        self._tiers = tiers_of(tiers, len(hosts))
        self._host = np.array(host_of, dtype=np.int64)
        self.num_devices = len(self._host)

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """Groups of hosts with uplinks, inner ones first."""
        return self._tiers.table

    @property
    def seats(self) -> NDArray[np.int64]:
        """int64 [D, L + 1], the groups of each device, outermost first, -1 past the last; then its host, numbered on."""
        return self._nodes[self._host]

    @cached_property
    def _nodes(self) -> NDArray[np.int64]:
        """int64 [H, L + 1], `seats` of each host."""
        return np.column_stack([self._tiers.chain, len(self._tiers.of) + np.arange(len(self.hosts))])

    @cached_property
    def _members(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Node x D + device of all devices of all nodes, in order; and where each node begins, int64 [nodes + 1]."""
        nodes, count = self.seats, self.num_devices
        keys = np.sort((nodes * count + np.arange(count)[:, None])[nodes >= 0])
        return keys, np.searchsorted(keys, np.arange(len(self._tiers.of) + len(self.hosts) + 1) * count)

    @cached_property
    def fabrics(self) -> tuple[Fabric, ...]:
        """Devices joined by one interconnect, with the times of their collectives."""
        built = build_fabrics(self._kinds, self._host.tolist(), self.hosts)
        return built if self.of_presets else tuple(fabric.quicker(self._faster) for fabric in built)

    def fabrics_near(self, devices: Sequence[int]) -> tuple[Fabric, ...]:
        """Returns `fabrics` of the hosts of these devices, as `Wires.fabrics_near` says."""
        if "fabrics" in self.__dict__ or _FEW * len(devices) > self.num_devices:
            return self.fabrics
        hosts = np.unique(self._host[list(devices)]).tolist()
        (keys, starts), groups = self._members, len(self._tiers.of)
        own = [keys[starts[groups + host] : starts[groups + host + 1]] % self.num_devices for host in hosts]
        number, host_of = np.concatenate(own).tolist(), np.repeat(np.arange(len(own)), list(map(len, own))).tolist()
        built = build_fabrics([self._kinds[device] for device in number], host_of, [self.hosts[host] for host in hosts])
        found = tuple(fabric.renumbered(number) for fabric in built)
        return found if self.of_presets else tuple(fabric.quicker(self._faster) for fabric in found)

    def sorts(self, groups: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the sort of groups as `Wires.sorts` says: by the places of their devices on hosts of which classes.

        Devices as far from each other, of nodes as far from each other, take lanes that are as far from each other.
        """
        host = self._host[groups]
        nodes = self._nodes[host].reshape(len(groups), -1)
        apart = groups - groups[:, :1], nodes - np.tile(nodes[:, : self._nodes.shape[1]], groups.shape[1])
        facts = np.concatenate([*apart, self._class[host], self._local[groups]], axis=1)
        numbers: dict[bytes, int] = {}
        return np.array([numbers.setdefault(row.tobytes(), len(numbers)) for row in facts], dtype=np.int64)

    def run(self, first: int, last: int) -> AlikeRun | None:
        """Returns the run of devices, as `Wires.run` says: outermost groups or hosts that are alike, in order."""
        run_of, starts, periods = self._runs
        start, period = int(starts[run_of[first]]), int(periods[run_of[first]])
        alike = run_of[first] == run_of[last] and (first - start) % period == 0
        return AlikeRun(start, period, self._lanes) if alike else None

    @cached_property
    def _lanes(self) -> int:
        """Least common multiple of the lanes of all resources."""
        width = self._standing.lowered.width
        return int(np.lcm.reduce(width[width > 0]))

    @cached_property
    def _runs(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Number of the run of each device, int64 [D]; first device and period of each run, int64 [R]."""
        outer = self.seats[np.arange(self.num_devices), (self.seats >= 0).argmax(axis=1)]
        begins = np.flatnonzero(np.diff(outer, prepend=-1))
        sizes = np.diff(begins, append=self.num_devices)
        kinds, inside = self._class[self._host], self.seats - outer[:, None]
        inside[self.seats < 0] = -1
        inside[:, -1] = self._host - self._host[np.repeat(begins, sizes)]
        number: dict[object, int] = {}
        looks = []
        for begin, size in zip(begins.tolist(), sizes.tolist(), strict=True):
            own = slice(begin, begin + size)
            look = kinds[own].tobytes(), inside[own].tobytes(), self._local[own].tobytes()
            looks.append(number.setdefault(look, len(number)))
        first = np.flatnonzero(np.diff(looks, prepend=-1))
        run_of = np.repeat(np.repeat(np.arange(len(first)), np.diff(first, append=len(looks))), sizes)
        return run_of, begins[first], sizes[first]

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
    def _children(self) -> dict[int, list[int]]:
        """Groups and hosts with devices directly inside a group, by its number, in order; -1: inside of none."""
        found, (_, starts), seen = dict[int, list[int]](), self._members, set[int]()
        for row in self._nodes[np.diff(starts)[len(self._tiers.of) :] > 0].tolist():
            parent = -1
            for node in row:
                if node >= 0 and node not in seen:
                    found.setdefault(parent, []).append(node)
                    seen.add(node)
                parent = node if node >= 0 else parent
        return found

    @cached_property
    def _node_class(self) -> NDArray[np.int64]:
        """int64 [nodes], equal for groups, and for hosts, that are alike."""
        (keys, starts), groups = self._members, len(self._tiers.of)
        begins = starts[groups:] - starts[groups]
        made_of = np.fromiter(map(id, self._kinds), dtype=np.int64)[keys[starts[groups] :] % self.num_devices]
        numbers: dict[object, int] = {}
        looks: Iterator[object] = (
            (made_of[begin:end].tobytes(), host.fabric, host.network)
            for host, (begin, end) in zip(self.hosts, pairwise(begins.tolist()), strict=True)
        )
        node_class = np.full(groups + len(self.hosts), -1)
        node_class[groups:] = [numbers.setdefault(look, len(numbers)) for look in looks]
        for group, number in enumerate(self._tiers.of.tolist()):  # inner ones first
            tier, inside = self._tiers.table[number], Counter(node_class[self._children.get(group, [])].tolist())
            look = tier.bytes_per_s, tier.latency_s, frozenset(inside.items())
            node_class[group] = numbers.setdefault(look, len(numbers))
        return node_class

    @cached_property
    def _class(self) -> NDArray[np.int64]:
        """int64 [H], equal for hosts that are alike and lie in groups that are alike."""
        rows = np.where(self._nodes >= 0, self._node_class[self._nodes], -1)
        return np.unique(rows, axis=0, return_inverse=True)[1].ravel()

    @cached_property
    def _local(self) -> NDArray[np.int64]:
        """int64 [D], the number of each device among those of its host."""
        keys, starts = self._members
        order, found = keys[starts[len(self._tiers.of)] :] % self.num_devices, np.empty(self.num_devices, dtype=np.int64)
        found[order] = (
            np.arange(self.num_devices) - (starts[len(self._tiers.of) :] - starts[len(self._tiers.of)])[self._host[order]]
        )
        return found

    @cached_property
    def _standing(self) -> _Standing:
        (keys, starts), groups, count = self._members, len(self._tiers.of), self.num_devices
        hosts = np.array(list(self._stand_ins(-1, _STAND_INS)), dtype=np.int64)
        own = [keys[starts[groups + host] : starts[groups + host + 1]] % count for host in hosts.tolist()]
        devices, host_of = np.concatenate(own), np.repeat(np.arange(len(own)), list(map(len, own)))
        kinds = [self._kinds[device] for device in devices.tolist()]
        with without_collections():
            tiers = self._tiers._replace(chain=self._tiers.chain[hosts])
            builder = PathBuilder(kinds, host_of.tolist(), [self.hosts[host] for host in hosts.tolist()], tiers)
            paths = {(i, j): builder.path(i, j) for i in range(len(kinds)) for j in range(len(kinds)) if i != j}
            made = np.array([node for node, _ in builder.numbers], dtype=np.int64)
            owner = np.where(made < len(hosts), groups + hosts[np.minimum(made, len(hosts) - 1)], made - len(hosts))
            depth = (self._nodes[hosts][:, :, None] == owner).any(axis=0).argmax(axis=0)
            of_owner = self._nodes[hosts][host_of][:, depth].T == owner[:, None]
            pairs = np.array(list(paths), dtype=np.int64).reshape(-1, 2)
            users = _users(host_of, of_owner, pairs, [path.over for path in paths.values()])
            further = np.zeros((2, len(owner) + 1), dtype=np.int64)  # devices that others represent
            unseen = starts[owner + 1] - starts[owner] - of_owner.sum(axis=1)
            further[:, :-1] = users[0] * unseen + users[2] * (count - len(kinds) - unseen)
            found = divided_topology(Topology(len(kinds), tuple(builder.resources), paths), further)
        row = np.full((len(kinds), len(kinds)), -1)
        row[found.pairs[:, 0], found.pairs[:, 1]] = np.arange(len(found.pairs))
        of_class, standing = np.unique(self._class[hosts], return_index=True)
        first = np.searchsorted(host_of, np.arange(len(hosts)))
        peer = np.full((self._class.max() + 1, self._class.max() + 1, self._nodes.shape[1] + 1), -1)
        for number, host in zip(of_class.tolist(), hosts[standing].tolist(), strict=True):
            peer[number, self._class[hosts], self._common_depth(host, hosts)] = first
        chosen = np.zeros((2, len(peer)), dtype=np.int64)
        chosen[:, of_class] = hosts[standing], first[standing]
        left = np.argsort(~found.kept, axis=1, kind="stable")[:, : found.kept.sum(axis=1).max()]
        used = np.take_along_axis(np.where(found.kept, found.over, -1), left, axis=1)
        names = sorted({name for _, name in builder.numbers})
        local = np.array([names.index(name) for _, name in builder.numbers], dtype=np.int64)
        return _Standing(found, used, row, chosen[0], chosen[1], peer, owner, local, depth, *users)

    def _stand_ins(self, parent: int, most: int) -> Iterator[int]:
        """Yields hosts that represent those inside a group, at most so many members of each class."""
        groups, alike = len(self._tiers.of), dict[int, list[int]]()
        for node in self._children[parent]:
            alike.setdefault(int(self._node_class[node]), []).append(node)
        chosen = [node for own in alike.values() for node in own[:most]]
        for node in chosen:
            if node < groups:
                yield from self._stand_ins(node, most if len(chosen) == 1 else _INNER_STAND_INS)
            else:
                yield node - groups

    def _common_depth(self, hosts: ArrayLike, others: ArrayLike) -> NDArray[np.int64]:
        """Returns in how many groups hosts lie together with others; for a host and itself one more than a host may lie in."""
        one, other = np.asarray(hosts, dtype=np.int64), np.asarray(others, dtype=np.int64)
        found = common_depth(self._tiers.chain[one], self._tiers.chain[other])
        return np.where(one == other, self._nodes.shape[1], found)

    def _pairs(self, senders: ArrayLike, receivers: ArrayLike) -> list[NDArray[np.int64]]:
        """Returns senders and receivers as arrays [P], and the row of the pair that represents each, -1 for a device alone."""
        i, j = np.asarray(senders, dtype=np.int64), np.asarray(receivers, dtype=np.int64)
        (one, other), stand = (self._host[i], self._host[j]), self._standing
        peer = stand.peer[self._class[one], self._class[other], self._common_depth(one, other)]
        return [i, j, stand.row[stand.first[self._class[one]] + self._local[i], peer + self._local[j]]]

    def rates(self, senders: ArrayLike, receivers: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Returns bytes per second and latency in seconds, float64 [P] each, as `Wires.rates` says."""
        _, _, row = self._pairs(senders, receivers)
        found = self._standing.lowered
        return np.where(row < 0, 0.0, self._faster * found.rate[row]), np.where(row < 0, 0.0, found.late[row])

    def held(self, senders: ArrayLike, receivers: ArrayLike) -> NDArray[np.int64]:
        """Returns the channels of each pair, int64 [P, K], as `Wires.held` says; numbers are not those of `whole`."""
        i, j, row = self._pairs(senders, receivers)
        stand, (keys, starts), groups = self._standing, self._members, len(self._tiers.of)
        used = np.where((row < 0)[:, None], -1, stand.used[row])
        pair, column = np.nonzero(used >= 0)
        over, sender, receiver = used[pair, column], i[pair], j[pair]
        owner, depth, ends = stand.owner[over], stand.depth[over], (self._host[sender], self._host[receiver])
        of_sender = self._nodes[stand.hosts[self._class[ends[0]]], depth] == owner
        node = self._nodes[np.where(of_sender, *ends), depth]
        by_receiver = stand.lowered.by_receiver[over]
        way, chooser = by_receiver.astype(np.int64), np.where(by_receiver, receiver, sender)
        earlier = np.searchsorted(keys, node * self.num_devices + chooser) - starts[node]
        in_host = stand.before[way, over, np.minimum(earlier, stand.before.shape[2] - 1)]
        own = np.where(owner < groups, stand.inside[way, over] * earlier, in_host)
        lane = (own + stand.outside[way, over] * (chooser - earlier)) % stand.lowered.width[over]
        found = np.full(used.shape, -1)
        found[pair, column] = (node * len(stand.owner) + stand.local[over]) * MAX_LANES + lane
        found[repeated(found)] = -1
        return found

    def exchange(self, groups: NDArray[np.int64]) -> tuple[float, float]:
        """Returns what an all-to-all in all of these groups takes, see `rlplace.cluster.rings.exchange`."""
        device, stand = groups.ravel(), self._standing
        host, (keys, starts) = self._host[device], self._members
        standing, one, kind = np.unique(
            stand.first[self._class[host]] + self._local[device], return_index=True, return_inverse=True
        )
        own, local = self._class[host[one]], self._local[device[one]]
        peer = np.moveaxis(stand.peer[own[:, None], own], 2, 0)
        row = np.where(peer < 0, -1, stand.row[standing[:, None], np.maximum(peer, 0) + local])
        over = np.where(row[..., None] < 0, -1, stand.used[row])
        over.reshape(-1, over.shape[-1])[repeated(over.reshape(-1, over.shape[-1]))] = -1
        of_sender = self._nodes[stand.hosts[own][:, None, None], stand.depth[over]] == stand.owner[over]
        found, end = stand.lowered, len(stand.owner)
        rate, late = np.where(row < 0, 0.0, self._faster * found.rate[row]), np.where(row < 0, 0.0, found.late[row])
        group = np.repeat(np.arange(len(groups)), groups.shape[1])
        return exchange_of(
            Members(device, group, self._nodes[host], kind.ravel(), self.num_devices),
            Sorts(rate, late, over, of_sender),
            Owned(stand.depth, stand.local, found.width[:end], found.by_receiver[:end]),
            NodeLanes(keys, starts, len(self._tiers.of), stand.inside, stand.before, stand.outside),
        )

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


def _users(
    host_of: NDArray[np.int64], own: NDArray[np.bool_], pairs: NDArray[np.int64], over: Sequence[Sequence[int]]
) -> tuple[NDArray[np.bool_], NDArray[np.int64], NDArray[np.bool_]]:
    """Returns `inside`, `before` and `outside` of `_Standing`.

    Args:
        host_of: int [S], hosts of standing devices.
        own: bool [R, S], whether a device is one of the owner of a resource.
        pairs: int [P, 2], senders and receivers.
        over: Resources of each pair.
    """
    lengths = [len(resources) for resources in over]
    resources = np.fromiter((r for path in over for r in path), np.int64)
    seen = np.zeros((2, *own.shape), dtype=bool)
    for way in (0, 1):
        seen[way, resources, np.repeat(pairs[:, way], lengths)] = True
    local = np.array(positions(host_of.tolist()), dtype=np.int64)
    before = np.zeros((2, len(own), int(local.max()) + 2), dtype=np.int64)
    for way in (0, 1):
        resource, device = np.nonzero(seen[way] & own)
        before[way, resource, local[device] + 1] = 1
    inside, outside = (np.array((seen & there).any(axis=2)) for there in (own, ~own))
    return inside, before.cumsum(axis=2), outside
