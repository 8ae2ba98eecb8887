"""Time of collectives over a problem's links: all-reduce, all-gather, reduce-scatter, broadcast, all-to-all.

The cheapest of the algorithms that the devices' links allow:

* Inside one fabric: its measured or fitted curves (`rlplace.cluster.fabric`).
* Over any links: a ring, ``alpha + rounds (n-1)/n S/B`` with S the whole tensor and two rounds for an all-reduce, one for
  all-gather and reduce-scatter; a broadcast passes S once through the ring. For all-reduce and broadcast also a tree, whose
  latency grows with log2(n) and whose bandwidth is half. All-to-all takes as long as its busiest channel. Sources: nccl-tests,
  doc/PERFORMANCE.md; NCCL, src/graph/tuning.cc.
* Across fabrics of equal shares m: one ring a rail (the r-th devices of all fabrics), pipelined with the fabrics, at the
  smaller of m rails and the fabric; or in phases: reduce-scatter inside, all-reduce of 1/m on every rail, all-gather inside.

B is the rate of the slowest channel when every hop of the ring is busy at once, so a network card or a bus that several hops
share counts as often as it is used. Times never fall as messages grow. Results for a set of devices are cached with
the links, so that hundreds of calls with other sizes cost little.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlplace.cluster.fabric import COLLECTIVES, Fabric, Phase, bus_factor, inside, line, phase_s, serves
from rlplace.cluster.links import AlikeRun, Wires
from rlplace.cluster.rings import FOLLOWED_DEVICES, Ints, exchange, hops_of, ring_of, sent_at_once
from rlplace.errors import InputError, show, unknown_name
from rlplace.memoized import memoized

COMPUTE_SLOWDOWN = 1.189
"""Factor on the time of compute that overlaps with a collective: 18.9 % on average, at most 40 %, over A100, H100, MI210 and
MI250 with GPT and LLaMA models (arXiv 2507.03114). Collectives take SMs and memory bandwidth from the kernels beside them;
point-to-point copies run on copy engines and slow nothing down."""

HOP_LATENCY_SHARE = 1 / 3
"""Latency of one further hop of a ring or tree, as a share of the latency of a single transfer, which holds the launch as well:
NCCL charges 3.4 us a hop over NVLink and 5.7 us over PCIe (tuning.cc, Simple protocol), a copy with its launch 10 and 15."""


_LEAST_PERIODS = 3  # periods of a long group that have hops of every sort

_LARGE = float(1 << 30)  # bytes: the message size at which the slowest of several fabrics counts
_Algorithm = tuple[Phase, ...]  # times of its phases add up
_Share = tuple[Fabric | None, tuple[int, ...]]  # a fabric with those of a group's devices that it serves


@overload
def collective_s(links: Wires, kind: str, devices: Sequence[int], size_bytes: float, times: int = 1) -> float: ...
@overload
def collective_s(
    links: Wires, kind: str, devices: Sequence[int], size_bytes: NDArray, times: int = 1
) -> NDArray[np.float64]: ...
def collective_s(
    links: Wires, kind: str, devices: Sequence[int], size_bytes: float | NDArray, times: int = 1
) -> float | NDArray[np.float64]:
    """Returns seconds that a collective takes when its channels are free.

    Args:
        links: Links of D devices.
        kind: ``"all_reduce"``, ``"all_gather"``, ``"reduce_scatter"``, ``"broadcast"`` or ``"all_to_all"``.
        devices: The devices that take part, distinct. The first is the root of a broadcast.
        size_bytes: The whole tensor: what each device holds before an all-reduce, reduce-scatter or all-to-all, and after an
            all-gather. A number or an array.
        times: Above 1, these devices are the first of a group of so many times as many that `repeats`; not for an all-to-all.

    Returns:
        Seconds, in the shape of `size_bytes`; 0 for one device, inf where no links join the devices.

    Raises:
        InputError: An unknown kind, a device that does not exist or appears twice, or a negative size.
    """
    if kind not in COLLECTIVES:
        raise unknown_name("collective", kind, COLLECTIVES)
    size = np.asarray(size_bytes, dtype=np.float64)
    if not (size >= 0).all():
        raise InputError(f"collective: size {show(size_bytes)} is negative or not a number")
    group = _checked(links, devices)
    seconds = np.full(size.shape, 0.0 if len(group) == 1 else np.inf)
    for phases in () if len(group) == 1 else _algorithms(links, kind, group, times):
        seconds = np.minimum(seconds, sum(phase_s(phase, size) for phase in phases))
    return seconds if isinstance(size_bytes, np.ndarray) else float(seconds)


def repeats(run: AlikeRun, devices: int, stride: int) -> int:
    """Returns how often the devices of a long group repeat in a run, so that the first ones tell what all take; 1: they do not.

    A ring in the given order enters and leaves all periods of hosts alike; three of them have hops of every sort.

    Args:
        run: Links of the devices, the first of which begins a period.
        devices: From the first to the last of the group, its stride included.
        stride: Between devices of the group.
    """
    period = math.lcm(run.period, stride)
    count, rest = divmod(devices, period)
    if rest or devices // stride <= FOLLOWED_DEVICES:
        return 1
    kept = (own for own in range(_LEAST_PERIODS, 3 * _LEAST_PERIODS) if count % own == 0)
    return next((count // own for own in kept if (count - own) * period % run.lanes == 0), 1)


def contention(links: Wires, groups: ArrayLike, as_given: bool = False, exchanges: bool = False) -> float:
    """Returns factor on the bytes that the channels of a collective carry when it runs in all these groups at once.

    1.0 where no two groups share a channel. A network card through which the rings of four groups pass carries four times the
    bytes of one. Channels inside a fabric belong to single devices, so that its groups do not slow each other.

    Args:
        links: Links of D devices.
        groups: int64 [G, n], device numbers of groups of one size, each device in at most one of them.
        as_given: Whether rings have the given order, whatever the links.
        exchanges: The collective is an all-to-all, no ring.

    Returns:
        The busiest channel's seconds per byte with all groups, over the largest that a group alone has.
    """
    members = np.asarray(groups, dtype=np.int64)
    if 1 in members.shape:
        return 1.0
    if exchanges:
        most = max(exchange(links, own[:1])[0] for own in _by_sort(links, members))
        return exchange(links, members)[0] / most if 0.0 < most < math.inf else 1.0
    every, alone = [], 0.0
    for own in _by_sort(links, members):
        hops = _ring_hops(links, _checked(links, own[0]), as_given)
        alone = max(alone, sent_at_once(links, *hops).s_per_byte)
        every.append(_same_hops(own, hops))
    if not 0.0 < alone < math.inf:
        return 1.0
    return sent_at_once(links, *np.concatenate(every, axis=1)).s_per_byte / alone


def _by_sort(links: Wires, groups: Ints) -> list[Ints]:
    """Returns groups of one size, those of one sort together, int64 [G, n] each."""
    sorts = links.sorts(groups)
    return [groups[sorts == number] for number in range(int(sorts.max()) + 1)]


def _same_hops(groups: Ints, hops: Ints) -> Ints:
    """Returns the hops of groups of one sort, int64 [2, G x hops], from those of the first group."""
    order = np.argsort(groups[0])
    ends = order[np.searchsorted(groups[0], hops, sorter=order)]
    return np.stack([groups[:, ends[way]].ravel() for way in (0, 1)])


def meet(links: Wires, groups: Sequence[tuple[Ints, bool]], others: Sequence[tuple[Ints, bool]]) -> bool:
    """Returns whether rings of some groups and rings of others use a channel together: a network card, a port, a bus.

    Args:
        links: Links of D devices.
        groups: Device numbers of groups, int64 [G, n] for each size, and whether their rings have that order whatever the
            links; groups of one device use nothing.
        others: Device numbers of the other groups, likewise.
    """
    used = []
    for several in (groups, others):
        hops = [
            _same_hops(own, hops_of([ring_of(links, _checked(links, own[0]), as_given)]))
            for members, as_given in several
            if members.shape[1] > 1
            for own in _by_sort(links, members)
        ]
        if not hops:
            return False
        used.append(np.unique(links.held(*np.concatenate(hops, axis=1))))
    shared = np.intersect1d(used[0], used[1], assume_unique=True)
    return bool((shared >= 0).any())


@memoized
def _ring_hops(links: Wires, group: tuple[int, ...], as_given: bool) -> Ints:
    """Returns hops of the ring, of the rails where fabrics have equal shares; a group inside one fabric has its ring's."""
    parts = _parts(links, group)
    inside_one = len(parts) == 1 and parts[0][0] is not None
    return hops_of(_rails(parts) or [ring_of(links, group, as_given or inside_one)])


def _checked(links: Wires, devices: ArrayLike) -> tuple[int, ...]:
    group, count = np.array(devices, dtype=np.int64), links.num_devices
    ordered = np.sort(group)
    if not len(group) or ordered[0] < 0 or ordered[-1] >= count or (ordered[1:] == ordered[:-1]).any():
        raise InputError(f"collective: devices {show(group.tolist())} are not distinct numbers in 0..{count - 1}")
    return tuple(group.tolist())


@memoized
def _algorithms(links: Wires, kind: str, group: tuple[int, ...], times: int) -> tuple[_Algorithm, ...]:
    parts = _parts(links, group)
    fabric = parts[0][0] if len(parts) == 1 else None
    if fabric is not None:
        return ((inside(fabric, kind, group),),)
    return *_over_links(links, kind, group, times), *_across(links, kind, parts, times)


@memoized
def _parts(links: Wires, group: tuple[int, ...]) -> list[_Share]:
    """Returns the group, divided into the shares of fabrics that can serve them; a device of no fabric is a share of its own.

    The smallest fabric that holds the whole group serves it, else each takes as many as it can.
    """
    left, fabrics = np.array(group), links.fabrics_near(group)
    known = _known_rows(links)
    if not known or known[0][0] is not fabrics:  # large groups look at all of them
        known[:] = [(fabrics, _fabrics_of_device(links.num_devices, fabrics))]
    fabrics_of = known[0][1]
    parts: list[_Share] = []
    while len(left):
        ranked: list[tuple[int, int, int, tuple[int, ...]]] = []
        served: dict[object, bool] = {}  # by fabrics with the same curves, without direct links of pairs
        for of_device in fabrics_of:
            number = of_device[left]
            order = np.argsort(number, kind="stable")
            numbers, starts = np.unique(number[order], return_index=True)
            members, ends = tuple(left[order].tolist()), [*starts.tolist(), len(left)]
            for fabric_number, (begin, end) in zip(numbers.tolist(), pairwise(ends), strict=True):
                if fabric_number < 0 or end - begin < 2:
                    continue
                fabric, own = fabrics[fabric_number], members[begin:end]
                look = fabric_number if fabric.links else (id(fabric.curves), len(own))
                if look not in served:
                    served[look] = serves(fabric, own)
                if served[look]:
                    ranked.append((-len(own), len(fabric.devices), fabric_number, own))
        if not ranked:
            parts += [(None, (device,)) for device in left.tolist()] if parts else [(None, tuple(left.tolist()))]
            break
        taken = np.zeros(links.num_devices, dtype=bool)
        for _, _, fabric_number, own in sorted(ranked):
            if taken[list(own)].any():
                break  # the fabric has lost devices, and its rank with them
            parts.append((fabrics[fabric_number], own))
            taken[list(own)] = True
        left = left[~taken[left]]
    return parts


@memoized
def _known_rows(links: Wires) -> list[tuple[Sequence[Fabric], list[Ints]]]:
    """Returns where the fabrics that were looked at last are kept with their `_fabrics_of_device`."""
    return []


def _fabrics_of_device(count: int, fabrics: Sequence[Fabric]) -> list[Ints]:
    """Returns numbers of the fabrics that join each of so many devices, int64 [D] each, as many as one is in; -1: none."""
    rows: list[Ints] = []
    for number, fabric in enumerate(fabrics):
        devices = list(fabric.devices)
        row = next((row for row in rows if (row[devices] < 0).all()), None)
        if row is None:
            row = np.full(count, -1, dtype=np.int64)
            rows.append(row)
        row[devices] = number
    return rows


def _over_links(links: Wires, kind: str, group: tuple[int, ...], times: int) -> list[_Algorithm]:
    """Returns the ring, and the tree where it can be quicker, over the pair matrices."""
    size = times * len(group)
    if kind == "all_to_all":
        assert times == 1
        s_per_byte, launch = exchange(links, np.array([group]))
        return [(line(launch * (1 + HOP_LATENCY_SHARE * (size - 2)), s_per_byte / size),)] if s_per_byte < math.inf else []
    s_per_byte, latency, _ = sent_at_once(links, *hops_of([ring_of(links, group, times > 1)]))
    if s_per_byte == math.inf:
        return []
    launch, hop = float(latency.max()), HOP_LATENCY_SHARE * float(np.mean(latency))
    steps = rounds_of(kind) * (size - 1)
    algorithms: list[_Algorithm] = [(line(launch + (steps - 1) * hop, bus_factor(kind, size) * s_per_byte),)]
    if kind in ("all_reduce", "broadcast"):
        depth = rounds_of(kind) * math.ceil(math.log2(size))
        volume = 2 * bus_factor("broadcast", size) * rounds_of(kind)
        algorithms.append((line(launch + (depth - 1) * hop, volume * s_per_byte),))
    return algorithms


def _rails(parts: list[_Share]) -> list[tuple[int, ...]]:
    """Returns rings across fabrics: the first devices of all, the second ones, ...; none unless all shares are equal."""
    if len(parts) < 2 or len({len(members) for _, members in parts}) > 1:
        return []
    return list(zip(*(members for _, members in parts), strict=True))


def _across(links: Wires, kind: str, parts: list[_Share], times: int) -> list[_Algorithm]:
    """Returns pipelined rails, and phases inside and across, where every fabric has an equal share of several devices."""
    rails = _rails(parts)
    share = len(parts[0][1])
    if not rails or share < 2 or kind == "all_to_all":
        return []
    hosts = times * len(parts)
    s_per_byte, latency, _ = sent_at_once(links, *hops_of(rails))
    if s_per_byte == math.inf:
        return []
    launch = float(latency.max())
    hop = HOP_LATENCY_SHARE * launch
    steps = rounds_of(kind) * (hosts - 1)
    rail = line(launch + (steps - 1) * hop, bus_factor(kind, hosts) / share * s_per_byte)
    pipelined = _pipelined(kind, parts, rail, hosts * share, s_per_byte / share)
    if kind == "broadcast":
        return [pipelined]
    inner = ("reduce_scatter", "all_gather") if kind == "all_reduce" else (kind,)
    phases: list[Phase] = [rail]
    for name in inner:  # the fabrics work side by side; the slowest by its largest message counts
        choices = [inside(fabric, name, members) for fabric, members in _unlike(parts)]
        phases.append(max(choices, key=lambda phase: float(phase_s(phase, np.array(_LARGE)))))
    return [tuple(phases), pipelined]


def _unlike(parts: list[_Share]) -> list[tuple[Fabric, tuple[int, ...]]]:
    """Returns one of the shares whose fabrics have the same curves for as many devices, without direct links of pairs."""
    found: dict[object, tuple[Fabric, tuple[int, ...]]] = {}
    for number, (fabric, members) in enumerate(parts):
        if fabric is not None:
            found.setdefault(number if fabric.links else (id(fabric.curves), len(members)), (fabric, members))
    return list(found.values())


def _pipelined(kind: str, parts: list[_Share], rail: Phase, size: int, rail_s_per_byte: float) -> _Algorithm:
    """Returns one ring over all devices and rails: the latencies of both levels, the bandwidth of the slower one."""
    launch = float(rail[0].latency_s[0])
    latency, slowest = launch, rail_s_per_byte
    for fabric, members in _unlike(parts):
        empty, large, larger = phase_s(inside(fabric, kind, members), np.array([0.0, _LARGE, 2 * _LARGE])).tolist()
        slowest = max(slowest, (larger - large) / _LARGE / bus_factor(kind, len(members)))
        latency = max(latency, launch + empty)
    return (line(latency, bus_factor(kind, size) * slowest),)


def rounds_of(kind: str) -> int:
    """Returns how often a ring passes the whole tensor on: twice in an all-reduce (reduce-scatter, then all-gather)."""
    return 2 if kind == "all_reduce" else 1
