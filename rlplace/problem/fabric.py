"""Fabrics: devices joined by one interconnect, with the measured or fitted times of their collectives.

A problem carries them in its links, so that collectives can be priced where the cluster is not at hand
(`rlplace.problem.collectives`). The same plain data stands in problem files (JSON) and cluster files (TOML).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InputError, show, unknown_name
from rlplace.files import check_keys, finite_number

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
BASES = ("fitted", "measured", "datasheet")
MAX_PIECES = 64
MAX_CURVES = 256
_MAX_SIZE = 1 << 62
_MAX_RATE = 1e18


@dataclass(frozen=True)
class Piece:
    """One stretch of message sizes in which time is a straight line (alpha-beta).

    Attributes:
        from_bytes: Smallest message that it holds for; it ends where the next piece begins.
        latency_s: Where the line meets zero bytes; below zero where larger messages move at a lower rate.
        bus_bytes_per_s: Bus bandwidth: time grows by ``bus_factor(kind, group_size) / bus_bytes_per_s`` per byte.
    """

    from_bytes: float
    latency_s: float
    bus_bytes_per_s: float


@dataclass(frozen=True)
class Curve:
    """Time of one collective of one group size, by message size.

    Attributes:
        group_size: Devices that take part.
        pieces: From zero bytes up; time never falls as messages grow.
        kind: One of `COLLECTIVES`.
        algorithm: For people: ``"ring"``, ``"tree"``, ``"nvls"`` (reduction in the switch) or ``""``.
    """

    group_size: int
    pieces: tuple[Piece, ...]
    kind: str = "all_reduce"
    algorithm: str = ""

    def seconds(self, size_bytes: float | NDArray[np.float64]) -> NDArray[np.float64]:
        """Seconds for messages of `size_bytes` (the whole tensor), of the same shape."""
        size = np.asarray(size_bytes, dtype=np.float64)
        starts = np.array([piece.from_bytes for piece in self.pieces])
        at = np.searchsorted(starts, size, side="right") - 1
        latency = np.array([piece.latency_s for piece in self.pieces])
        return latency[at] + size * self.seconds_per_byte[at]

    @property
    def seconds_per_byte(self) -> NDArray[np.float64]:
        """float64 [pieces], slope of each piece."""
        return bus_factor(self.kind, self.group_size) / np.array([piece.bus_bytes_per_s for piece in self.pieces])


@dataclass(frozen=True)
class Fabric:
    """Devices that one interconnect joins.

    Attributes:
        devices: Device numbers, in the order in which the curves' groups were taken: a curve of n devices is that of the
            first n of them.
        curves: At most one per collective and group size.
        basis: ``"fitted"`` (to measurements by others), ``"measured"`` (on this cluster) or ``"datasheet"``.
        source: Whose figures these are.
        links: Direct links (device, device, bytes per second of either direction) where the fabric does not join every pair
            equally well (a cube mesh); empty where it does (a switch).
    """

    devices: tuple[int, ...]
    curves: tuple[Curve, ...]
    basis: str = "measured"
    source: str = ""
    links: tuple[tuple[int, int, float], ...] = ()


def bus_factor(kind: str, group_size: int) -> float:
    """Bytes that the busiest port moves per byte of the whole tensor, which turns algorithm into bus bandwidth.

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
    kind: str = "all_reduce",
    algorithm: str = "",
) -> Curve:
    """A curve without jumps.

    Args:
        group_size: Devices that take part.
        latency_s: Time of an empty message.
        stretches: (from_bytes, bus_bytes_per_s) of each piece; the latencies of later pieces follow.
        kind: The collective.
        algorithm: As in `Curve`.
    """
    pieces: list[Piece] = []
    factor = bus_factor(kind, group_size)
    for start, rate in stretches:
        if pieces:
            last = pieces[-1]
            latency_s = last.latency_s + start * factor * (1 / last.bus_bytes_per_s - 1 / rate)
        pieces.append(Piece(float(start), latency_s, float(rate)))
    return Curve(group_size, tuple(pieces), kind, algorithm)


def check_fabrics(fabrics: Sequence[Fabric], num_devices: int) -> None:
    """Checks every number of the fabrics of `num_devices` devices.

    Raises:
        InputError: Names the first field that is wrong.
    """
    for index, fabric in enumerate(fabrics):
        where = f"fabrics[{index}]"
        members = set(fabric.devices)
        if len(members) < 2 or len(members) < len(fabric.devices):
            raise InputError(f"{where}.devices: needs at least two distinct devices")
        if not members <= set(range(num_devices)):
            raise InputError(f"{where}.devices: must be in 0..{num_devices - 1}, found {show(sorted(members)[-1])}")
        if fabric.basis not in BASES:
            raise InputError(f"{where}.basis: {unknown_name('basis', fabric.basis, BASES)}")
        if not isinstance(fabric.source, str):
            raise InputError(f"{where}.source: expected a string")
        if not fabric.curves or len(fabric.curves) > MAX_CURVES:
            raise InputError(f"{where}.curves: needs 1 to {MAX_CURVES} curves, found {len(fabric.curves)}")
        for number, curve in enumerate(fabric.curves):
            _check_curve(curve, f"{where}.curves[{number}]")
        if len({(curve.kind, curve.group_size) for curve in fabric.curves}) < len(fabric.curves):
            raise InputError(f"{where}.curves: two curves of one collective and group size")
        for i, j, rate in fabric.links:
            if i not in members or j not in members or i == j or not 0 < rate <= _MAX_RATE:
                raise InputError(f"{where}.links: [{show(i)}, {show(j)}, {show(rate)}] does not join two devices of the fabric")


def _check_curve(curve: Curve, where: str) -> None:
    if curve.kind not in COLLECTIVES:
        raise InputError(f"{where}.kind: {unknown_name('collective', curve.kind, COLLECTIVES)}")
    if not 2 <= curve.group_size <= 1 << 20:
        raise InputError(f"{where}.group_size: {show(curve.group_size)} is not a number of devices from 2 up")
    if not isinstance(curve.algorithm, str):
        raise InputError(f"{where}.algorithm: expected a string")
    if not 1 <= len(curve.pieces) <= MAX_PIECES:
        raise InputError(f"{where}.pieces: needs 1 to {MAX_PIECES} pieces, found {len(curve.pieces)}")
    reached, previous = 0.0, None
    for number, piece in enumerate(curve.pieces):
        at = f"{where}.pieces[{number}]"
        if not all(math.isfinite(value) for value in (piece.from_bytes, piece.latency_s, piece.bus_bytes_per_s)):
            raise InputError(f"{at}: numbers must be finite")
        if not 0 < piece.bus_bytes_per_s <= _MAX_RATE or abs(piece.latency_s) > 1e9:
            raise InputError(f"{at}: bus_bytes_per_s must be positive and latency_s in range")
        if not 0 <= piece.from_bytes <= _MAX_SIZE or (previous is None) != (piece.from_bytes == 0):
            raise InputError(f"{at}.from_bytes: the first piece starts at 0, later ones above")
        slope = bus_factor(curve.kind, curve.group_size)
        if previous is not None:
            if piece.from_bytes <= previous.from_bytes:
                raise InputError(f"{at}.from_bytes: pieces must be in order of size")
            reached = previous.latency_s + slope * piece.from_bytes / previous.bus_bytes_per_s
        if piece.latency_s + slope * piece.from_bytes / piece.bus_bytes_per_s < reached * (1 - 1e-9):
            raise InputError(f"{at}: time falls at {piece.from_bytes:g} bytes; a larger message never takes less")
        previous = piece


def fabric_to_dict(fabric: Fabric) -> dict[str, Any]:
    """The fabric as plain data for JSON or TOML; defaults are left out."""
    data: dict[str, Any] = {
        "devices": list(fabric.devices),
        "basis": fabric.basis,
        "source": fabric.source,
        "curves": [_curve_to_dict(curve) for curve in fabric.curves],
    }
    if fabric.links:
        data["links"] = [list(link) for link in fabric.links]
    return data


def _curve_to_dict(curve: Curve) -> dict[str, Any]:
    data: dict[str, Any] = {"kind": curve.kind, "group_size": curve.group_size}
    if curve.algorithm:
        data["algorithm"] = curve.algorithm
    data["pieces"] = [[float(p.from_bytes), float(p.latency_s), float(p.bus_bytes_per_s)] for p in curve.pieces]
    return data


def fabrics_from_list(items: Any, num_devices: int) -> tuple[Fabric, ...]:
    """Builds and checks fabrics from parsed JSON or TOML.

    Raises:
        InputError: Names the first field that is wrong.
    """
    if not isinstance(items, list):
        raise InputError(f"fabrics: expected a list, found {type(items).__name__}")
    fabrics = tuple(_fabric(item, f"fabrics[{index}]") for index, item in enumerate(items))
    check_fabrics(fabrics, num_devices)
    return fabrics


def _fabric(item: Any, where: str) -> Fabric:
    check_keys(item, {"devices", "curves"}, {"basis", "source", "links"}, where)
    curves = []
    for number, data in enumerate(_list(item["curves"], f"{where}.curves")):
        at = f"{where}.curves[{number}]"
        check_keys(data, {"group_size", "pieces"}, {"kind", "algorithm"}, at)
        pieces = []
        for row in _list(data["pieces"], f"{at}.pieces"):
            if not isinstance(row, list) or len(row) != 3:
                raise InputError(f"{at}.pieces: expected [from_bytes, latency_s, bus_bytes_per_s], found {show(row)}")
            pieces.append(Piece(*(finite_number(value, f"{at}.pieces") for value in row)))
        size = _whole(data["group_size"], f"{at}.group_size")
        curves.append(Curve(size, tuple(pieces), data.get("kind", "all_reduce"), data.get("algorithm", "")))
    links = []
    for row in _list(item.get("links", []), f"{where}.links"):
        if not isinstance(row, list) or len(row) != 3:
            raise InputError(f"{where}.links: expected [device, device, bytes_per_s], found {show(row)}")
        links.append(
            (_whole(row[0], f"{where}.links"), _whole(row[1], f"{where}.links"), finite_number(row[2], f"{where}.links"))
        )
    devices = tuple(_whole(value, f"{where}.devices") for value in _list(item["devices"], f"{where}.devices"))
    return Fabric(devices, tuple(curves), item.get("basis", "measured"), item.get("source", ""), tuple(links))


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise InputError(f"{where}: expected a list, found {show(value)}")
    return value


def _whole(value: Any, where: str) -> int:
    number = finite_number(value, where)
    if not abs(number) < 1 << 53 or number != int(number):
        raise InputError(f"{where}: {show(value)} is not a whole number")
    return int(number)
