"""Time of collectives over a problem's links: all-reduce, all-gather, reduce-scatter, broadcast, all-to-all.

The cheapest of the algorithms that the devices' links allow:

* Inside one fabric: its measured or fitted curve, between measured group sizes a mean of the neighbours at equal bus volume.
* Over any links: a ring, ``alpha + rounds (n-1)/n S/B`` with S the whole tensor and two rounds for an all-reduce, one for
  all-gather and reduce-scatter; a broadcast passes S once through the ring. For all-reduce and broadcast also a tree, whose
  latency grows with log2(n) and whose bandwidth is half. All-to-all takes what its busiest channel takes. Sources: nccl-tests,
  doc/PERFORMANCE.md; NCCL, src/graph/tuning.cc.
* Across fabrics of equal shares m: one ring a rail (the r-th devices of all fabrics), pipelined with the fabrics, at the
  smaller of m rails and the fabric; or in phases: reduce-scatter inside, all-reduce of 1/m on every rail, all-gather inside.

B is what the slowest channel leaves when every hop of the ring is busy at once, so a network card or a bus that several hops
share counts as often as it is used. Times never fall as messages grow. What is computed once for a set of devices is kept with
the links, so that hundreds of calls with other sizes cost little.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import overload
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InputError, show, unknown_name
from rlplace.problem import Links
from rlplace.problem.fabric import COLLECTIVES, Curve, Fabric, bus_factor
from rlplace.problem.rings import busiest_channel_s_per_byte, hops_of, ring_order, rounds_of

COMPUTE_SLOWDOWN = 1.189
"""Factor on the time of compute that overlaps with a collective: 18.9 % on average, at most 40 %, over A100, H100, MI210 and
MI250 with GPT and LLaMA models (arXiv 2507.03114). Collectives take SMs and memory bandwidth from the kernels beside them."""

COPY_SLOWDOWN = 1.0
"""The same for point-to-point copies: copy engines move them, the kernels beside them keep their SMs."""

HOP_LATENCY_SHARE = 1 / 3
"""What one further hop of a ring or tree adds, as a share of the latency of a single transfer, which holds the launch as well:
NCCL charges 3.4 us a hop over NVLink and 5.7 us over PCIe (tuning.cc, Simple protocol), a copy with its launch 10 and 15."""


@dataclass(frozen=True)
class _Term:
    """``latency + slope * size * scale`` by stretches of ``size * scale``."""

    starts: NDArray[np.float64]
    latency_s: NDArray[np.float64]
    slope: NDArray[np.float64]
    scale: float = 1.0
    weight: float = 1.0

    def seconds(self, size: NDArray[np.float64]) -> NDArray[np.float64]:
        scaled = size * self.scale
        at = np.searchsorted(self.starts, scaled, side="right") - 1
        return self.weight * (self.latency_s[at] + self.slope[at] * scaled)


_Algorithm = tuple[_Term, ...]  # times of its phases add up
_KEPT: WeakKeyDictionary[Links, dict[tuple[str, tuple[int, ...]], tuple[_Algorithm, ...]]] = WeakKeyDictionary()


@overload
def collective_s(links: Links, kind: str, devices: Sequence[int], size_bytes: float) -> float: ...
@overload
def collective_s(links: Links, kind: str, devices: Sequence[int], size_bytes: NDArray) -> NDArray[np.float64]: ...
def collective_s(links: Links, kind: str, devices: Sequence[int], size_bytes: float | NDArray) -> float | NDArray[np.float64]:
    """Seconds that a collective takes when its channels are free.

    Args:
        links: Links of D devices.
        kind: ``"all_reduce"``, ``"all_gather"``, ``"reduce_scatter"``, ``"broadcast"`` or ``"all_to_all"``.
        devices: The devices that take part, distinct. The first is the root of a broadcast.
        size_bytes: The whole tensor: what each device holds before an all-reduce, reduce-scatter or all-to-all, and after an
            all-gather. A number or an array.

    Returns:
        Of the shape of `size_bytes`; 0 for one device, inf where no links join the devices.

    Raises:
        InputError: An unknown kind, a device that does not exist or appears twice, or a negative size.
    """
    if kind not in COLLECTIVES:
        raise unknown_name("collective", kind, COLLECTIVES)
    size = np.asarray(size_bytes, dtype=np.float64)
    if not (size >= 0).all():
        raise InputError(f"collective: size {show(size_bytes)} is negative or not a number")
    group = _checked(links, devices)
    if len(group) == 1:
        seconds = np.zeros(size.shape)
    else:
        choices = _algorithms(links, kind, group)
        seconds = np.full(size.shape, np.inf)
        for terms in choices:
            seconds = np.minimum(seconds, sum(term.seconds(size) for term in terms))
    return seconds if isinstance(size_bytes, np.ndarray) else float(seconds)


def collective_channels(links: Links, devices: Sequence[int]) -> tuple[int, ...]:
    """Channels that a collective among these devices holds while it runs, in increasing order.

    Inside a fabric those of every pair that it joins; without one, and between fabrics, those of the ring's hops.
    """
    group = _checked(links, devices)
    channels = links.effective_channels
    pairs: set[tuple[int, int]] = set()
    parts = _parts(links, group)
    for fabric, members in parts:
        if fabric is not None:
            direct = {(i, j) for i, j, _ in fabric.links} | {(j, i) for i, j, _ in fabric.links}
            pairs |= {(i, j) for i in members for j in members if i != j and (not direct or (i, j) in direct)}
    if len(parts) > 1 or parts[0][0] is None:
        rails = _rails(parts)
        pairs |= {hop for ring in rails for hop in hops_of(ring)} if rails else set(hops_of(ring_order(links, group)))
    return tuple(sorted({c for i, j in pairs for c in channels[i][j]}))


def _checked(links: Links, devices: Sequence[int]) -> tuple[int, ...]:
    group = tuple(int(d) for d in devices)
    count = len(links.latency_s)
    if not group or len(set(group)) < len(group) or not all(0 <= d < count for d in group):
        raise InputError(f"collective: devices {show(list(devices))} are not distinct numbers in 0..{count - 1}")
    return group


def _algorithms(links: Links, kind: str, group: tuple[int, ...]) -> tuple[_Algorithm, ...]:
    kept = _KEPT.setdefault(links, {})
    found = kept.get((kind, group))
    if found is None:
        parts = _parts(links, group)
        inside = None if len(parts) > 1 or parts[0][0] is None else _inside(parts[0][0], kind, group)
        found = (inside,) if inside is not None else (*_over_links(links, kind, group), *_across(links, kind, parts))
        kept[kind, group] = found
    return found


def _parts(links: Links, group: tuple[int, ...]) -> list[tuple[Fabric | None, tuple[int, ...]]]:
    """The group, cut into the shares of fabrics that can serve them; devices of no fabric stand alone.

    The smallest fabric that holds the whole group serves it, else each takes as many as it can.
    """
    left = list(group)
    parts: list[tuple[Fabric | None, tuple[int, ...]]] = []
    while left:
        best: tuple[tuple[int, int], Fabric, tuple[int, ...]] | None = None
        for fabric in links.fabrics:
            joined = set(fabric.devices)
            members = tuple(d for d in left if d in joined)
            if len(members) > 1 and _width(fabric, members) > 0 and _serves(fabric, len(members)):
                rank = (-len(members), len(fabric.devices))
                if best is None or rank < best[0]:
                    best = rank, fabric, members
        if best is None:
            parts += [(None, (device,)) for device in left] if parts else [(None, tuple(left))]
            break
        parts.append((best[1], best[2]))
        left = [d for d in left if d not in best[2]]
    return parts


def _serves(fabric: Fabric, group_size: int) -> bool:
    sizes = [curve.group_size for curve in fabric.curves if curve.kind == "all_reduce"]
    return bool(sizes) and min(sizes) <= group_size <= max(sizes)


def _width(fabric: Fabric, members: tuple[int, ...]) -> float:
    """Bandwidth of these devices, relative to as many of the fabric's first ones, which its curves are of; 0 where unjoined.

    Rings are as many as the device with the fewest links can take part in: on V100 cube meshes that gives 1, 4 and 6 links
    for the first 2, 4 and 8 devices, where measured bus bandwidths are 1.0, 3.8 and 6.0 times a link.
    """
    if not fabric.links:
        return 1.0
    return _degree(fabric, members) / (_degree(fabric, fabric.devices[: len(members)]) or math.inf)


@lru_cache(maxsize=4096)
def _degree(fabric: Fabric, members: tuple[int, ...]) -> float:
    rate = dict.fromkeys(members, 0.0)
    peers: dict[int, list[int]] = {d: [] for d in members}
    for i, j, bandwidth in fabric.links:
        if i in rate and j in rate:
            rate[i] += bandwidth
            rate[j] += bandwidth
            peers[i].append(j)
            peers[j].append(i)
    reached, stack = {members[0]}, [members[0]]
    while stack:
        for peer in peers[stack.pop()]:
            if peer not in reached:
                reached.add(peer)
                stack.append(peer)
    return min(rate.values()) if len(reached) == len(members) else 0.0


def _inside(fabric: Fabric, kind: str, members: tuple[int, ...], weight: float = 1.0) -> _Algorithm:
    """The fabric's curve of this collective, or that of a like one at equal bus volume."""
    size = len(members)
    wanted = {"all_reduce": ("all_reduce",), "all_gather": ("all_gather", "reduce_scatter", "all_reduce")}
    order = wanted.get(kind, (kind, "reduce_scatter", "all_gather", "all_reduce"))
    for name in order:
        curves = sorted((c for c in fabric.curves if c.kind == name), key=lambda c: c.group_size)
        if curves and curves[0].group_size <= size <= curves[-1].group_size:
            break
    low = max((c for c in curves if c.group_size <= size), key=lambda c: c.group_size)
    high = min((c for c in curves if c.group_size >= size), key=lambda c: c.group_size)
    volume = bus_factor(kind, size) / _width(fabric, members)
    if low is high:
        return (_term(low, volume, weight),)
    part = (size - low.group_size) / (high.group_size - low.group_size)
    return (_term(low, volume, weight * (1 - part)), _term(high, volume, weight * part))


def _term(curve: Curve, volume: float, weight: float) -> _Term:
    starts = np.array([piece.from_bytes for piece in curve.pieces])
    latency = np.array([piece.latency_s for piece in curve.pieces])
    scale = volume / bus_factor(curve.kind, curve.group_size)
    return _Term(starts, latency, curve.seconds_per_byte, scale, weight)


def _line(latency_s: float, s_per_byte: float) -> _Term:
    return _Term(np.zeros(1), np.array([latency_s]), np.array([s_per_byte]))


def _over_links(links: Links, kind: str, group: tuple[int, ...]) -> list[_Algorithm]:
    """Ring, and tree where it can win, over the pair matrices."""
    size = len(group)
    if kind == "all_to_all":
        pairs = [(i, j) for i in group for j in group if i != j]
        s_per_byte = busiest_channel_s_per_byte(links, pairs) / size
        launch = max(float(links.latency_s[i, j]) for i, j in pairs)
        return [(_line(launch * (1 + HOP_LATENCY_SHARE * (size - 2)), s_per_byte),)] if s_per_byte < math.inf else []
    hops = hops_of(ring_order(links, group))
    s_per_byte = busiest_channel_s_per_byte(links, hops)
    if s_per_byte == math.inf:
        return []
    launch = max(float(links.latency_s[i, j]) for i, j in hops)
    hop = HOP_LATENCY_SHARE * float(np.mean([links.latency_s[i, j] for i, j in hops]))
    steps = rounds_of(kind) * (size - 1)
    found = [(_line(launch + (steps - 1) * hop, bus_factor(kind, size) * s_per_byte),)]
    if kind in ("all_reduce", "broadcast"):
        depth = rounds_of(kind) * math.ceil(math.log2(size))
        volume = 2 * bus_factor("broadcast", size) * rounds_of(kind)
        found.append((_line(launch + (depth - 1) * hop, volume * s_per_byte),))
    return found


def _rails(parts: list[tuple[Fabric | None, tuple[int, ...]]]) -> list[tuple[int, ...]]:
    """Rings across fabrics: the first devices of all, the second ones, ...; empty unless all shares are equal."""
    if len(parts) < 2 or len({len(members) for _, members in parts}) > 1:
        return []
    return list(zip(*(members for _, members in parts), strict=True))


def _across(links: Links, kind: str, parts: list[tuple[Fabric | None, tuple[int, ...]]]) -> list[_Algorithm]:
    """Pipelined rails, and phases inside and across, where every fabric holds an equal share of several devices."""
    rails = _rails(parts)
    share = len(parts[0][1])
    if not rails or share < 2 or kind == "all_to_all":
        return []
    hosts = len(parts)
    hops = [hop for ring in rails for hop in hops_of(ring)]
    s_per_byte = busiest_channel_s_per_byte(links, hops)
    if s_per_byte == math.inf:
        return []
    launch = max(float(links.latency_s[i, j]) for i, j in hops)
    hop = HOP_LATENCY_SHARE * launch
    steps = rounds_of(kind) * (hosts - 1)
    rail = _line(launch + (steps - 1) * hop, bus_factor(kind, hosts) / share * s_per_byte)
    pipelined = _pipelined(kind, parts, rail, hosts * share, s_per_byte / share)
    if kind == "broadcast":
        return [pipelined]
    inner = ("reduce_scatter", "all_gather") if kind == "all_reduce" else (kind,)
    phases: list[_Term] = [rail]
    for name in inner:  # the fabrics work side by side; the slowest by its largest message counts
        choices = [_inside(fabric, name, members) for fabric, members in parts if fabric is not None]
        probe = np.array([float(1 << 30)])
        phases += max(choices, key=lambda terms: float(sum(term.seconds(probe) for term in terms)[0]))
    return [tuple(phases), pipelined]


def _pipelined(
    kind: str, parts: list[tuple[Fabric | None, tuple[int, ...]]], rail: _Term, size: int, rail_s_per_byte: float
) -> _Algorithm:
    """One ring over all devices and rails: the latencies of both levels, the bandwidth of the slower one."""
    latency = float(rail.latency_s[0])
    slowest = rail_s_per_byte
    probe = np.array([0.0, float(1 << 30), float(1 << 31)])
    for fabric, members in parts:
        if fabric is not None:
            times = sum(term.seconds(probe) for term in _inside(fabric, kind, members))
            slowest = max(slowest, float(times[2] - times[1]) / float(1 << 30) / bus_factor(kind, len(members)))
            latency = max(latency, float(rail.latency_s[0] + times[0]))
    return (_line(latency, bus_factor(kind, size) * slowest),)
