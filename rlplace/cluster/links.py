"""Devices and the links between them, as problems and clusters hold them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Annotated, NamedTuple, Protocol

import numpy as np
from msgspec import Meta
from numpy.typing import ArrayLike, NDArray

from rlplace.cluster.fabric import Fabric, check_fabrics
from rlplace.errors import InputError
from rlplace.records import Record

Channels = tuple[tuple[tuple[int, ...], ...], ...]

MAX_SECONDS = 1e9
MIN_BANDWIDTH = 1e-3
MAX_CHANNEL = 1 << 20
MAX_WRITTEN = 1024
"""Devices whose pairs are written out as matrices."""


@dataclass(frozen=True, slots=True)
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


class AlikeRun(NamedTuple):
    """Consecutive devices whose links repeat.

    Attributes:
        start: The first.
        period: Devices after which they repeat; no channels are shared with those of other periods but at their ends.
        lanes: Devices of a difference after which pairs take the same lanes of all channels.
    """

    start: int
    period: int
    lanes: int


class Wires(Protocol):
    """Links as collectives and strategies see them: `Links`, or those of hosts (`rlplace.cluster.host_links`)."""

    @property
    def num_devices(self) -> int:
        """D."""

    @property
    def fabrics(self) -> tuple[Fabric, ...]:
        """Devices joined by one interconnect, with the times of their collectives."""

    @property
    def whole(self) -> Links:
        """Matrices of all pairs.

        Raises:
            InputError: There are too many devices for that.
        """

    def rates(self, senders: ArrayLike, receivers: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Returns bytes per second and latency in seconds of P pairs of devices, float64 [P] each; 0 bytes without a link."""

    def held(self, senders: ArrayLike, receivers: ArrayLike) -> NDArray[np.int64]:
        """Returns the channels that a transfer of each of P pairs holds, int64 [P, K]; -1 past the last."""

    def sorts(self, groups: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the sort of each of G groups of n devices [G, n], int64 [G]; collectives of one sort take equally long."""

    def fabrics_near(self, devices: Sequence[int]) -> tuple[Fabric, ...]:
        """Returns `fabrics`, those of hosts without any of these devices left out where there are many."""

    def run(self, first: int, last: int) -> AlikeRun | None:
        """Returns the run of the devices from one to another, the first of which begins a period; None where there is none."""

    def exchange(self, groups: NDArray[np.int64]) -> tuple[float, float] | None:
        """Returns `rlplace.cluster.rings.exchange` where it can be worked out without looking at all pairs; None otherwise."""

    def quicker(self, factor: float) -> Wires:
        """Returns all links with their bandwidth multiplied; latencies stay."""


@dataclass(frozen=True, eq=False)
class Links:
    """Communication between every ordered pair of devices.

    Attributes:
        bandwidth_bytes_per_s: float64 [D, D]; 0 off the diagonal means that there is no link.
        latency_s: float64 [D, D], seconds before the first byte.
        channels: ``channels[i][j]`` names the resources that a transfer from i to j holds while it runs; None gives every
            ordered pair a channel of its own.
        fabrics: Devices joined by one interconnect, with the times of their collectives.

    Raises:
        InputError: On construction, when a matrix has another form, or a number is out of range.
    """

    bandwidth_bytes_per_s: NDArray[np.float64]
    latency_s: NDArray[np.float64]
    channels: Channels | None = None
    fabrics: tuple[Fabric, ...] = ()

    def __post_init__(self) -> None:
        count = len(self.latency_s)
        limits = {"bandwidth_bytes_per_s": (MIN_BANDWIDTH, np.inf), "latency_s": (0.0, MAX_SECONDS)}
        for name, (least, most) in limits.items():
            matrix = getattr(self, name)
            matrix.setflags(write=False)
            if matrix.shape != (count, count):
                raise InputError(f"links.{name}: expected a {count} x {count} matrix, found shape {matrix.shape}")
            bad = ~((matrix == 0) | ((matrix >= least) & (matrix <= most) & np.isfinite(matrix)))
            if bad.any():
                i, j = np.argwhere(bad)[0]
                span = f"up to {most:g} seconds" if most < np.inf else f"0 (no link), or a finite number from {least:g} up"
                raise InputError(f"links.{name}[{i}][{j}]: expected {span}, found {matrix[i, j]}")
        check_fabrics(self.fabrics, count)
        if self.channels is None:
            return
        if len(self.channels) != count or any(len(row) != count for row in self.channels):
            raise InputError(f"links.channels: expected a {count} x {count} matrix of lists")
        for held in set(chain.from_iterable(self.channels)):
            if len(set(held)) != len(held):
                raise InputError(f"links.channels: a channel appears twice in {list(held)[:8]}; name every channel once")
            if held and not 0 <= min(held) <= max(held) < MAX_CHANNEL:
                raise InputError(f"links.channels: numbers must be in 0..{MAX_CHANNEL - 1}, found {list(held)[:8]}")

    @cached_property
    def effective_channels(self) -> Channels:
        """`channels`, with the default of one private channel per ordered pair written out."""
        if self.channels is not None:
            return self.channels
        count = len(self.latency_s)
        return tuple(tuple((i * count + j,) if i != j else () for j in range(count)) for i in range(count))

    @property
    def num_devices(self) -> int:
        return len(self.latency_s)

    @property
    def whole(self) -> Links:
        """Matrices of all pairs: these."""
        return self

    def rates(self, senders: ArrayLike, receivers: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Returns bytes per second and latency of pairs, see `Wires.rates`."""
        i, j = np.asarray(senders, dtype=np.int64), np.asarray(receivers, dtype=np.int64)
        return self.bandwidth_bytes_per_s[i, j], self.latency_s[i, j]

    def held(self, senders: ArrayLike, receivers: ArrayLike) -> NDArray[np.int64]:
        """Returns the channels of pairs, see `Wires.held`."""
        channels, pairs = self.effective_channels, zip(np.ravel(senders).tolist(), np.ravel(receivers).tolist(), strict=True)
        rows = [channels[i][j] for i, j in pairs]
        found = np.full((len(rows), max(map(len, rows), default=0)), -1)
        for row, own in zip(found, rows, strict=True):
            row[: len(own)] = own
        return found

    def sorts(self, groups: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the sort of groups, see `Wires.sorts`: nothing is known to be alike."""
        return np.arange(len(groups))

    def fabrics_near(self, devices: Sequence[int]) -> tuple[Fabric, ...]:
        """Returns all fabrics."""
        return self.fabrics

    def run(self, first: int, last: int) -> AlikeRun | None:
        """Returns None: nothing is known to repeat."""
        return None

    def exchange(self, groups: NDArray[np.int64]) -> tuple[float, float] | None:
        """Returns None: nothing is known to be alike."""
        return None

    def quicker(self, factor: float) -> Links:
        """Returns all links with their bandwidth multiplied; latencies stay."""
        fabrics = tuple(fabric.quicker(factor) for fabric in self.fabrics)
        return replace(self, bandwidth_bytes_per_s=self.bandwidth_bytes_per_s * factor, fabrics=fabrics)

    def transfer_s(self, source: int, destination: int, size_bytes: int) -> float:
        """Returns seconds that `size_bytes` take from one device to another, without waiting; inf where no link exists."""
        bandwidth = self.bandwidth_bytes_per_s[source, destination]
        if bandwidth == 0.0:
            return float("inf")
        return float(self.latency_s[source, destination] + size_bytes / bandwidth)


_Channel = Annotated[int, Meta(ge=0, lt=MAX_CHANNEL)]


class LinksTable(Record, frozen=True):
    """Links as they stand in files of problems and clusters.

    Attributes:
        bandwidth_bytes_per_s: Devices by devices, a row per sender; 0: no link.
        latency_s: Devices by devices.
        channels: By ordered pair the numbers of the resources that a transfer holds; null: every pair has its own.
    """

    bandwidth_bytes_per_s: list[list[float]]
    latency_s: list[list[float]]
    channels: tuple[tuple[tuple[_Channel, ...], ...], ...] | None = None

    def links(self, fabrics: tuple[Fabric, ...] = ()) -> Links:
        """Returns the links.

        Raises:
            InputError: They are no square matrices, or a number is out of range.
        """
        tables = self.bandwidth_bytes_per_s, self.latency_s
        bandwidth, latency = (matrix(rows, f"links.{name}") for rows, name in zip(tables, self.__struct_fields__, strict=False))
        return Links(bandwidth, latency, self.channels, fabrics)


def matrix(rows: list[list[float]], where: str) -> NDArray[np.float64]:
    """Returns rows of a file as a matrix; refuses rows of unlike lengths."""
    if len({len(row) for row in rows}) > 1:
        raise InputError(f"{where}: expected a matrix (a list of equally long lists of numbers)")
    return np.array(rows, dtype=np.float64)
