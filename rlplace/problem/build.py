"""A problem from plain lists; random ones of any size come from `rlplace.problem.generate`.

Problems as networkx graphs, so that any directed acyclic graph can be placed.

Node attributes: `group` (name, default: the node's own), `phase`, `time_s` (number or one per device, None where it cannot
run), `temporary_bytes`, `resident_bytes` and `device` (taken from the first node of a group that has them), `kind`. Edge
attributes: `bytes` and `tensor`: edges out of one node with equal `tensor` are the same tensor (sent once per device);
without the attribute every edge is a tensor of its own, parallel edges of a multigraph too.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rlplace.cluster.links import Device, Links
from rlplace.errors import InputError, show
from rlplace.limits import MAX_BYTES
from rlplace.problem.check import COLLECTIVE
from rlplace.problem.problem import PHASES, Collective, Problem

if TYPE_CHECKING:
    import networkx as nx

    from rlplace.cluster.parse import Cluster


class TensorSpec(NamedTuple):
    """One tensor of `build_problem`; `producer` is an op number, or None for a parameter of the group `owner`."""

    producer: int | None
    size_bytes: int
    consumers: Sequence[int]
    owner: int | None = None


TensorRow = tuple[int, int, int, Sequence[int]]
"""Producer or -1, owner or -1, bytes and consumers of a tensor."""


def tensor_fields(rows: Sequence[TensorRow]) -> dict[str, Any]:
    """Returns the fields of a `Problem` about its tensors."""
    producers, owners, sizes, consumers = zip(*rows, strict=True) if rows else ((), (), (), ())
    return {
        "tensor_producer": np.array(producers, dtype=np.int32),
        "tensor_owner": np.array(owners, dtype=np.int32),
        "tensor_bytes": np.array(sizes, dtype=np.int64),
        "consumer_ptr": np.cumsum([0, *map(len, consumers)], dtype=np.int64),
        "consumers": np.array(list(chain.from_iterable(consumers)), dtype=np.int32),
    }


def build_problem(
    name: str,
    *,
    time_s: Sequence[Sequence[float]],
    tensors: Sequence[TensorSpec],
    memory_bytes: Sequence[int | None],
    group: Sequence[int] | None = None,
    resident_bytes: Sequence[int] | None = None,
    temporary_bytes: Sequence[int] | None = None,
    phase: Sequence[int] | None = None,
    bandwidth_bytes_per_s: float | Sequence[Sequence[float]] = 1.0,
    latency_s: float | Sequence[Sequence[float]] = 0.0,
    links: Links | None = None,
    group_device: Sequence[int] | None = None,
    collectives: Sequence[tuple[Sequence[int], Sequence[int]]] = (),
) -> Problem:
    """Builds a problem from plain lists.

    Args:
        name: The problem's name.
        time_s: Per op its seconds on each device, NaN where it cannot run.
        tensors: The tensors.
        memory_bytes: Capacity per device, None for no limit.
        group: Group of each op; default one group per op.
        resident_bytes: Resident bytes per group, default 0.
        temporary_bytes: Temporary bytes per op, default 0.
        phase: Phase per op, default forward.
        bandwidth_bytes_per_s: One number for every pair, or a matrix.
        latency_s: One number for every pair, or a matrix.
        links: Links with channels, in place of bandwidth and latency.
        group_device: Per group the only allowed device, -1 where it is free (the default).
        collectives: Per collective its ops and its channels.
    """
    ops, devices = len(time_s), len(memory_bytes)
    op_group = np.arange(ops) if group is None else np.asarray(group)
    groups = int(op_group.max()) + 1 if resident_bytes is None else len(resident_bytes)
    if links is None:
        bandwidth = np.broadcast_to(np.asarray(bandwidth_bytes_per_s, dtype=np.float64), (devices, devices)).copy()
        latency = np.broadcast_to(np.asarray(latency_s, dtype=np.float64), (devices, devices)).copy()
        links = Links(bandwidth, latency)
    members = {op for took, _ in collectives for op in took}
    left_out: dict[str, Any] = {"resident_bytes": resident_bytes, "group_device": group_device}
    left_out |= {"op_phase": phase, "temporary_bytes": temporary_bytes}
    return Problem(
        name=name,
        devices=tuple(Device(f"gpu{i}", limit) for i, limit in enumerate(memory_bytes)),
        links=links,
        group_names=tuple(f"group{i}" for i in range(groups)),
        op_names=tuple(f"op{i}" for i in range(ops)),
        op_group=op_group.astype(np.int32),
        time_s=np.array(time_s, dtype=np.float64).reshape(ops, devices),
        **left_out,
        **tensor_fields(
            [(-1 if t.producer is None else t.producer, -1 if t.owner is None else t.owner, t[1], t[2]) for t in tensors]
        ),
        op_kind=tuple(COLLECTIVE if op in members else "" for op in range(ops)) if members else None,
        collectives=tuple(Collective(tuple(took), tuple(held)) for took, held in collectives),
    )


def problem_from_networkx(graph: nx.DiGraph, cluster: Cluster, *, name: str = "networkx") -> Problem:
    """Builds a problem from a directed acyclic graph with the attributes named in the module docstring."""
    if not hasattr(cluster, "to_problem_devices"):
        raise InputError(f"from_networkx: expected a Cluster, as Cluster.preset('a100-80g:4') gives, found {show(cluster)}")
    if not (hasattr(graph, "is_directed") and graph.is_directed()):
        raise InputError("from_networkx: expected a directed networkx graph; edges point from producer to consumer")
    devices, links = cluster.to_problem_devices()
    nodes = list(graph.nodes)
    index = {node: i for i, node in enumerate(nodes)}
    group_index: dict[str, int] = {}
    resident: dict[int, int] = {}
    fixed: dict[int, int] = {}
    op_group, times = [], []
    for node, data in graph.nodes(data=True):
        group = group_index.setdefault(str(data.get("group", node)), len(group_index))
        if data.get("resident_bytes") is not None:
            resident.setdefault(group, _whole(data["resident_bytes"], f"node {show(node)}: resident_bytes"))
        if data.get("device") is not None:
            fixed.setdefault(group, _whole(data["device"], f"node {show(node)}: device", len(devices) - 1))
        op_group.append(group)
        times.append(_times(data.get("time_s"), len(devices), node))
    tensors: dict[tuple[int, Any], set[int]] = {}
    sizes: dict[tuple[int, Any], int] = {}
    for number, (source, target, data) in enumerate(graph.edges(data=True)):
        tensor = data.get("tensor")
        if not isinstance(tensor, Hashable):
            raise InputError(f"edge {show(source)} to {show(target)}: tensor must be a number or a name, found {show(tensor)}")
        key = (index[source], ("edge", number) if tensor is None else tensor)
        tensors.setdefault(key, set()).add(index[target])
        sizes[key] = max(sizes.get(key, 0), _whole(data.get("bytes", 0), f"edge {show(source)} to {show(target)}: bytes"))
    kinds = tuple(str(d.get("kind") or "") for _, d in graph.nodes(data=True))
    temporary = [_whole(d.get("temporary_bytes", 0), f"node {show(n)}: temporary_bytes") for n, d in graph.nodes(data=True)]
    return Problem(
        name=name,
        devices=devices,
        links=links,
        group_names=tuple(group_index),
        resident_bytes=np.array([resident.get(g, 0) for g in range(len(group_index))]),
        group_device=np.array([fixed.get(g, -1) for g in range(len(group_index))]),
        op_names=tuple(str(node) for node in nodes),
        op_group=np.array(op_group),
        op_phase=np.array([_phase(d.get("phase", "forward"), n) for n, d in graph.nodes(data=True)]),
        time_s=np.array(times, dtype=np.float64).reshape(len(nodes), len(devices)),
        temporary_bytes=np.array(temporary, dtype=np.int64),
        **tensor_fields([(key[0], -1, sizes[key], sorted(readers)) for key, readers in tensors.items()]),
        op_kind=kinds if any(kinds) else None,
        source={"networkx": name},
    )


def _whole(value: Any, where: str, most: int = MAX_BYTES) -> int:
    try:
        whole = int(value)
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"{where}: {show(value)} is not a whole number") from None
    if whole != value or not 0 <= whole <= most:
        raise InputError(f"{where}: {show(value)} is not a whole number in 0..{most}")
    return whole


def _times(value: Any, num_devices: int, node: Any) -> list[float]:
    values = list(value) if isinstance(value, (list, tuple, np.ndarray)) else [value] * num_devices
    if len(values) != num_devices:
        raise InputError(f"node {show(node)}: time_s has {len(values)} values, the cluster has {num_devices} devices")
    for value in values:
        number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
        if value is not None and (not number or not abs(value) < 1e300):
            raise InputError(f"node {show(node)}: time_s is not a number in range; use None where the op cannot run")
    return [np.nan if v is None else float(v) for v in values]


def _phase(value: str, node: Any) -> int:
    if not isinstance(value, str) or value not in PHASES:
        raise InputError(f"node {show(node)}: phase {show(value)} is not one of {', '.join(PHASES)}")
    return PHASES.index(value)
