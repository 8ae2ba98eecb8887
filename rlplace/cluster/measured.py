"""From measured link times to a cluster: pairs as latency and bandwidth, groups as the curves of fabrics."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlplace.cluster.detect import kind_from_name
from rlplace.cluster.fabric import CollectiveKind, Curve, Fabric, bus_factor, joined_curve
from rlplace.cluster.parse import Cluster, assemble, default_host
from rlplace.cluster.presets import DeviceKind, cpu_kind
from rlplace.errors import InputError, MissingError

KINDS: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather", "reduce_scatter")
"""Collectives that are timed."""
BREAKS = (0, 1 << 18, 1 << 23)
"""Where small, medium and large messages begin: latency, protocol, bandwidth."""


@dataclass(frozen=True, eq=False)
class LinkTimes:
    """What was measured.

    Attributes:
        backend: ``"gloo"`` or ``"nccl"``.
        hosts: Host name of each of W devices (ranks).
        drivers: Device name as the driver reports it; ``"cpu"`` for a process on the host's processor.
        memory_bytes: Memory of each device; a share of the host's for processes on processors.
        cores: Processor cores of each device, 0 for accelerators.
        pair_bytes: P message sizes.
        pair_s: float64 [W, W, P], seconds from sender to receiver; the diagonal is 0.
        groups: Ranks of each of G groups.
        group_bytes: S message sizes.
        group_s: float64 [K, G, S], seconds of each of `KINDS`.
    """

    backend: str
    hosts: tuple[str, ...]
    drivers: tuple[str, ...]
    memory_bytes: tuple[int, ...]
    cores: tuple[int, ...]
    pair_bytes: tuple[int, ...]
    pair_s: NDArray[np.float64]
    groups: tuple[tuple[int, ...], ...]
    group_bytes: tuple[int, ...]
    group_s: NDArray[np.float64]


def cluster_from(times: LinkTimes) -> Cluster:
    """Returns the cluster that was measured.

    Devices of all hosts in the order of their ranks; the numbers of their kinds are those of presets, only their links are
    measured. Which transfers share a channel follows the topology of the preset: pairs were timed alone.

    Raises:
        MissingError: A device of unknown kind, or unknown memory.
    """
    kinds = _kinds(times)
    names = list(dict.fromkeys(times.hosts))
    host_of = [names.index(host) for host in times.hosts]
    hosts = [default_host(kinds[host_of.index(number)]) for number in range(len(names))]
    title = f"{'+'.join(names)}: links measured over {times.backend}"
    drawn = assemble(kinds, host_of, hosts, name=title)
    latency, bandwidth, _ = fit_pairs(times)
    links = dataclasses.replace(
        drawn.links, bandwidth_bytes_per_s=bandwidth, latency_s=latency, fabrics=fabrics_from(times, host_of)
    )
    return dataclasses.replace(drawn, links=links)


def fit_pairs(times: LinkTimes) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Latency, bandwidth and mean relative error of the fit of every ordered pair.

    Returns:
        Three float64 [W, W]: least squares of the relative error of ``latency + bytes / bandwidth``; 0 on the diagonal.
    """
    count = len(times.hosts)
    latency, bandwidth, error = (np.zeros((count, count)) for _ in range(3))
    size = np.array(times.pair_bytes, dtype=np.float64)
    for i in range(count):
        for j in range(count):
            if i != j:
                seconds = times.pair_s[i, j]
                curve = fit_collective_curve(size, seconds, kind="broadcast", group_size=2)
                latency[i, j] = curve.pieces[0].latency_s
                bandwidth[i, j] = curve.pieces[0].bus_bytes_per_s
                error[i, j] = float(np.abs(curve.seconds(size) / seconds - 1).mean())
    return latency, bandwidth, error


def fabrics_from(times: LinkTimes, host_of: list[int]) -> tuple[Fabric, ...]:
    """Returns a fabric for every host with several devices, and one for all of them together where there are several hosts."""
    source = f"rlplace measure --links over {times.backend}"
    curves: dict[tuple[int, ...], list[Curve]] = {}
    everybody = tuple(range(len(host_of)))
    for number, ranks in enumerate(times.groups):
        own = {host_of[rank] for rank in ranks}
        members = everybody if len(own) > 1 else tuple(rank for rank in everybody if host_of[rank] in own)
        curves.setdefault(members, []).extend(
            fit_collective_curve(times.group_bytes, seconds, kind=kind, group_size=len(ranks), breaks=BREAKS)
            for kind, seconds in zip(KINDS, times.group_s[:, number], strict=True)
        )
    return tuple(Fabric(devices, tuple(fitted), "measured", source) for devices, fitted in curves.items())


def _kinds(times: LinkTimes) -> list[DeviceKind]:
    """Returns a kind per device; kinds of one name and different numbers get names of their own."""
    kinds: list[DeviceKind] = []
    known: dict[str, list[DeviceKind]] = {}
    for driver, memory, cores in zip(times.drivers, times.memory_bytes, times.cores, strict=True):
        if memory <= 0:
            raise MissingError("measure --links: the size of host memory is unknown; describe the cluster in a TOML file")
        kind = cpu_kind(cores, memory) if cores else kind_from_name(driver, memory)
        variants = known.setdefault(kind.name, [])
        if kind not in variants:
            variants.append(kind)
        number = variants.index(kind)
        kinds.append(kind if number == 0 else msgspec.structs.replace(kind, name=f"{kind.name}-{number + 1}"))
    return kinds


_MIN_SECONDS_PER_BYTE = 1e-15  # a flat stretch still has a finite rate
_MAX_SECONDS_PER_BYTE = 1e6


def fit_collective_curve(
    size_bytes: ArrayLike,
    seconds: ArrayLike,
    *,
    kind: CollectiveKind,
    group_size: int,
    breaks: Sequence[float] = (0,),
) -> Curve:
    """Least squares of the relative error over joined straight pieces.

    Args:
        size_bytes: M message sizes (whole tensor).
        seconds: M measured times, positive.
        kind: The collective.
        group_size: Devices that took part.
        breaks: Where pieces begin, the first at 0. Pieces that hold no measurement beyond their start are left out.

    Raises:
        InputError: No positive measurement of two different sizes.
    """
    from scipy.interpolate import BSpline

    size = np.asarray(size_bytes, dtype=np.float64)
    time = np.asarray(seconds, dtype=np.float64)
    if len(np.unique(size)) < 2 or not (np.isfinite(time) & (time > 0)).all():
        raise InputError(f"cannot fit a curve of {kind}: needs positive times of at least two message sizes")
    starts = [0.0, *(float(b) for b in breaks if b > 0 and (size <= b).sum() >= 2 and (size > b).any())]
    knots = np.array([*starts, max(float(size.max()), starts[-1] + 1.0)])
    lines = BSpline.design_matrix(size, np.pad(knots, 1, "edge"), 1).toarray()
    rise = _rises(lines / time[:, None])
    slope = np.clip(rise[1:] / np.diff(knots), _MIN_SECONDS_PER_BYTE, _MAX_SECONDS_PER_BYTE)
    rates = bus_factor(kind, group_size) / slope
    return joined_curve(group_size, float(rise[0]), list(zip(starts, rates.tolist(), strict=True)), kind=kind)


def _rises(weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns float64 [K]: height of the first knot and the rises to the next ones, so that ``weights @ heights`` is closest to
    ones.

    No rise is negative: what would fall stays level.
    """
    from scipy.optimize import nnls

    steps = np.cumsum(weights[:, ::-1], axis=1)[:, ::-1]
    return nnls(steps, np.ones(len(steps)))[0]
