"""Clusters of real machines: devices as drivers report them, and links as `rlplace measure --links` timed them.

Times of pairs become latency and bandwidth, times of groups the curves of fabrics.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations

import msgspec
import numpy as np
from msgspec import structs
from numpy.typing import ArrayLike, NDArray

from rlplace.cluster.fabric import CollectiveCurve, CollectiveKind, Fabric, bus_factor, joined_curve
from rlplace.cluster.interconnect import Host, parse_network
from rlplace.cluster.parse import Cluster, assemble, default_host
from rlplace.cluster.presets import KINDS, DeviceKind, cpu_kind
from rlplace.errors import InputError, MissingError

# Words of device names as drivers report them; a card of the same name with one of `_OTHER_CARD` behind it is another one.
_NAMES = {
    "a100": "a100-80g", "tesla t4": "t4", "nvidia t4": "t4", "nvidia l4": "l4", "rtx a6000": "a6000", "titan rtx": "titan-rtx",
    "rtx 2080 ti": "rtx2080ti", "rtx 6000 ada": "rtx6000-ada", "rtx pro 6000": "rtx-pro-6000",
    **{f"rtx {number}": f"rtx{number}" for number in (3060, 3090, 4080, 4090, 5080, 5090)},
    **dict.fromkeys(("v100", "a800", "h100", "h200", "h800", "h20", "gh200", "b200", "b300", "gb200", "a10", "a10g", "l40",
                     "l40s", "mi300x", "mi325x", "mi355x")),
}  # fmt: skip
_OTHER_CARD = ("ti", "super", "laptop", "d", "max")
_A100_SMALL_BYTES = 60_000_000_000


def detect() -> Cluster:
    """Returns the accelerators that torch sees, with the memory it reports; without any, the processor.

    Raises:
        MissingError: An accelerator of an unknown kind, or no usable device at all.
    """
    import torch

    if torch.cuda.is_available() and torch.cuda.device_count() > 0:
        kinds = []
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            kinds.append(kind_from_name(properties.name, int(properties.total_memory)))
        return _one_host(kinds)
    cores, memory = host_processor()
    if memory <= 0:
        raise MissingError("no accelerator found and the size of host memory is unknown; describe the cluster in a TOML file")
    kind = cpu_kind(cores, memory)
    return assemble([kind], [0], [default_host(kind)], name=f"{platform.node() or 'host'}: cpu", text="host")


def host_processor() -> tuple[int, int]:
    """Returns cores that this process may use, and bytes of host memory (0 where unknown)."""
    try:
        memory = int(os.sysconf("SC_PAGE_SIZE")) * int(os.sysconf("SC_PHYS_PAGES"))
    except (ValueError, OSError, AttributeError):
        memory = 0
    return usable_cores(), memory


def kind_from_name(name: str, memory_bytes: int) -> DeviceKind:
    """Returns the preset kind of a device name as the driver reports it, with the memory of the card at hand.

    Raises:
        MissingError: No preset describes the device.
    """
    words = " ".join(name.lower().replace("-", " ").split())
    other = "|".join(_OTHER_CARD)
    preset = next((_NAMES[card] or card for card in _NAMES if re.search(rf"\b{card}\b(?! ({other})\b)", words)), None)
    if preset is None:
        raise MissingError(
            f"device {name[:80]!r} has no preset (known: {', '.join(sorted(KINDS))}); "
            "describe it in a cluster TOML file as a [[kind]]"
        )
    if preset == "a100-80g" and memory_bytes < _A100_SMALL_BYTES:
        preset = "a100-40g"
    return structs.replace(KINDS[preset], memory_bytes=memory_bytes)


def _one_host(kinds: list[DeviceKind]) -> Cluster:
    import torch

    fabric = "nvlink" if all(kind.nvlink is not None for kind in kinds) else "pcie"
    count = len(kinds)
    if any("pcie" in torch.cuda.get_device_properties(i).name.lower() for i in range(count)):
        fabric = "pcie"
    peers = all(torch.cuda.can_device_access_peer(i, j) for i in range(count) for j in range(count) if i != j)
    if count > 1 and not peers:
        kinds = [structs.replace(kind, pcie_peer=False) for kind in kinds]
        fabric = "pcie"
    name = f"{platform.node() or 'host'}: " + "+".join(
        f"{kind}:{number}" for kind, number in zip(*np.unique([k.name for k in kinds], return_counts=True), strict=True)
    )
    host = Host(fabric, parse_network(kinds[0].network), host_processor()[1])
    return assemble(kinds, [0] * count, [host], name=name, text="host")


def usable_cores() -> int:
    """Counts the processor cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return max(1, os.cpu_count() or 1)


TIMED_COLLECTIVES: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
"""Collectives that are timed."""
BREAKS = (0, 1 << 18, 1 << 23)
"""Where small, medium and large messages begin: latency, protocol, bandwidth."""


@dataclass(frozen=True, eq=False)
class LinkTimes:
    """Measured times of transfers and collectives between processes.

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
        group_s: float64 [K, G, S], seconds of each of `TIMED_COLLECTIVES`.
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
        drawn.links.whole, bandwidth_bytes_per_s=bandwidth, latency_s=latency, fabrics=fabrics_from(times, host_of)
    )
    return dataclasses.replace(drawn, links=links)


def fit_pairs(times: LinkTimes) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Fits latency and bandwidth of every ordered pair; also returns the mean relative error of each fit.

    Returns:
        Three float64 [W, W]: least squares of the relative error of ``latency + bytes / bandwidth``; 0 on the diagonal.
    """
    count = len(times.hosts)
    latency, bandwidth, error = np.zeros((3, count, count))
    size = np.array(times.pair_bytes, dtype=np.float64)
    for i, j in permutations(range(count), 2):
        seconds = times.pair_s[i, j]
        curve = fit_collective_curve(size, seconds, kind="broadcast", group_size=2)
        latency[i, j], bandwidth[i, j] = curve.pieces[0].latency_s, curve.pieces[0].bus_bytes_per_s
        error[i, j] = float(np.abs(curve.seconds(size) / seconds - 1).mean())
    return latency, bandwidth, error


def fabrics_from(times: LinkTimes, host_of: list[int]) -> tuple[Fabric, ...]:
    """Returns a fabric for every host with several devices, and one for all of them together where there are several hosts."""
    source = f"rlplace measure --links over {times.backend}"
    curves: dict[tuple[int, ...], list[CollectiveCurve]] = {}
    everybody = tuple(range(len(host_of)))
    for number, ranks in enumerate(times.groups):
        own = {host_of[rank] for rank in ranks}
        members = everybody if len(own) > 1 else tuple(rank for rank in everybody if host_of[rank] in own)
        curves.setdefault(members, []).extend(
            fit_collective_curve(times.group_bytes, seconds, kind=kind, group_size=len(ranks), breaks=BREAKS)
            for kind, seconds in zip(TIMED_COLLECTIVES, times.group_s[:, number], strict=True)
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
    size_bytes: ArrayLike, seconds: ArrayLike, *, kind: CollectiveKind, group_size: int, breaks: Sequence[float] = (0,)
) -> CollectiveCurve:
    """Fits joined straight pieces by least squares of the relative error.

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
    """Fits float64 [K]: height of the first knot, and rises (none below 0) to the next ones, so that all products are 1."""
    from scipy.optimize import nnls

    steps = np.cumsum(weights[:, ::-1], axis=1)[:, ::-1]
    return nnls(steps, np.ones(len(steps)))[0]
