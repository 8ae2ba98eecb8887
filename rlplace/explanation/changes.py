"""The same problem on other hardware: one more device, more memory, quicker links or devices."""

from __future__ import annotations

import dataclasses
import re
from itertools import count

import msgspec
import numpy as np
from numpy.typing import NDArray

from rlplace.cluster.fabric import Fabric
from rlplace.cluster.links import Device, Links
from rlplace.errors import InputError
from rlplace.problem import Problem

_ONE_HOST = re.compile(r"\s*([\w.-]+?)\s*:\s*(\d+)((?:,[^+]*)?)")

FREE_BYTES_PER_S = 1e300
"""Bandwidth of links that cost nothing."""


def with_device(problem: Problem, like: int) -> Problem | None:
    """Returns the problem with one more device at the end, a copy of `like` with links like its own.

    On a preset cluster of one host the links are those of the preset with one more device. Else they are copied: to `like`
    itself the new device is linked as `like` is to the best linked device of its kind, or to any device where there is no
    other of its kind. Channels that `like` alone uses (its ports) are duplicated; channels that others use too (a network
    card, a bus) are shared.

    Returns:
        None for a single device of an unknown kind, where the links to a second one are unknown.
    """
    known = _preset_links(problem)
    if problem.num_devices == 1 and known is None:
        return None
    peer = _peer(problem, like)
    links = _extended(problem.links, like, peer) if known is None else known
    old = problem.devices[like]
    device = dataclasses.replace(old, name=_new_name(problem, old.name))
    column = problem.time_s[:, [like]]
    tables = {tensor: _grown(table, like, peer) for tensor, table in problem.tensor_transfer_s.items()}
    return dataclasses.replace(
        problem,
        devices=(*problem.devices, device),
        links=links,
        time_s=np.concatenate([problem.time_s, column], axis=1),
        tensor_transfer_s=tables,
    )


def _peer(problem: Problem, like: int) -> int:
    """Returns the device that shows how two of a kind are linked."""
    kind = problem.devices[like].kind
    others = [d for d in range(problem.num_devices) if d != like] or [like]
    alike = [d for d in others if problem.devices[d].kind == kind and (problem.time_s[:, d] == problem.time_s[:, like]).all()]
    bandwidth = problem.links.bandwidth_bytes_per_s[like]
    return max(alike or others, key=lambda d: (float(bandwidth[d]), -d))


def _grown(matrix: NDArray[np.float64], like: int, peer: int) -> NDArray[np.float64]:
    """Returns a [D, D] matrix with a row and a column more."""
    grown = matrix[np.ix_(index := [*range(len(matrix)), like], index)]
    grown[-1, like], grown[like, -1], grown[-1, -1] = matrix[peer, like], matrix[like, peer], 0.0
    return grown


def _extended(links: Links, like: int, peer: int) -> Links:
    bandwidth = _grown(links.bandwidth_bytes_per_s, like, peer)
    latency = _grown(links.latency_s, like, peer)
    fabrics = tuple(_joined(fabric, like, peer, len(latency) - 1) for fabric in links.fabrics)
    if links.channels is None:
        return Links(bandwidth, latency, None, fabrics)
    own = _own_channels(links, like)
    fresh = max((c for row in links.channels for held in row for c in held), default=-1) + 1
    copies = {channel: fresh + number for number, channel in enumerate(sorted(own))}

    def renamed(held: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(copies.get(channel, channel) for channel in held)

    peers = _own_channels(links, peer)
    rows = [[*row, renamed(row[like])] for row in links.channels]
    rows.append([*(renamed(held) for held in links.channels[like]), ()])
    # Between the two: the ports of the one, the ports of the other, and whatever like and its peer share.
    out = tuple(c for c in links.channels[like][peer] if c not in peers)
    back = tuple(c for c in links.channels[peer][like] if c not in peers)
    entering = tuple(c for c in links.channels[peer][like] if c in own)
    leaving = tuple(c for c in links.channels[like][peer] if c in own)
    last = fresh + len(copies)
    rows[like][-1] = tuple(dict.fromkeys((*out, *renamed(entering)))) if out else (last,)  # none: they have their own link
    rows[-1][like] = tuple(dict.fromkeys((*renamed(leaving), *back))) if back else (last + 1,)
    return Links(bandwidth, latency, tuple(tuple(row) for row in rows), fabrics)


def _own_channels(links: Links, device: int) -> set[int]:
    """Returns channels that no pair without the device uses; with two devices, those on its side of a path."""
    assert links.channels is not None
    if len(links.channels) == 2:
        other = 1 - device
        out, back = links.channels[device][other], links.channels[other][device]
        own = {*(out[:1] if len(out) > 1 else out), *(back[-1:] if len(back) > 1 else back)}
        return own - (set() if len(out) == 1 else set(back[:1])) - (set() if len(back) == 1 else set(out[-1:]))
    mine, others = set[int](), set[int]()
    for i, row in enumerate(links.channels):
        for j, channels in enumerate(row):
            (mine if device in (i, j) else others).update(channels)
    return mine - others


def _joined(fabric: Fabric, like: int, peer: int, new: int) -> Fabric:
    """Returns the fabric of `like` with the new device in it; direct links are those of `like`."""
    if like not in fabric.devices:
        return fabric
    direct = [(new if i == like else i, new if j == like else j, rate) for i, j, rate in fabric.links if like in (i, j)]
    between = [(like, new, rate) for i, j, rate in fabric.links if {i, j} == {like, peer}][:1]
    return msgspec.structs.replace(fabric, devices=(*fabric.devices, new), links=(*fabric.links, *direct, *between))


def _preset_links(problem: Problem) -> Links | None:
    """Returns links of the problem's preset cluster with one more device, where the present devices keep theirs; else None."""
    from rlplace.cluster.parse import preset
    from rlplace.cluster.presets import KINDS

    devices = problem.num_devices
    kinds = {device.kind for device in problem.devices}
    text = (problem.source or {}).get("cluster")
    match = _ONE_HOST.fullmatch(text) if isinstance(text, str) else None
    kind, options = (match[1].lower(), match[3]) if match is not None else (next(iter(kinds)), "")
    if kinds != {kind} or kind not in KINDS:
        return None
    try:
        links = preset(f"{kind}:{devices + 1}{options}").links.whole
    except InputError:
        return None
    pairs = ((getattr(links, name), getattr(problem.links, name)) for name in ("bandwidth_bytes_per_s", "latency_s"))
    return links if all(np.array_equal(more[:devices, :devices], now) for more, now in pairs) else None


def _new_name(problem: Problem, name: str) -> str:
    names, stem = {device.name for device in problem.devices}, name.rstrip("0123456789")
    return next(new for number in count(problem.num_devices) if (new := f"{stem}{number}") not in names)


def with_memory(problem: Problem, factor: float) -> Problem:
    """Multiplies the memory of all devices; those without a limit stay."""
    return dataclasses.replace(problem, devices=tuple(larger(device, factor) for device in problem.devices))


def larger(device: Device, factor: float) -> Device:
    """Returns the device with its memory multiplied; without a limit it stays."""
    if device.memory_bytes is None:
        return device
    return dataclasses.replace(device, memory_bytes=int(device.memory_bytes * factor))


def with_links(problem: Problem, factor: float, channel: int | None = None) -> Problem:
    """Returns the problem with the bandwidth of links multiplied; latencies stay.

    Args:
        problem: The problem.
        factor: Factor on the bandwidth.
        channel: Only the pairs that use this channel; collectives over fabrics then stay as they are.
    """
    links, quick = problem.links, problem.links.quicker(factor)
    pairs = np.ones(links.latency_s.shape, dtype=bool)
    if channel is not None:
        pairs = np.array([[channel in held for held in row] for row in links.effective_channels])
        bandwidth = np.where(pairs, quick.bandwidth_bytes_per_s, links.bandwidth_bytes_per_s)
        quick = dataclasses.replace(links, bandwidth_bytes_per_s=bandwidth)
    tables = {
        tensor: np.where(pairs, np.minimum(table, links.latency_s) + np.maximum(table - links.latency_s, 0.0) / factor, table)
        for tensor, table in problem.tensor_transfer_s.items()
    }
    return dataclasses.replace(problem, links=quick, tensor_transfer_s=tables)


def with_free_links(problem: Problem) -> Problem:
    """Returns the problem with transfers and collectives of replicas that take no time where there is a link."""
    linked = problem.links.bandwidth_bytes_per_s > 0
    links = Links(np.where(linked, FREE_BYTES_PER_S, 0.0), np.zeros(problem.links.latency_s.shape), problem.links.channels)
    tables = {tensor: np.zeros(table.shape) for tensor, table in problem.tensor_transfer_s.items()}
    return dataclasses.replace(problem, links=links, tensor_transfer_s=tables)


def with_speed(problem: Problem, device: int, factor: float) -> Problem:
    """Returns the problem with one device faster by a factor."""
    time_s, own = problem.time_s.copy(), np.ones(problem.num_ops, dtype=bool)
    own[[op for collective in problem.collectives for op in collective.ops]] = False
    time_s[own, device] /= factor
    return dataclasses.replace(problem, time_s=time_s)


def without_optimizer(problem: Problem, keep: float = 0.0) -> Problem:
    """Cuts optimizer state to a share of its bytes, rounded up, where its size is known."""
    known = np.maximum(problem.optimizer_bytes, 0)
    kept = np.ceil(known * keep).astype(np.int64)
    optimizer = np.where(problem.optimizer_bytes >= 0, kept, -1)
    return dataclasses.replace(problem, resident_bytes=problem.resident_bytes - known + kept, optimizer_bytes=optimizer)
