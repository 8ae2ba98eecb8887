"""Which groups of devices lie alike on a cluster, so that communication takes the same in them."""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from itertools import chain

import numpy as np

from rlplace.cluster import Cluster
from rlplace.strategy.meshes import Groups


class Seats:
    """Where the devices of a cluster sit, as far as communication can tell."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._links = cluster, cluster.links

    def alike(self, groups: Groups) -> tuple[object, ...]:
        """Equal for groups that lie alike: hosts that are alike, and devices that could change places, count as they appear."""
        numbers: dict[int, int] = {}
        found: dict[int, tuple[int, int, int]] = {}
        turns: dict[tuple[int, int], int] = {}
        seats, hosts = self._seats, self._cluster.hosts
        for group in groups:
            for device in group:
                if device not in found:
                    here = numbers.setdefault(hosts[device], len(numbers)), seats[device]
                    turns[here] = turn = turns.get(here, -1) + 1
                    found[device] = *here, turn
        return tuple([tuple([found[device] for device in group]) for group in groups])

    @cached_property
    def _seats(self) -> list[int]:
        """A number that devices have in common which are in the same place of hosts that are alike, or may exchange theirs.

        Hosts are alike in kinds, links inside, fabrics, and links to others.
        """
        links, hosts = self._links, np.array(self._cluster.hosts)
        kinds: dict[tuple[object, ...], list[int]] = {}
        seats = [0] * len(hosts)
        joined = [set(fabric.devices) for fabric in links.fabrics]
        count = 0
        for host in dict.fromkeys(self._cluster.hosts):
            inside = np.flatnonzero(hosts == host)
            outside = hosts != host
            look: list[object] = [tuple(self._cluster.kinds[device].name for device in inside)]
            for matrix in (links.bandwidth_bytes_per_s, links.latency_s):
                look += [matrix[np.ix_(inside, inside)].tobytes()]
                look += [np.unique(part[:, outside]).tobytes() for part in (matrix[inside], matrix.T[inside])]
            members = set(inside.tolist())
            for fabric, devices in zip(links.fabrics, joined, strict=True):
                if members & devices:
                    own = tuple(int(device - inside[0]) for device in fabric.devices)
                    look.append((own if devices <= members else fabric.devices, fabric.curves, len(fabric.links)))
            own_devices = inside.tolist()
            if tuple(look) not in kinds:
                classes: list[int] = []
                for position, device in enumerate(own_devices):
                    first = next((p for p in range(position) if self._may_exchange(own_devices[p], device)), position)
                    classes.append(count + first)
                kinds[tuple(look)] = classes
                count += len(own_devices)
            for device, seat in zip(own_devices, kinds[tuple(look)], strict=True):
                seats[device] = seat
        return seats

    def _may_exchange(self, one: int, other: int) -> bool:
        """Whether nothing changes when two devices of a host exchange their places: kinds, links, fabrics, shared channels."""
        links = self._links
        swapped = np.arange(len(self._cluster.hosts))
        swapped[[one, other]] = other, one
        for matrix in (links.bandwidth_bytes_per_s, links.latency_s):
            if not (matrix[one] == matrix[other][swapped]).all() or not (matrix[:, one] == matrix[swapped, other]).all():
                return False
        if self._cluster.kinds[one].name != self._cluster.kinds[other].name:
            return False
        if any((one in fabric.devices) != (other in fabric.devices) or fabric.links for fabric in links.fabrics):
            return False
        channels, partner = links.effective_channels, swapped.tolist()
        pairs = {pair for end in range(len(partner)) for d in (one, other) for pair in ((d, end), (end, d))}
        becomes: dict[int, int] = {}
        used: Counter[int] = Counter()
        for i, j in pairs:
            here, there = channels[i][j], channels[partner[i]][partner[j]]
            if len(here) != len(there) or any(becomes.setdefault(a, b) != b for a, b in zip(here, there, strict=True)):
                return False
            used.update(here)
        return all(new == channel or used[channel] == self._used[channel] for channel, new in becomes.items())

    @cached_property
    def _used(self) -> list[int]:
        """How many pairs of devices use each channel."""
        every = chain.from_iterable(chain.from_iterable(self._links.effective_channels))
        return np.bincount(np.fromiter(every, np.int64)).tolist()
