"""Emulated hosts as a cluster that plans can be made for: from what was asked for, or from what their links measure."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from rlplace.cluster.links import Device
from rlplace.cluster.machines import host_processor
from rlplace.cluster.parse import Cluster
from rlplace.cluster.presets import DeviceKind, cpu_kind
from rlplace.cluster.topology import Resource, Topology, TransferPath, lower
from rlplace.errors import InputError, MissingError, RlplaceError
from tools.hosts.emulate import Hosts
from tools.hosts.launch import launch
from tools.hosts.spec import HostsSpec

PAYLOAD_FRACTION = 1448 / 1514
"""TCP payload of a full Ethernet frame over what the shaping counts of it."""

LATENCY_S = 60e-6
"""A small message between two processes over gloo, one way."""


LARGE_BYTES = 1 << 20
"""Messages from this size on tell the bandwidth."""


def cluster_of(
    spec: HostsSpec,
    *,
    kinds: Sequence[DeviceKind] | None = None,
    memory_bytes: int | None = None,
    latency_s: float = LATENCY_S,
) -> Cluster:
    """Returns the cluster that these hosts should be: one processor device a host, links as they are shaped.

    A transfer holds its sender's card and its receiver's, or the link of its pair where the rates are given by pair.

    Args:
        spec: The hosts; they need not exist.
        kinds: What the device of each host can do; None takes the share that each host has of this machine's cores.
        memory_bytes: Memory of each host; None divides this machine's memory evenly.
        latency_s: One-way latency of a small message.

    Raises:
        InputError: Not one kind for each host.
        MissingError: The size of this machine's memory is unknown and was not given.
    """
    memory = host_processor()[1] // spec.hosts if memory_bytes is None else memory_bytes
    if memory <= 0:
        raise MissingError("hosts: the size of this machine's memory is unknown; give memory_bytes")
    chosen = _kinds(spec, memory) if kinds is None else tuple(kinds)
    if len(chosen) != spec.hosts:
        raise InputError(f"hosts: {len(chosen)} kinds for {spec.hosts} hosts; give one for each")
    devices = tuple(Device(f"cpu{i}", memory, kind.reserved_bytes, kind.name) for i, kind in enumerate(chosen))
    links = lower(_topology(spec, latency_s))
    return Cluster(f"{spec.hosts} emulated hosts", devices, chosen, links, tuple(range(spec.hosts)))


def measure_cluster(
    hosts: Hosts, *, repeats: int = 25, time_limit_s: float = 60.0, kinds: Sequence[DeviceKind] | None = None
) -> Cluster:
    """Returns the cluster of these hosts with the links that ``rlplace measure --links`` finds between them.

    Devices and the channels that transfers share are those of `cluster_of`; latency, bandwidth and the curves of all-reduce
    are measured. Bandwidth is the rise between messages of 1 MiB and more, latency the time of the shortest message: what
    lies between rides the token bucket and would pull both.

    Args:
        hosts: Two or more, from `emulated_hosts`.
        repeats: Timed messages of each size.
        time_limit_s: Seconds of timing, roughly.
        kinds: As in `cluster_of`.

    Raises:
        RlplaceError: The measurement failed; says on which rank and why.
    """
    drawn = cluster_of(hosts.spec, kinds=kinds)
    if hosts.spec.hosts < 2:
        raise InputError("hosts: one host has no links to measure")
    said: list[str] = []

    def keep(rank: int, host: int, stream: int, line: str) -> None:
        if rank == 0 and stream == 1:
            said.append(line)

    with tempfile.TemporaryDirectory(prefix="rlplace-hosts-") as folder:
        out = Path(folder) / "links.toml"
        command = [sys.executable, "-m", "rlplace", "measure", "--links", "--json", "--out", str(out)]
        command += ["--repeats", str(repeats), "--time-limit", str(time_limit_s)]
        with launch(hosts, command, sink=keep) as job:
            job.wait(10 * time_limit_s + 480)
            job.check()
        measured = Cluster.load(out)
    latency, bandwidth = _fit(json.loads("\n".join(said)), hosts.spec.hosts)
    links = dataclasses.replace(
        measured.links, latency_s=latency, bandwidth_bytes_per_s=bandwidth, channels=drawn.links.channels
    )
    return dataclasses.replace(drawn, name=f"{drawn.name}, links measured", links=links)


def _fit(facts: dict[str, Any], count: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns latency and bandwidth of every ordered pair, from the pairs as the verb lists them: row by row, no diagonal."""
    latency, bandwidth = np.zeros((count, count)), np.zeros((count, count))
    size = np.array(facts["pair_bytes"], dtype=np.float64)
    large = np.flatnonzero(size >= LARGE_BYTES)
    pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
    for (i, j), pair in zip(pairs, facts["pairs"], strict=True):
        seconds = np.array(pair["seconds"])
        rises = [(seconds[b] - seconds[a]) / (size[b] - size[a]) for a, b in itertools.combinations(large, 2)]
        slope = float(np.median(rises))
        if slope <= 0:
            raise RlplaceError(f"hosts: from host {i} to {j} larger messages took no longer; measure on a quieter machine")
        bandwidth[i, j] = 1 / slope
        latency[i, j] = seconds[0]
    return latency, bandwidth


def cores_of(spec: HostsSpec, usable: int | None = None) -> tuple[float, ...]:
    """Returns cores' worth of this machine that each host has when all of them compute.

    Args:
        spec: The hosts.
        usable: Cores that they may use together; None takes those of this process.
    """
    total = len(os.sched_getaffinity(0)) if usable is None else usable
    pinned = Counter(core for cores in spec.cpus or () for core in cores)
    cores_by_host = []
    for host in range(spec.hosts):
        mine = total / spec.hosts if spec.cpus is None else sum(1 / pinned[core] for core in spec.cpus[host])
        cores_by_host.append(mine)
    return tuple(cores_by_host)


def _kinds(spec: HostsSpec, memory_bytes: int) -> tuple[DeviceKind, ...]:
    cores = cores_of(spec)
    return tuple(_kind(mine, memory_bytes, "cpu" if len(set(cores)) == 1 else f"cpu-{mine:.4g}") for mine in cores)


def _kind(cores: float, memory_bytes: int, name: str) -> DeviceKind:
    """Returns a processor with a share of cores: everything takes longer by the share that is missing."""
    whole = max(1, int(cores))
    kind, speed = cpu_kind(whole, memory_bytes, name), min(1.0, cores / whole)
    return msgspec.structs.replace(
        kind,
        peak_flops=MappingProxyType({dtype: peak * speed for dtype, peak in kind.peak_flops.items()}),
        memory_bandwidth_bytes_per_s=kind.memory_bandwidth_bytes_per_s * speed,
        launch_s=kind.launch_s / speed,
    )


def _topology(spec: HostsSpec, latency_s: float) -> Topology:
    count = spec.hosts
    pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
    rate = {(i, j): spec.rate_between(i, j) / 8 * PAYLOAD_FRACTION for i, j in pairs}
    if spec.per_pair:
        resources = [Resource(f"link {i}-{j}", rate[i, j]) for i, j in pairs]
        paths = {pair: TransferPath((number,), latency_s) for number, pair in enumerate(pairs)}
    else:
        one = next(iter(rate.values()), 1.0)
        resources = [Resource(f"nic {way} {host}", one) for way in ("out", "in") for host in range(count)]
        paths = {(i, j): TransferPath((i, count + j), latency_s) for i, j in pairs}
    return Topology(count, tuple(resources), paths)
