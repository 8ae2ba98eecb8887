"""Times of collectives inside one fabric, for any of its devices: from its curves to other collectives, sets and group sizes.

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

import numpy as np
from numpy.typing import NDArray

from rlplace.cluster.fabric import Curve, Fabric, bus_factor

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
    curves: list[Curve] = []
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


def _term(fabric: Fabric, curve: Curve, kind: str, members: tuple[int, ...], power: float) -> Term:
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
