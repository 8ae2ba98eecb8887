"""Fabrics: devices joined by one interconnect, with the measured or fitted times of their collectives.

A problem carries them in its links, so that collectives can be priced where the cluster is not at hand
(`rlplace.cluster.collectives`). Problem files (JSON) and cluster files (TOML) have them as the same plain data.

`inside` extends the curves to other collectives, sets of devices and group sizes:

* Another collective takes the curve of a like one at equal bus volume: the same latency and bus bandwidth.
* Between two measured group sizes the time at equal bus volume is a geometric mean, weighted by the logarithm of the size:
  exact where latency and bandwidth are powers of the group size.
* Where only some pairs are joined (a cube mesh), bandwidth goes with the rings that can be laid, which are as many as the
  device with the fewest links can take part in: on V100 cube meshes 1, 4 and 6 links for the first 2, 4 and 8 devices, where
  measured bus bandwidths are 1.0, 3.8 and 6.0 times that of a link.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal, get_args

import numpy as np
from msgspec import Meta
from msgspec.structs import replace
from numpy.typing import NDArray

from rlplace.errors import InputError, show
from rlplace.records import Record, Whole, build, plain

CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all"]
COLLECTIVES: tuple[str, ...] = get_args(CollectiveKind)
Basis = Literal["fitted", "measured", "datasheet"]

_Rate = Annotated[float, Meta(gt=0, le=1e18)]


class Piece(Record, frozen=True, array_like=True):
    """One stretch of message sizes in which time is a straight line (alpha-beta).

    Attributes:
        from_bytes: Smallest message of the piece, which ends where the next one begins.
        latency_s: Time of the line at zero bytes; below zero where larger messages move at a lower rate.
        bus_bytes_per_s: Bus bandwidth: time grows by ``bus_factor(kind, group_size) / bus_bytes_per_s`` per byte.
    """

    from_bytes: Annotated[float, Meta(ge=0, le=1 << 62)]
    latency_s: Annotated[float, Meta(ge=-1e9, le=1e9)]
    bus_bytes_per_s: _Rate


class CollectiveCurve(Record, frozen=True):
    """Time of one collective of one group size, by message size.

    Attributes:
        group_size: Devices that take part.
        pieces: From zero bytes up; time never falls as messages grow.
        kind: One of `COLLECTIVES`.
        algorithm: For people: ``"ring"``, ``"tree"``, ``"nvls"`` (reduction in the switch) or ``""``.
    """

    written: ClassVar[tuple[str, ...]] = ("kind",)

    group_size: Annotated[int, Meta(ge=2, le=1 << 20)]
    pieces: Annotated[tuple[Piece, ...], Meta(min_length=1, max_length=64)]
    kind: CollectiveKind = "all_reduce"
    algorithm: str = ""

    def seconds(self, size_bytes: float | NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns seconds for messages of `size_bytes` (the whole tensor), of the same shape."""
        size = np.asarray(size_bytes, dtype=np.float64)
        starts = np.array([piece.from_bytes for piece in self.pieces])
        at = np.searchsorted(starts, size, side="right") - 1
        latency = np.array([piece.latency_s for piece in self.pieces])
        return latency[at] + size * self.seconds_per_byte[at]

    @property
    def seconds_per_byte(self) -> NDArray[np.float64]:
        """float64 [pieces], slope of each piece."""
        return bus_factor(self.kind, self.group_size) / np.array([piece.bus_bytes_per_s for piece in self.pieces])


class Fabric(Record, frozen=True):
    """Devices that one interconnect joins.

    Attributes:
        devices: Device numbers, in the order in which the curves' groups were taken: a curve of n devices is that of the
            first n of them.
        curves: At most one per collective and group size.
        basis: ``"fitted"`` (to measurements by others), ``"measured"`` (on this cluster) or ``"datasheet"``.
        source: Origin of the figures.
        links: Direct links (device, device, bytes per second of either direction) where the fabric does not join every pair
            equally well (a cube mesh); empty where it does (a switch).
    """

    written: ClassVar[tuple[str, ...]] = ("basis", "source")

    devices: Annotated[tuple[Whole, ...], Meta(min_length=2)]
    curves: Annotated[tuple[CollectiveCurve, ...], Meta(min_length=1, max_length=256)]
    basis: Basis = "measured"
    source: str = ""
    links: tuple[tuple[Whole, Whole, _Rate], ...] = ()

    def renumbered(self, number: Sequence[int]) -> Fabric:
        """Returns the fabric with other numbers of its devices, by those that they have."""
        links = tuple((number[one], number[other], rate) for one, other, rate in self.links)
        return replace(self, devices=tuple(number[device] for device in self.devices), links=links)

    def quicker(self, factor: float) -> Fabric:
        """Returns the fabric with its bandwidths multiplied: a message takes as long as one of 1 / factor of its size did."""
        return self.slower(1.0 / factor, size=factor)

    def slower(self, factor: float, *, size: float = 1.0, latency: float = 1.0) -> Fabric:
        """Returns the fabric with its bandwidths divided by a factor and the first sizes and latencies of its pieces
        multiplied.
        """

        def piece(one: Piece) -> Piece:
            return Piece(one.from_bytes * size, one.latency_s * latency, one.bus_bytes_per_s / factor)

        curves = tuple(replace(curve, pieces=tuple(map(piece, curve.pieces))) for curve in self.curves)
        return replace(self, curves=curves, links=tuple((i, j, rate / factor) for i, j, rate in self.links))


def bus_factor(kind: str, group_size: int) -> float:
    """Returns bytes that the busiest port moves per byte of the whole tensor, which turns algorithm into bus bandwidth.

    Source: NVIDIA nccl-tests, doc/PERFORMANCE.md: 2(n-1)/n for all-reduce, (n-1)/n for all-gather, reduce-scatter and
    all-to-all, 1 for broadcast.
    """
    if kind == "broadcast":
        return 1.0
    return (2.0 if kind == "all_reduce" else 1.0) * (group_size - 1) / group_size


def joined_curve(
    group_size: int,
    latency_s: float,
    stretches: Sequence[tuple[float, float]],
    *,
    kind: CollectiveKind = "all_reduce",
    algorithm: str = "",
) -> CollectiveCurve:
    """Returns a curve without jumps.

    Args:
        group_size: Devices that take part.
        latency_s: Time of an empty message.
        stretches: (from_bytes, bus_bytes_per_s) of each piece; the latencies of later pieces follow.
        kind: The collective.
        algorithm: Algorithm for display, as in `CollectiveCurve`.
    """
    pieces: list[Piece] = []
    factor = bus_factor(kind, group_size)
    for start, rate in stretches:
        if pieces:
            last = pieces[-1]
            latency_s = last.latency_s + start * factor * (1 / last.bus_bytes_per_s - 1 / rate)
        pieces.append(Piece(float(start), latency_s, float(rate)))
    return CollectiveCurve(group_size, tuple(pieces), kind, algorithm)


def check_fabrics(fabrics: Sequence[Fabric], num_devices: int) -> None:
    """Checks every number of the fabrics of `num_devices` devices.

    Raises:
        InputError: Names the first field that is wrong.
    """
    if fabrics:
        fabrics_from_list(plain(fabrics), num_devices)


def fabrics_from_list(items: Any, num_devices: int) -> tuple[Fabric, ...]:
    """Builds and checks fabrics from parsed JSON or TOML.

    Raises:
        InputError: Names the first field that is wrong.
    """
    fabrics = build(tuple[Fabric, ...], items, "fabrics", whole_floats=True)
    for index, fabric in enumerate(fabrics):
        where = f"fabrics[{index}]"
        members = set(fabric.devices)
        if len(members) < len(fabric.devices):
            raise InputError(f"{where}.devices: needs distinct devices")
        if max(members) >= num_devices:
            raise InputError(f"{where}.devices: must be in 0..{num_devices - 1}, found {max(members)}")
        for number, curve in enumerate(fabric.curves):
            _check_curve(curve, f"{where}.curves[{number}]")
        if len({(curve.kind, curve.group_size) for curve in fabric.curves}) < len(fabric.curves):
            raise InputError(f"{where}.curves: two curves of one collective and group size")
        for i, j, rate in fabric.links:
            if i not in members or j not in members or i == j:
                raise InputError(f"{where}.links: {show([i, j, rate])} does not join two devices of the fabric")
    return fabrics


def _check_curve(curve: CollectiveCurve, where: str) -> None:
    reached, previous = 0.0, None
    slope = bus_factor(curve.kind, curve.group_size)
    for number, piece in enumerate(curve.pieces):
        at = f"{where}.pieces[{number}]"
        if (previous is None) != (piece.from_bytes == 0):
            raise InputError(f"{at}.from_bytes: the first piece starts at 0, later ones above")
        if previous is not None:
            if piece.from_bytes <= previous.from_bytes:
                raise InputError(f"{at}.from_bytes: pieces must be in order of size")
            reached = previous.latency_s + slope * piece.from_bytes / previous.bus_bytes_per_s
        if piece.latency_s + slope * piece.from_bytes / piece.bus_bytes_per_s < reached * (1 - 1e-9):
            raise InputError(f"{at}: time falls at {piece.from_bytes:g} bytes; a larger message never takes less")
        previous = piece


_LIKE = {
    "all_reduce": ("all_reduce",),
    "all_gather": ("all_gather", "reduce_scatter", "all_reduce"),
    "reduce_scatter": ("reduce_scatter", "all_gather", "all_reduce"),
    "broadcast": ("broadcast", "all_gather", "reduce_scatter", "all_reduce"),
    "all_to_all": ("all_to_all", "all_gather", "reduce_scatter", "all_reduce"),
}


@dataclass(frozen=True)
class Term:
    """``(latency + slope * size * scale) ** power`` by stretches of ``size * scale``.

    Attributes:
        starts: float64 [K], first size of each stretch.
        latency_s: float64 [K], seconds at size 0.
        slope: float64 [K], seconds per byte.
        scale: Factor on the bytes of the message.
        power: Exponent of the term, its weight in a geometric mean.
    """

    starts: NDArray[np.float64]
    latency_s: NDArray[np.float64]
    slope: NDArray[np.float64]
    scale: float = 1.0
    power: float = 1.0

    def seconds(self, size: NDArray[np.float64]) -> NDArray[np.float64]:
        scaled = size * self.scale
        at = np.searchsorted(self.starts, scaled, side="right") - 1
        seconds = self.latency_s[at] + self.slope[at] * scaled
        return seconds if self.power == 1.0 else np.asarray(seconds**self.power)


Phase = tuple[Term, ...]
"""A stretch of work; its seconds are the product of its terms'."""


def line(latency_s: float, s_per_byte: float) -> Phase:
    """Returns the phase of ``latency_s + size * s_per_byte``."""
    return (Term(np.zeros(1), np.array([latency_s]), np.array([s_per_byte])),)


def phase_s(phase: Phase, size: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns seconds of one phase for each message size."""
    seconds = phase[0].seconds(size)
    for term in phase[1:]:
        seconds = seconds * term.seconds(size)
    return seconds


def serves(fabric: Fabric, members: Sequence[int]) -> bool:
    """Returns whether the fabric joins these devices, and its curves reach their number."""
    sizes = [curve.group_size for curve in fabric.curves if curve.kind == "all_reduce"]
    reach = bool(sizes) and min(sizes) <= len(members) <= max(sizes)
    return reach and (not fabric.links or rings(fabric, tuple(members)) > 0)


def inside(fabric: Fabric, kind: str, members: Sequence[int]) -> Phase:
    """Returns a collective of devices that the fabric `serves`."""
    size = len(members)
    curves: list[CollectiveCurve] = []
    for name in _LIKE[kind]:
        curves = sorted((c for c in fabric.curves if c.kind == name), key=lambda c: c.group_size)
        if curves and curves[0].group_size <= size <= curves[-1].group_size:
            break
    low = max((c for c in curves if c.group_size <= size), key=lambda c: c.group_size)
    high = min((c for c in curves if c.group_size >= size), key=lambda c: c.group_size)
    if low is high:
        return (_term(fabric, low, kind, tuple(members), 1.0),)
    part = math.log(size / low.group_size) / math.log(high.group_size / low.group_size)
    return (_term(fabric, low, kind, tuple(members), 1.0 - part), _term(fabric, high, kind, tuple(members), part))


def _term(fabric: Fabric, curve: CollectiveCurve, kind: str, members: tuple[int, ...], power: float) -> Term:
    starts = np.array([piece.from_bytes for piece in curve.pieces])
    latency = np.array([piece.latency_s for piece in curve.pieces])
    scale = bus_factor(kind, len(members)) / bus_factor(curve.kind, curve.group_size)
    if fabric.links:  # the curve is that of the fabric's first devices
        scale *= rings(fabric, fabric.devices[: curve.group_size]) / rings(fabric, members)
    return Term(starts, latency, curve.seconds_per_byte, scale, power)


@lru_cache(maxsize=4096)
def rings(fabric: Fabric, members: tuple[int, ...]) -> float:
    """Returns bytes per second of all rings that direct links allow among these devices; 0 where they are not connected."""
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
