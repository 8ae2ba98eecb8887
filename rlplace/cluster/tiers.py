"""Tiers of a cluster beyond its hosts: racks, pods and regions, whose groups of hosts share their links to the rest.

A transfer between two groups of a tier crosses the uplink of either, which all hosts of the group share, and one to a host
outside of all groups that of one. Groups nest: a region is made of whole pods. `Tiers` says for every host in which groups it
lies; `rlplace.cluster.interconnect` makes their uplinks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import numpy as np
from msgspec import Meta
from msgspec.structs import replace
from numpy.typing import NDArray

from rlplace.errors import InputError
from rlplace.limits import DEVICES
from rlplace.records import Record, Text

_TIER = re.compile(r"([a-z][a-z0-9_-]*)=(\d{1,6})@(\d{1,9}(?:\.\d+)?)([gt])(?:@(\d{1,6}(?:\.\d+)?)(us|ms))?")
MAX_TIERS = 64
"""Tiers of a cluster, with one entry for groups that are alike."""

MAX_NESTED = 3
"""Groups around one host, such as rack, pod and region."""

_UNITS = {"g": 1e9, "t": 1e12, "us": 1e-6, "ms": 1e-3}
_Hosts = Annotated[int, Meta(ge=1, le=DEVICES)]


class Tier(Record, frozen=True):
    """Groups of consecutive hosts with an uplink each.

    Attributes:
        name: ``"pod"``, ``"region"`` and so on; tiers of one name are one to a reader.
        hosts: Hosts of a group.
        bytes_per_s: Usable rate of a group's uplink, in each direction.
        latency_s: Added between two groups, half of it at either end.
        host: Number of the first host of the first group.
        count: Number of groups; None: as many as the cluster has hosts for.
    """

    name: Text
    hosts: _Hosts
    bytes_per_s: Annotated[float, Meta(ge=1e-3, le=1e18)]
    latency_s: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    host: Annotated[int, Meta(ge=0, lt=DEVICES)] = 0
    count: _Hosts | None = None


def parse_tier(option: str, num_hosts: int, efficiency: float) -> Tier:
    """Parses ``pod=64@1600g``, or with a latency ``region=1024@1.6t@20ms``.

    Args:
        option: Hosts of a group, and the line rate of its uplink.
        num_hosts: So many hosts are divided.
        efficiency: Usable fraction of the line rate.

    Raises:
        InputError: The text has another form, or the hosts do not divide.
    """
    match = _TIER.fullmatch(option)
    if match is None or not (hosts := int(match[2])) or not (rate := float(match[3]) * _UNITS[match[4]]):
        raise InputError(f"cluster: tier {option[:60]!r} is not of the form pod=8@1600g or region=64@1.6t@20ms")
    if num_hosts % hosts:
        raise InputError(f"cluster: tier {option[:60]!r}: {num_hosts} hosts do not divide into groups of {hosts}")
    latency_s = float(match[5]) * _UNITS[match[6]] if match[5] else 0.0
    return Tier(match[1], hosts, rate / 8 * efficiency, latency_s, 0, num_hosts // hosts)


def common_depth(one: NDArray[np.int64], other: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns in how many groups the hosts of two `Tiers.chain`, int64 [..., L], both lie, int64 [...]."""
    return ((one == other) & (one >= 0)).cumprod(axis=-1).sum(axis=-1)


class Tiers(NamedTuple):
    """Tiers of H hosts in G groups, at most L around one host.

    Attributes:
        table: As they were given, inner ones first.
        chain: int64 [H, L], groups of each host, outermost first; -1 past the last.
        of: int64 [G], tier of each group.
    """

    table: tuple[Tier, ...]
    chain: NDArray[np.int64]
    of: NDArray[np.int64]


def tiers_of(table: Sequence[Tier], num_hosts: int) -> Tiers:
    """Returns the groups of every host.

    Raises:
        InputError: Groups have other hosts than the cluster, cut each other, or stand in the wrong order.
    """
    if len(table) > MAX_TIERS:
        raise InputError(f"tier: {len(table)} tiers; a cluster has at most {MAX_TIERS}, a table for groups that are alike")
    full: list[Tier] = []
    inside = np.full((len(table), num_hosts), -1)  # groups of each tier, by host
    groups = 0
    for number, tier in enumerate(table):
        where = f"tier[{number}] ({tier.name[:40]})"
        count = (num_hosts - tier.host) // tier.hosts if tier.count is None else tier.count
        end = tier.host + count * tier.hosts
        if not tier.host < end <= num_hosts or (tier.count is None and end < num_hosts):
            raise InputError(
                f"{where}: hosts from {tier.host} on in groups of {tier.hosts} do not fit the cluster, which has {num_hosts} "
                "hosts; give the number of groups as count, or other hosts"
            )
        inside[number, tier.host : end] = groups + np.arange(count).repeat(tier.hosts)
        for other, inner in enumerate(full):
            _check_nested(inner, tier, inside[other], inside[number], where)
        full.append(replace(tier, count=count))
        groups += count
    outermost_first = np.argsort(inside[::-1] < 0, axis=0, kind="stable")
    chain = np.take_along_axis(inside[::-1], outermost_first, axis=0)
    depth = int((inside >= 0).sum(axis=0).max(initial=0))
    if depth > MAX_NESTED:
        host = int((inside >= 0).sum(axis=0).argmax())
        raise InputError(
            f"tier: host {host} is in {depth} groups inside each other, the limit is {MAX_NESTED}; leave a wide one out"
        )
    of = np.repeat(np.arange(len(full)), [tier.count or 0 for tier in full])
    return Tiers(tuple(full), np.ascontiguousarray(chain[:depth].T), of)


def _check_nested(inner: Tier, outer: Tier, own: NDArray[np.int64], other: NDArray[np.int64], where: str) -> None:
    """Refuses an earlier tier whose groups do not lie whole inside or outside of those of a later one."""
    both = (own >= 0) & (other >= 0)
    if not both.any():
        return
    if inner.name == outer.name:
        raise InputError(f"{where}: host {int(both.argmax())} is in two tiers of this name")
    if inner.hosts >= outer.hosts:
        raise InputError(
            f"{where}: groups of {outer.hosts} hosts around {inner.name[:40]} groups of {inner.hosts}; list small groups first"
        )
    cut = (own[:-1] == own[1:]) & (own[1:] >= 0) & (other[:-1] != other[1:])
    if cut.any():
        host = int(cut.argmax()) + 1
        raise InputError(f"{where}: a group begins or ends at host {host}, inside a {inner.name[:40]}; groups hold whole ones")
