"""A problem from plain lists; random ones of any size come from `rlplace.problem.generate`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from rlplace.cluster.links import Device, Links
from rlplace.problem.check import COLLECTIVE
from rlplace.problem.problem import Collective, Problem


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
