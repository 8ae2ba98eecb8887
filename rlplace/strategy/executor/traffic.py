"""Communication costs: collectives of groups, stage transfers, copies to and from the host.

A collective that runs in several groups of one axis at once takes as long as in the slowest of them, with the bytes on shared
channels (network cards, buses) counted as often as groups send them. Its time by size is tabulated at `SIZES`, four an octave,
linear in between: exact where `rlplace.cluster.collectives` is linear, within 1 % at its kinks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple, cast

import numpy as np

from rlplace.cluster import Cluster
from rlplace.cluster.collectives import collective_s, contention, meet, repeats
from rlplace.cluster.interconnect import DEVICES_PER_SOCKET, HOST_MEMORY_BYTES_PER_S, PCIE_BYTES_PER_S
from rlplace.cluster.links import AlikeRun
from rlplace.cluster.rings import exchange, sent_at_once
from rlplace.strategy.costs import (
    COLLECTIVE_KINDS,
    CONTEXT_GATHER,
    EXPERT_ALL_TO_ALL,
    RINGS,
    STATISTICS,
    BlockCosts,
    Floats,
)
from rlplace.strategy.drafts import Devices, Draft, Mesh, array_of
from rlplace.strategy.executor.arrays import Ints
from rlplace.strategy.executor.meshes import (
    Border,
    Groups,
    copy_groups,
    places_of,
    share_degree,
    share_groups,
    tensor_groups,
    tie_groups,
)

FIRST_OCTAVE, OCTAVES = 10, 34
LAST = FIRST_OCTAVE + OCTAVES
SIZES = np.array([0.0, *(2.0**octave * (1 + part / 4) for octave in range(FIRST_OCTAVE, LAST) for part in range(4)), 2.0**LAST])
"""float64 [G], bytes of the whole tensor."""


def table_s(table: Floats, size_bytes: float) -> float:
    """Returns seconds of a collective whose times at `SIZES` are `table`, 0 for no bytes; compiled code runs it too.

    Larger messages than the largest of `SIZES` follow the last stretch.
    """
    if size_bytes <= 0.0:
        return 0.0
    mantissa, exponent = math.frexp(size_bytes)
    octave = exponent - 1
    if octave < FIRST_OCTAVE:
        at, low, width = 0, 0.0, 2.0**FIRST_OCTAVE
    elif octave >= LAST:
        at, low, width = 4 * OCTAVES, 0.875 * 2.0**LAST, 0.125 * 2.0**LAST
    else:
        part = int((mantissa - 0.5) * 8.0)
        at, low, width = 1 + 4 * (octave - FIRST_OCTAVE) + part, (0.5 + part * 0.125) * 2.0**exponent, 0.125 * 2.0**exponent
    below = table[at]
    if below == math.inf:
        return math.inf
    return float(below + (table[at + 1] - below) * ((size_bytes - low) / width))


class Way(NamedTuple):
    """The way of a stage transfer from one place to another.

    Attributes:
        latency_s: Seconds of an empty tensor.
        s_per_byte: Seconds per byte that a pair of devices carries.
        part: Part of the tensor that each pair carries.
        channels: Channels it occupies meanwhile; numbers that the ways of one draft share.
    """

    latency_s: float
    s_per_byte: float
    part: float
    channels: tuple[int, ...]


class ClusterTraffic:
    """Times of communication on one cluster, computed once for each set of groups.

    Attributes:
        tables: float64 [T, G], seconds at `SIZES`, by the numbers of `collective`; row 0 is nothing to do. Grows.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.links = cluster, cluster.links
        self.tables = np.zeros((8, len(SIZES)))
        self._numbers: dict[tuple[str, Groups], int] = {}
        self._unlike: dict[tuple[Groups, bool], tuple[Floats, list[tuple[int, ...]]]] = {}  # bytes, and a group of each sort
        self._exchanged: dict[Groups, tuple[float, float]] = {}
        self._distinct: dict[bytes, int] = {self.tables[0].tobytes(): 0}
        self._ranges: dict[tuple[int, int], Devices] = {}
        self._met: dict[object, bool] = {}
        self._pairs: dict[object, tuple[float, float, Ints]] = {}
        pairs = zip(cluster.kinds, cluster.hosts, strict=True)
        self._accelerators = Counter(host for kind, host in pairs if not kind.host_processor)

    def collective(self, kind: str, groups: Groups) -> int:
        """Returns the number of the table of a collective that runs in all groups at once; 0 for groups of one device."""
        if groups.size < 2:
            return 0
        groups = self._representing(groups, kind != "all_to_all")
        if (kind, groups) not in self._numbers:
            key = groups, kind == "all_to_all"
            if key not in self._unlike:
                members = groups.members
                unlike = members[np.unique(self.links.sorts(members), return_index=True)[1]]
                self._unlike[key] = (
                    SIZES * contention(self.links, members, groups.times > 1, key[1]),
                    list(map(tuple, unlike.tolist())),
                )
            sizes, own = self._unlike[key]
            table = np.max([collective_s(self.links, kind, group, sizes, groups.times) for group in own], axis=0)
            number = self._numbers[kind, groups] = self._distinct.setdefault(table.tobytes(), len(self._distinct))
            if number == len(self.tables):
                self.tables = np.concatenate([self.tables, np.zeros_like(self.tables)])
            self.tables[number] = table
        return self._numbers[kind, groups]

    def _run(self, devices: tuple[int, ...]) -> AlikeRun | None:
        """Returns the run of consecutive devices that begins a period with the first; None where there is none."""
        consecutive = isinstance(devices, Devices) and devices.consecutive
        return self.links.run(devices[0], devices[-1]) if consecutive else None

    def _range(self, first: int, count: int) -> Devices:
        if (first, count) not in self._ranges:
            self._ranges[first, count] = Devices(range(first, first + count))
        return self._ranges[first, count]

    def _representing(self, groups: Groups, long: bool) -> Groups:
        """Returns groups that take as long: the first of a run; where those are `long`, the first periods of each."""
        run, span = self._run(groups.devices), groups.size * groups.stride
        if run is None:
            return groups
        count = min(math.lcm(span, run.period), len(groups.devices))
        times = repeats(run, span, groups.stride) if long and span == count else 1
        return groups._replace(devices=self._range(run.start, count // times), size=groups.size // times, times=times)

    def collectives(self, kinds: Iterable[str], groups: Groups) -> list[int]:
        """Returns `collective` of several kinds in the same groups."""
        return [self.collective(kind, groups) for kind in kinds]

    def table(self, kind: str, groups: Groups) -> Floats:
        """Returns the table of `collective`, float64 [G]."""
        number = self.collective(kind, groups)
        return self.tables[number]

    def tables_inside(self, place: Mesh, joins_replicas: bool) -> tuple[int, ...]:
        """Returns the number of the table of each of `COLLECTIVE_KINDS` in the groups that move tensors inside blocks."""
        kinds = COLLECTIVE_KINDS if joins_replicas else COLLECTIVE_KINDS[:STATISTICS]
        numbers = [self.collective(name, tensor_groups(place, kind)) for kind, name in enumerate(kinds)]
        return *numbers, *[0] * (len(COLLECTIVE_KINDS) - len(kinds))

    def meets(self, place: Mesh) -> tuple[bool, bool]:
        """Returns whether collectives inside blocks, and sums over copies, use a channel over which weights are shared."""
        if not place.sharding:
            return False, False
        inside = [tensor_groups(place, kind) for kind in (0, CONTEXT_GATHER, EXPERT_ALL_TO_ALL)]
        shares, copies = share_groups(place), copy_groups(place)
        return self._meet(inside, shares), self._meet([copies], shares)

    def _meet(self, groups: Sequence[Groups], others: Groups) -> bool:
        key: tuple[Groups, ...] = *groups, others
        run, spans = self._run(others.devices), [own.size * own.stride for own in key]
        if run is not None:
            count = min(math.lcm(run.period, *spans), len(others.devices))
            times = repeats(run, count, math.lcm(*(own.stride for own in key)))
            if any(span != count and count // times % span for span in spans):
                times = 1
            devices = self._range(run.start, count // times)
            own_times = [times if span == count else 1 for span in spans]
            key = tuple(
                own._replace(devices=devices, size=own.size // many, times=many)
                for own, many in zip(key, own_times, strict=True)
            )
        if key not in self._met:
            *some, other = [(own.members, own.times > 1) for own in key]
            self._met[key] = meet(self.links, some, [other])
        return self._met[key]

    def moved_s(self, tables: Sequence[int], size_bytes: Floats, calls: Floats, hidden_s: Floats | None = None) -> Floats:
        """Returns float64 [W, B], seconds of collectives [W, K, B] of so many bytes in so many calls, from K tables.

        `hidden_s`, [W, B], are seconds of attention that hide as many of `RINGS`.
        """
        from rlplace.strategy.executor.kernel import moved_s

        numbers, size_bytes, calls = np.array(tables), size_bytes.copy(), calls.copy()
        found = cast(Floats, moved_s(self.tables, numbers, size_bytes, calls))
        if hidden_s is not None and hidden_s.any():
            calls[:, [kind for kind in range(calls.shape[1]) if kind not in RINGS]] = 0.0
            found -= np.minimum(hidden_s, moved_s(self.tables, numbers, size_bytes, calls))
        return found

    def ways(self, borders: Mapping[tuple[int, int], Border]) -> dict[tuple[int, int], Way]:
        """Returns the ways of stage transfers by sender and receiver, from `meshes.borders`."""
        least = {key: self._border(border) for key, border in borders.items()}
        sent = [self._sent(border.pairs, border[:2]) for border in least.values()]
        every, number = np.unique(np.concatenate([[], *(used for *_, used in sent)]), return_inverse=True)
        users = np.zeros((len(every), len(sent)), dtype=bool)  # channels that the same borders use are as good as one
        users[number, np.repeat(np.arange(len(sent)), [len(used) for *_, used in sent])] = True
        packed = np.packbits(users, axis=1)
        unlike = users[np.unique(packed, axis=0, return_index=True)[1]]
        return {
            border: Way(*sent[at][:2], borders[border].part, tuple(np.flatnonzero(unlike[:, at]).tolist()))
            for at, border in enumerate(borders)
        }

    def _border(self, border: Border) -> Border:
        """Returns a border that takes as long, and uses channels of the same places: of a period of either place."""
        if len(border.senders) != len(border.receivers):
            return border
        runs = [self._run(devices) for devices in border[:2]]
        if runs[0] is None or runs[1] is None or runs[0].period != runs[1].period:
            return border
        count = min(runs[0].period, len(border.senders))
        return Border(self._range(border.senders[0], count), self._range(border.receivers[0], count), border.part)

    def exchanged_s(self, groups: Groups, size_bytes: float) -> float:
        """Returns seconds in which all devices of each group send so many bytes to each other one of it."""
        if groups.size < 2 or size_bytes <= 0.0:
            return 0.0
        if groups not in self._exchanged:
            self._exchanged[groups] = exchange(self.links, groups.members)
        s_per_byte, latency = self._exchanged[groups]
        return latency + size_bytes * s_per_byte

    def _sent(self, pairs: Ints, key: object) -> tuple[float, float, Ints]:
        """Returns latency, seconds per byte of each pair, and channels, when all pairs, int64 [2, N], send at once."""
        if key not in self._pairs:
            sent = sent_at_once(self.links, *pairs)
            used = np.unique(sent.held)
            self._pairs[key] = float(sent.latency_s.max()), sent.s_per_byte, used[used >= 0]
        return self._pairs[key]

    def slowest_host_bytes_per_s(self, devices: tuple[int, ...]) -> tuple[float, float]:
        """Returns the least of `host_bytes_per_s` and of `host_memory_bytes_per_s` over devices."""
        unlike = np.unique(self._host_sort[array_of(devices)], return_index=True)[1].tolist()
        own = [devices[number] for number in unlike]
        return min(map(self.host_bytes_per_s, own)), min(map(self.host_memory_bytes_per_s, own))

    @cached_property
    def _host_sort(self) -> Ints:
        """int64 [D], equal for devices of one kind on hosts with as many accelerators."""
        accelerators = [self._accelerators[host] for host in range(max(self.cluster.hosts) + 1)]
        made_of = np.fromiter(map(id, self.cluster.kinds), dtype=np.int64)
        looks = np.stack([made_of, np.array(accelerators)[list(self.cluster.hosts)]], axis=1)
        return np.unique(looks, axis=0, return_inverse=True)[1].ravel().astype(np.int64)

    def host_bytes_per_s(self, device: int) -> float:
        """Returns the rate of one direction between a device and its host when all devices of the host copy."""
        kind = self.cluster.kinds[device]
        if kind.host_processor:
            return HOST_MEMORY_BYTES_PER_S
        return min(PCIE_BYTES_PER_S[kind.pcie_generation] / kind.pcie_per_switch, self.host_memory_bytes_per_s(device))

    def host_memory_bytes_per_s(self, device: int) -> float:
        """Returns a device's share of its host's memory bandwidth, the rate of updates in the host."""
        accelerators = max(self._accelerators[self.cluster.hosts[device]], 1)
        return HOST_MEMORY_BYTES_PER_S * -(-accelerators // DEVICES_PER_SOCKET) / accelerators


def tie_part(costs: BlockCosts, tie_blocks: Sequence[int], place: Mesh) -> float:
    """Returns the part of a tied weight on one device of a tensor group: that of its smallest block, usually the weight."""
    whole, cut = costs.held().weight_bytes, costs.held(*place.state).weight_bytes
    block = min(tie_blocks, key=lambda number: (whole[number], number))
    return float(cut[block]) / float(whole[block]) if whole[block] > 0 else 1.0


def tie_exchanges(draft: Draft, costs: BlockCosts, traffic: ClusterTraffic) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Yields seconds in which the places of a tied weight sum its gradients, and these places."""
    for tie in costs.ties:
        involved = places_of(draft, tie.blocks)
        if len(involved) > 1:
            places = [draft.places[place] for place in involved]
            item = costs.held(*places[0].state).gradient_item
            part = max(tie_part(costs, tie.blocks, place) / share_degree(place) for place in places)
            table = traffic.table("all_reduce", tie_groups(places))
            yield table_s(table, tie.gradient_bytes * item * part), involved
