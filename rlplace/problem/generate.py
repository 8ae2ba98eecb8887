"""Random training steps: graphs of groups with forward, backward and update ops, priced for made-up devices."""

from __future__ import annotations

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from rlplace.cluster.links import Channels, Device, Links
from rlplace.errors import InputError, unknown_name
from rlplace.problem.build import TensorRow, tensor_fields
from rlplace.problem.problem import BACKWARD, FORWARD, UPDATE, Problem

SHAPES = ("layered", "branchy", "chain", "towers", "wavefront")

MEAN_FORWARD_S = 1e-3
LATENCY_S = 1e-5
BANDWIDTH_BYTES_PER_S = 2e10


def random_problem(
    seed: int,
    num_groups: int = 32,
    num_devices: int = 4,
    *,
    shape: str = "layered",
    width: int = 4,
    training: bool = True,
    unlike: bool = False,
    memory_factor: float | None = None,
    comm_ratio: float = 0.3,
    hosts: int = 1,
    shared_parameters: int = 0,
    null_fraction: float = 0.0,
) -> Problem:
    """Returns a random problem; equal arguments give equal problems.

    Args:
        seed: Seed of the random numbers.
        num_groups: G. The problem has three ops a group when `training`, else one.
        num_devices: D.
        shape: How groups feed each other: ``"layered"`` (layers of about `width` groups, each fed by one to three groups of the
            layer before), ``"branchy"`` (blocks of up to `width` parallel branches between a fork and a join, as in Inception),
            ``"chain"`` (one chain with a few skip connections), ``"towers"`` (`width` chains side by side with a few links
            between them, joined by a short chain) or ``"wavefront"`` (a grid of `width` rows in which each group feeds the next
            of its row and of its column, as an unrolled stack of recurrent layers).
        width: Groups side by side, in the sense of `shape`.
        training: Forward, backward and update ops with saved activations; False: forward ops only.
        unlike: Whether devices differ in speed, by factors of 1, 2 and 4, and in memory.
        memory_factor: Memory of all devices together, relative to the resident bytes and all activations of the step; 1.1 is
            tight, 2 comfortable. None: no limits. Every device holds at least the largest group. Not every problem with a
            limit has a feasible plan.
        comm_ratio: Mean time of a transfer within a host relative to the mean time of a forward op.
        hosts: Devices are dealt to this many hosts in equal blocks. Links between hosts are eight times slower, and each such
            transfer holds the network cards of both hosts.
        shared_parameters: Tensors of an owner group that up to three other groups read, as tied weights do.
        null_fraction: Share of groups that one of the devices cannot run.
    """
    if shape not in SHAPES:
        raise unknown_name("shape", shape, SHAPES)
    if num_groups < 1 or num_devices < 1 or width < 1 or not 1 <= hosts <= num_devices:
        raise InputError("random_problem: num_groups, num_devices and width must be at least 1, hosts in 1..num_devices")
    rng = np.random.default_rng(seed)
    edges = _EDGES[shape](rng, num_groups, width)
    phases = 3 if training else 1
    op_group = np.repeat(np.arange(num_groups, dtype=np.int32), phases)
    op_phase = np.tile(np.array([FORWARD, BACKWARD, UPDATE][:phases], dtype=np.int8), num_groups)
    time_s = _times(rng, num_groups, num_devices, phases, unlike, null_fraction)
    mean_bytes = comm_ratio * MEAN_FORWARD_S * BANDWIDTH_BYTES_PER_S
    activation = np.maximum(1, mean_bytes * rng.lognormal(-0.32, 0.8, num_groups)).astype(np.int64)
    weight = np.where(rng.random(num_groups) < 0.2, 0, 2 * mean_bytes * rng.lognormal(-0.5, 1.0, num_groups)).astype(np.int64)
    gradient, optimizer = (weight, 2 * weight) if training else (0 * weight, 0 * weight)
    tensors = _tensors(edges, activation, training)
    for _ in range(shared_parameters if num_groups > 1 else 0):
        owner, *readers = rng.permutation(num_groups)[: rng.integers(2, 5)].tolist()
        tensors.append((-1, owner, int(weight[owner]), sorted(phases * reader for reader in readers)))
    resident = weight + gradient + optimizer
    return Problem(
        name=f"random_{shape}_{num_groups}x{num_devices}_{seed}",
        samples_per_microbatch=8,
        devices=_devices(num_devices, resident, activation, unlike, memory_factor),
        links=_links(num_devices, hosts),
        group_names=tuple(f"group{i}" for i in range(num_groups)),
        resident_bytes=resident,
        weight_bytes=weight.copy(),
        gradient_bytes=gradient.copy(),
        optimizer_bytes=optimizer,
        op_names=tuple(f"group{i}/{('forward', 'backward', 'update')[p]}" for i in range(num_groups) for p in range(phases)),
        op_group=op_group,
        op_phase=op_phase,
        time_s=time_s,
        temporary_bytes=np.where(op_phase == UPDATE, 0, activation[op_group] // 2),
        **tensor_fields(tensors),
    )


def _chain(rng: Generator, count: int, width: int) -> list[tuple[int, int]]:
    skips = [(i, min(count - 1, i + int(rng.integers(2, 2 + width)))) for i in range(count - 2) if rng.random() < 0.15]
    return sorted({(i, i + 1) for i in range(count - 1)} | set(skips))


def _layered(rng: Generator, count: int, width: int) -> list[tuple[int, int]]:
    edges: set[tuple[int, int]] = set()
    before: list[int] = []
    start = 0
    while start < count:
        layer = list(range(start, min(count, start + int(rng.integers(max(1, width // 2), width + width // 2 + 1)))))
        for group in layer:
            for source in rng.permutation(before)[: rng.integers(1, 4)].tolist():
                edges.add((source, group))
        before, start = layer, start + len(layer)
    return sorted(edges)


def _branchy(rng: Generator, count: int, width: int) -> list[tuple[int, int]]:
    edges: set[tuple[int, int]] = set()
    fork, free = 0, 1
    while free < count:
        ends = []
        for _ in range(int(rng.integers(1, width + 1))):
            last = fork
            for _ in range(int(rng.integers(1, 4))):
                if free < count - 1:
                    edges.add((last, free))
                    last, free = free, free + 1
            ends.append(last)
        edges |= {(end, free) for end in ends}
        fork, free = free, free + 1
    return sorted(edges)


def _towers(rng: Generator, count: int, width: int) -> list[tuple[int, int]]:
    tail = max(1, count // 10)  # the last groups are the chain that joins the towers; group i < body is in tower i % width
    body, width = count - tail, max(1, min(width, count - tail))
    edges = {(i, i + width) for i in range(body - width)}
    edges |= {(i, min(body - 1, i + width + 1)) for i in range(body - width - 1) if rng.random() < 0.05}
    edges |= {(i, body) for i in range(max(0, body - width), body)}
    return sorted(edges | {(i, i + 1) for i in range(body, count - 1)})


def _wavefront(rng: Generator, count: int, width: int) -> list[tuple[int, int]]:
    rows = min(width, count)  # group i is in row i % rows
    down = {(i, i + 1) for i in range(count - 1) if (i + 1) % rows}
    return sorted(down | {(i, i + rows) for i in range(count - rows)})


_EDGES = {"layered": _layered, "branchy": _branchy, "chain": _chain, "towers": _towers, "wavefront": _wavefront}


def _times(rng: Generator, groups: int, devices: int, phases: int, unlike: bool, null_fraction: float) -> NDArray[np.float64]:
    forward = MEAN_FORWARD_S * rng.lognormal(-0.32, 0.8, groups)
    base = np.stack([forward, 2 * forward, 0.05 * forward][:phases], axis=1)
    speed = 2.0 ** rng.integers(0, 3, devices) if unlike else np.ones(devices)
    times = base[:, :, None] * speed
    if devices > 1:
        barred = np.flatnonzero(rng.random(groups) < null_fraction)
        times[barred, :, rng.integers(0, devices, len(barred))] = np.nan
    return times.reshape(groups * phases, devices)


def _tensors(edges: list[tuple[int, int]], activation: NDArray[np.int64], training: bool) -> list[TensorRow]:
    """Returns the row of every tensor; ops of group g are 3 g, 3 g + 1 and 3 g + 2 when training."""
    following: list[list[int]] = [[] for _ in activation]
    for source, target in edges:
        following[source].append(target)
    step = 3 if training else 1
    tensors: list[TensorRow] = []
    for group, size in enumerate(activation.tolist()):
        saved = [step * group + 1] if training else []  # the backward op reads its group's output
        readers = sorted(saved + [step * target for target in following[group]])
        if readers:
            tensors.append((step * group, -1, size, readers))
        if training:
            tensors.append((step * group + 1, -1, 0, [step * group + 2]))
    if training:  # the gradient of an activation goes back along its edge
        tensors += [(3 * target + 1, -1, int(activation[source]), [3 * source + 1]) for source, target in edges]
    return tensors


def _devices(
    count: int, resident: NDArray[np.int64], activation: NDArray[np.int64], unlike: bool, memory_factor: float | None
) -> tuple[Device, ...]:
    if memory_factor is None:
        return tuple(Device(f"gpu{i}") for i in range(count))
    least = int((resident + 3 * activation).max())
    share = np.array([1.0 + (i % 2) * unlike for i in range(count)])
    share *= memory_factor * float(resident.sum() + activation.sum()) / share.sum()
    return tuple(Device(f"gpu{i}", max(least, int(part))) for i, part in enumerate(share.tolist()))


def _links(count: int, hosts: int) -> Links:
    host = np.arange(count) * hosts // count
    same = host[:, None] == host[None, :]
    bandwidth = np.where(same, BANDWIDTH_BYTES_PER_S, BANDWIDTH_BYTES_PER_S / 8)
    latency = np.where(same, LATENCY_S, 3 * LATENCY_S)
    channels: Channels | None = None
    if hosts > 1:  # channels 2 h and 2 h + 1 are host h's network card, sending and receiving; the rest are pairs in a host
        channels = tuple(
            tuple(
                () if i == j
                else (2 * hosts + i * count + j,) if same[i, j]
                else (2 * int(host[i]), 2 * int(host[j]) + 1)
                for j in range(count)
            )
            for i in range(count)
        )  # fmt: skip
    return Links(bandwidth, latency, channels)
