"""All-to-alls over links of hosts: what their channels carry when all devices of groups send to all others at once.

Devices are of one kind where they have the same number on hosts of one class. A device exchanges as much with every device of a
kind that shares as many groups of hosts with it, so counts by node and kind replace the pairs, and nothing here grows with the
square of the devices. A channel belongs to a node of the sender or of the receiver, and its lane is chosen by a device
of that node, or by those on the other side: the first are looked at one by one, the others for each node that has such lanes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlplace.cluster.topology import MAX_LANES

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class Sorts(NamedTuple):
    """Pairs of kinds of devices; N kinds, and depths: groups that hosts have in common, one more for those of one host.

    Attributes:
        rate: float64 [depths, N, N], bytes per second from a kind to a kind; 0 without a link, and without such a pair.
        late: float64 [depths, N, N], seconds.
        over: int64 [depths, N, N, K], resources that become channels; -1 past the last.
        of_sender: bool [depths, N, N, K], whether they belong to a node of the sender, or to one of the receiver.
    """

    rate: Floats
    late: Floats
    over: Ints
    of_sender: NDArray[np.bool_]


class Owned(NamedTuple):
    """Resources [R].

    Attributes:
        depth: int64 [R], column of the owner among the nodes of a device.
        local: int64 [R], number among those of the owner.
        width: int64 [R], lanes.
        by_receiver: bool [R], whether the receiver of a transfer chooses its lane.
    """

    depth: Ints
    local: Ints
    width: Ints
    by_receiver: NDArray[np.bool_]


class NodeLanes(NamedTuple):
    """Facts by which devices choose lanes of the resources of nodes, see `rlplace.cluster.host_links._Standing`.

    Attributes:
        keys: Node x D + device of all devices of all nodes, in order.
        starts: int64 [nodes + 1], where each node begins.
        groups: Number of nodes that are groups of hosts, which come first.
        inside: bool [2, R].
        before: int64 [2, R, .].
        outside: bool [2, R].
    """

    keys: Ints
    starts: Ints
    groups: int
    inside: NDArray[np.bool_]
    before: Ints
    outside: NDArray[np.bool_]

    def earlier(self, node: Ints, device: Ints, count: int) -> Ints:
        """Returns how many of the devices of nodes [P] come before devices [P], of D."""
        return np.searchsorted(self.keys, node * count + device) - self.starts[node]

    def of(self, resource: Ints, owned: Owned, node: Ints, device: Ints, earlier: Ints) -> Ints:
        """Returns the lanes [P] that devices choose of resources of nodes."""
        way = owned.by_receiver[resource].astype(np.int64)
        in_host = self.before[way, resource, np.minimum(earlier, self.before.shape[2] - 1)]
        own = np.where(node < self.groups, self.inside[way, resource] * earlier, in_host)
        return np.asarray((own + self.outside[way, resource] * (device - earlier)) % owned.width[resource])


class Members(NamedTuple):
    """Devices [M] of groups, each in at most one.

    Attributes:
        device: int64 [M], of D.
        group: int64 [M].
        nodes: int64 [M, L + 1], groups of hosts around each, outermost first, -1 past the last; then its host.
        kind: int64 [M].
        total: D.
    """

    device: Ints
    group: Ints
    nodes: Ints
    kind: Ints
    total: int


def exchange_of(members: Members, sorts: Sorts, owned: Owned, lanes: NodeLanes) -> tuple[float, float]:
    """Returns seconds per byte of the busiest channel, and the longest latency, when all devices of groups send to all others.

    Each sends as much to every other one of its group, and nothing to those of other groups. Seconds are inf without a link.
    """
    numbers, loads, slowest, latency = [np.zeros(0, dtype=np.int64)], [np.zeros(0)], 0.0, 0.0
    for depth, others in _others(members, sorts.rate.shape[1]):
        which, kind = np.nonzero(others)
        pairs = depth, members.kind[which], kind
        if not sorts.rate[pairs].all():
            return math.inf, latency
        slowest = max(slowest, float((1.0 / sorts.rate[pairs]).max(initial=0.0)))
        latency = max(latency, float(sorts.late[pairs].max(initial=0.0)))
        for sends in (True, False):
            row = pairs if sends else (depth, kind, pairs[1])
            own = _of_own_node(sorts, row, sends) & ~_by_others(owned, sorts.over[row], sends)
            pair, column = np.nonzero(own)
            over, at = sorts.over[row][pair, column], which[pair]
            node, device = members.nodes[at, owned.depth[over]], members.device[at]
            lane = lanes.of(over, owned, node, device, lanes.earlier(node, device, members.total))
            numbers.append((node * len(owned.width) + owned.local[over]) * MAX_LANES + lane)
            loads.append((others[which, kind] / sorts.rate[row])[pair])
    for number, load in _chosen_by_others(members, sorts, owned, lanes):
        numbers.append(number)
        loads.append(load)
    _, channel = np.unique(np.concatenate(numbers), return_inverse=True)
    return max(slowest, float(np.bincount(channel.ravel(), np.concatenate(loads)).max(initial=0.0))), latency


def _of_own_node(sorts: Sorts, row: Any, sends: bool) -> NDArray[np.bool_]:
    """Marks resources [..., K] of pairs that belong to a node of the device that sends, or receives."""
    return np.asarray((sorts.over[row] >= 0) & (sorts.of_sender[row] == sends))


def _by_others(owned: Owned, over: Ints, sends: bool) -> NDArray[np.bool_]:
    """Marks resources whose lanes the devices choose that the owner's receive from, or send to."""
    return np.asarray((owned.width[over] > 1) & (owned.by_receiver[over] == sends))


def _others(members: Members, kinds: int) -> Iterator[tuple[int, Ints]]:
    """Yields depths, and for each the devices [M, N] of each kind that have no more than those with each device in common."""
    columns = members.nodes.shape[1]
    hosts, counts = members.nodes[:, -1], []
    for depth in range(columns + 1):
        node = np.full(len(hosts), -1) if depth == 0 else members.nodes[:, depth - 1]
        alone = (node < 0) & (depth > 0)  # in fewer groups: its host alone is left
        keys = np.stack([members.group, np.where(alone, hosts, node), alone | (depth == columns)], axis=1)
        at = np.unique(keys, axis=0, return_inverse=True)[1].ravel()
        table = np.zeros((int(at.max()) + 1, kinds), dtype=np.int64)
        np.add.at(table, (at, members.kind), 1)
        counts.append(table[at])
    counts.append(np.eye(kinds, dtype=np.int64)[members.kind])
    for depth in range(columns + 1):
        yield depth, counts[depth] - counts[depth + 1]


def _chosen_by_others(members: Members, sorts: Sorts, owned: Owned, lanes: NodeLanes) -> Iterator[tuple[Ints, Floats]]:
    """Yields channels, and seconds per byte that they are busy, where devices on the other side choose the lane."""
    ways = [_of_own_node(sorts, (), sends) & _by_others(owned, sorts.over, sends) for sends in (True, False)]
    last, kinds = members.nodes.shape[1] - 1, sorts.rate.shape[1]
    used = np.unique(np.concatenate([sorts.over[way] for way in ways]))
    columns = np.unique(owned.depth[used]).tolist()
    periods = {column: int(np.lcm.reduce(owned.width[used][owned.depth[used] == column])) for column in columns}
    for column, node in _unlike(members, kinds, lanes, periods):
        inside = members.nodes[:, column] == node
        own = _table(members, inside, kinds)
        chain = members.nodes[inside.argmax(), :column]
        depth = ((members.nodes[:, :column] == chain) & (chain >= 0)).cumprod(axis=1).sum(axis=1)
        depth[inside] = last + 1
        choose = np.flatnonzero(own[members.group].any(axis=1) & (~inside | (column == last)))
        device = members.device[choose]
        earlier, period = lanes.earlier(np.full(len(choose), node), device, members.total), periods[column]
        looks = (*(look[choose] for look in (members.group, depth, members.kind, inside)), earlier, (device - earlier) % period)
        sizes = tuple(int(look.max(initial=0)) + 1 for look in looks)
        distinct, counts = np.unique(np.ravel_multi_index(looks, sizes), return_counts=True)
        group, deep, kind, within, earlier, rest = np.unravel_index(distinct, sizes)
        peers = own[group] - within[:, None] * np.eye(kinds, dtype=np.int64)[kind]
        which, peer = np.nonzero(peers)
        for sends, way in zip((True, False), ways, strict=True):
            pairs = (deep[which], peer, kind[which]) if sends else (deep[which], kind[which], peer)
            pair, at = np.nonzero(way[pairs] & (owned.depth[sorts.over[pairs]] == column))
            over, of = sorts.over[pairs][pair, at], which[pair]
            lane = lanes.of(over, owned, np.full(len(of), node), earlier[of] + rest[of], earlier[of])
            yield (
                (node * len(owned.width) + owned.local[over]) * MAX_LANES + lane,
                (counts[which] * peers[which, peer] / sorts.rate[pairs])[pair],
            )


def _unlike(members: Members, kinds: int, lanes: NodeLanes, periods: dict[int, int]) -> Iterator[tuple[int, int]]:
    """Yields columns and nodes in them, of those that look alike to all others one: so many devices of each group and kind.

    Where a node holds consecutive devices, as many as lanes repeat after (`periods`, by column), it does not matter where it
    stands.
    """
    tables: dict[int, bytes] = {-1: b""}
    seen: set[object] = set()
    for column in range(max(periods, default=-1) + 1):
        nodes, first = np.unique(members.nodes[:, column], return_index=True)
        for node, at in zip(nodes.tolist(), first.tolist(), strict=True):
            if node < 0:
                continue
            tables[node] = _table(members, members.nodes[:, column] == node, kinds).tobytes()
            begin, end = lanes.starts[node : node + 2]
            low, high = lanes.keys[begin] % members.total, lanes.keys[end - 1] % members.total
            period = periods.get(column, 1)
            regular = high - low == end - begin - 1 and (end - begin) % period == 0
            above = [tables[around] for around in members.nodes[at, :column].tolist()]
            key: object = (column, *above, tables[node], int(low % period)) if regular else node
            if column in periods and key not in seen:
                yield column, node
            seen.add(key)


def _table(members: Members, inside: NDArray[np.bool_], kinds: int) -> Ints:
    """Returns the numbers of members [groups, N] of each kind that are inside of a node."""
    found = np.zeros((int(members.group.max()) + 1, kinds), dtype=np.int64)
    np.add.at(found, (members.group[inside], members.kind[inside]), 1)
    return found
