"""Devices and the links between them, as problems and clusters hold them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rlplace.cluster.fabric import Fabric

Channels = tuple[tuple[tuple[int, ...], ...], ...]


@dataclass(frozen=True)
class Device:
    """One device of a problem.

    Attributes:
        name: Unique name, for example ``"gpu0"``.
        memory_bytes: Capacity; None means no limit.
        reserved_bytes: Bytes always in use (context, communication buffers).
        kind: Preset name such as ``"a100-80g"``, or None.
    """

    name: str
    memory_bytes: int | None = None
    reserved_bytes: int = 0
    kind: str | None = None


def fullest_share(peak_bytes: Iterable[float], devices: Iterable[Device]) -> float | None:
    """Returns peak over capacity of the fullest device; None where none has a limit."""
    pairs = zip(peak_bytes, devices, strict=True)
    return max((peak / device.memory_bytes for peak, device in pairs if device.memory_bytes), default=None)


TIGHT, FULL = 0.90, 0.97
"""Shares of a device's memory: from the first on a plan is tight, from the second on full. What the allocator holds beyond what
was asked of it is a few per cent in most steps (docs/cost-model/accuracy.md, Memory)."""


def fullness(share: float | None) -> str:
    """Returns how full a device is in a word: "roomy", "tight" or "full"; without a limit it is roomy."""
    return "roomy" if share is None or share < TIGHT else "tight" if share < FULL else "full"


@dataclass(frozen=True, eq=False)
class Links:
    """Communication between every ordered pair of devices.

    Attributes:
        bandwidth_bytes_per_s: float64 [D, D]; 0 off the diagonal means that there is no link.
        latency_s: float64 [D, D], seconds before the first byte.
        channels: ``channels[i][j]`` names the resources that a transfer from i to j holds while it runs; None gives every
            ordered pair a channel of its own.
        fabrics: Devices joined by one interconnect, with the times of their collectives.
    """

    bandwidth_bytes_per_s: NDArray[np.float64]
    latency_s: NDArray[np.float64]
    channels: Channels | None = None
    fabrics: tuple[Fabric, ...] = ()

    @cached_property
    def effective_channels(self) -> Channels:
        """`channels`, with the default of one private channel per ordered pair written out."""
        if self.channels is not None:
            return self.channels
        count = len(self.latency_s)
        return tuple(tuple((i * count + j,) if i != j else () for j in range(count)) for i in range(count))

    def transfer_s(self, source: int, destination: int, size_bytes: int) -> float:
        """Returns seconds that `size_bytes` take from one device to another, without waiting; inf where no link exists."""
        bandwidth = self.bandwidth_bytes_per_s[source, destination]
        if bandwidth == 0.0:
            return float("inf")
        return float(self.latency_s[source, destination] + size_bytes / bandwidth)
