"""Data-parallel replicas: copies of a problem, and the collectives that keep their weights equal."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InputError
from rlplace.plan.plan import PlacementPlan
from rlplace.problem import BACKWARD, BACKWARD_WEIGHT, UPDATE, Collective, Problem
from rlplace.problem.build import tensor_fields, tensor_rows
from rlplace.problem.check import COLLECTIVE
from rlplace.problem.collectives import COMPUTE_SLOWDOWN, collective_channels, collective_s
from rlplace.simulator.lowering import lower

FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20
"""Gradient buckets of DistributedDataParallel: the first one is small so that communication starts early."""


def copy_problem(problem: Problem, count: int) -> Problem:
    """`count` independent copies of a problem on the same devices."""
    groups, ops, tensors = problem.num_groups, problem.num_ops, problem.num_tensors

    def shifted(values: NDArray[Any], step: int) -> NDArray[Any]:
        return np.concatenate([np.where(values >= 0, values + copy * step, values) for copy in range(count)]).astype(
            values.dtype
        )

    def named(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(f"{name}@{copy}" for copy in range(count) for name in names)

    tiled: dict[str, Any] = {
        name: np.tile(getattr(problem, name), count)
        for name in (
            "resident_bytes", "weight_bytes", "gradient_bytes", "optimizer_bytes", "group_device", "op_phase",
            "temporary_bytes", "tensor_bytes",
        )
    }  # fmt: skip
    edges = len(problem.consumers)
    ends = [problem.consumer_ptr[1:] + copy * edges for copy in range(count)]
    return Problem(
        name=problem.name,
        samples_per_microbatch=problem.samples_per_microbatch * count,
        devices=problem.devices,
        links=problem.links,
        group_names=named(problem.group_names),
        op_names=named(problem.op_names),
        op_group=shifted(problem.op_group, groups),
        time_s=np.tile(problem.time_s, (count, 1)),
        tensor_producer=shifted(problem.tensor_producer, ops),
        tensor_owner=shifted(problem.tensor_owner, groups),
        consumer_ptr=np.concatenate([[0], *ends]).astype(np.int64),
        consumers=shifted(problem.consumers, ops),
        op_kind=None if problem.op_kind is None else problem.op_kind * count,
        op_dims={op + copy * ops: dims for copy in range(count) for op, dims in problem.op_dims.items()},
        tensor_transfer_s={t + copy * tensors: m for copy in range(count) for t, m in problem.tensor_transfer_s.items()},
        collectives=tuple(
            Collective(tuple(op + copy * ops for op in c.ops), c.channels) for copy in range(count) for c in problem.collectives
        ),
        source=problem.source,
        **tiled,
    )


@dataclass(frozen=True)
class Bucket:
    """Groups of one of the plan's devices whose gradients travel together."""

    device: int
    groups: tuple[int, ...]
    size_bytes: int


def bucket_slices(sizes: Sequence[int]) -> list[slice]:
    """The buckets that gradients of so many bytes fill in turn, as slices of the list."""
    ends, filled, limit = [0], 0, FIRST_BUCKET_BYTES
    for end, size in enumerate(sizes, 1):
        filled += size
        if filled >= limit or end == len(sizes):
            ends.append(end)
            filled, limit = 0, BUCKET_BYTES
    return [slice(*both) for both in pairwise(ends)]


def gradient_buckets(problem: Problem, device_of_group: NDArray[np.int32]) -> list[Bucket]:
    """The gradient buckets of every device, in the order in which they fill.

    Groups fill them in the order in which their gradients are complete: longest way to the end of the step first.

    Raises:
        InputError: A group is updated from gradients but the problem does not say how large they are.
    """
    tensor, reader = problem.edge_tensor, problem.consumers
    gradient = gradient_edges(problem)
    level = lower(problem).priority
    complete: dict[int, float] = {}  # group -> bottom level of the last op that adds to its gradients
    for edge in np.flatnonzero(gradient).tolist():
        group = int(problem.op_group[reader[edge]])
        complete[group] = min(complete.get(group, np.inf), float(level[problem.tensor_producer[tensor[edge]]]))
    buckets = []
    for device in range(problem.num_devices):
        groups = sorted((g for g in complete if device_of_group[g] == device), key=lambda g: (-complete[g], g))
        for group in groups:
            if problem.gradient_bytes[group] < 0:
                raise InputError(
                    f"plan: replicas exchange gradients, but group {problem.group_names[group]!r} does not say how large they "
                    "are; give weight_bytes, gradient_bytes and optimizer_bytes"
                )
        sizes = problem.gradient_bytes[groups].tolist()
        buckets += [Bucket(device, tuple(groups[part]), sum(sizes[part])) for part in bucket_slices(sizes)]
    return buckets


def gradient_edges(problem: Problem) -> NDArray[np.bool_]:
    """Marks [E] where an update op reads what a forward or backward op makes."""
    producer = problem.tensor_producer[problem.edge_tensor]
    into_update = (producer >= 0) & (problem.op_phase[problem.consumers] == UPDATE)
    return into_update & (problem.op_phase[np.maximum(producer, 0)] != UPDATE)


def reduce_gradients(problem: Problem, copies: Problem, plan: PlacementPlan, rows: list[list[int]]) -> Problem:
    """`copies` with the buckets' collectives between gradients and updates."""
    count, sharded = len(rows), plan.optimizer_sharding
    buckets = gradient_buckets(problem, plan.device_of_group)
    bucket_of_group = np.full(problem.num_groups, -1, dtype=np.int64)
    for index, bucket in enumerate(buckets):
        bucket_of_group[list(bucket.groups)] = index
    devices = [[row[bucket.device] for row in rows] for bucket in buckets]
    held = [collective_channels(problem.links, list(peers)) for peers in devices]
    kind = "reduce_scatter" if sharded else "all_reduce"
    seconds = [collective_s(problem.links, kind, peers, b.size_bytes) for peers, b in zip(devices, buckets, strict=True)]
    first = copies.num_ops  # the op of bucket b and replica r is first + b * count + r

    # Updates wait for their bucket, buckets for the gradients.
    gradient, reader = gradient_edges(copies), copies.consumers
    copy, group = np.divmod(copies.op_group[reader].astype(np.int64), problem.num_groups)
    target = np.where(gradient, first + bucket_of_group[group] * count + copy, reader).tolist()
    begins = copies.consumer_ptr.tolist()
    tensors = [  # a bucket reads a tensor once
        (*row[:3], sorted(set(target[begins[tensor] : begins[tensor + 1]]))) for tensor, row in enumerate(tensor_rows(copies))
    ]
    names: list[str] = []
    groups: list[int] = []
    times: list[float] = []
    hosts: list[int] = []
    collectives = list(copies.collectives)
    updates = np.flatnonzero(copies.op_phase == UPDATE)
    by_member: dict[tuple[int, int], list[int]] = {}
    for op in updates.tolist():
        r, g = divmod(int(copies.op_group[op]), problem.num_groups)
        if bucket_of_group[g] >= 0:
            by_member.setdefault((int(bucket_of_group[g]), r), []).append(op)

    def exchange(what: str, index: int, took_s: float) -> Iterator[tuple[int, list[int]]]:
        """Adds a collective of a bucket; yields its op and the updates of each replica."""
        begin = first + len(names)
        collectives.append(Collective(tuple(range(begin, begin + count)), held[index]))
        for r in range(count):
            names.append(f"{what}.{buckets[index].device}.{index}@{r}")
            groups.append(r * problem.num_groups + buckets[index].groups[0])
            times.append(took_s)
            hosts.append(devices[index][r])
            yield begin + r, by_member[index, r]

    for index in range(len(buckets)):
        tensors += [(op, -1, 0, readers) for op, readers in exchange(kind, index, seconds[index])]
    for index, bucket in enumerate(buckets if sharded else ()):
        weights = int(problem.weight_bytes[list(bucket.groups)].sum())
        back_s = collective_s(problem.links, "all_gather", devices[index], weights)
        tensors += [(update, -1, 0, [op]) for op, updated in exchange("all_gather", index, back_s) for update in updated]
    together = np.repeat(np.array(times, dtype=np.float64), copies.num_devices).reshape(-1, copies.num_devices)
    apart = np.flatnonzero(np.isinf(together).any(axis=1))  # no links join the replicas: the collective cannot run
    together[apart] = 0.0
    together[apart, np.array(hosts, dtype=np.int64)[apart]] = np.nan
    time_s = np.concatenate([_slowed(copies, problem, buckets, seconds, plan, rows), together])
    optimizer, resident = copies.optimizer_bytes, copies.resident_bytes
    if sharded:
        time_s[updates] /= count
        kept = np.where(optimizer > 0, -(-optimizer // count), optimizer)
        resident, optimizer = resident - np.maximum(optimizer, 0) + np.maximum(kept, 0), kept
    changed: dict[str, Any] = {
        "op_names": copies.op_names + tuple(names),
        "op_group": np.concatenate([copies.op_group, np.array(groups, dtype=np.int32)]),
        "op_phase": np.concatenate([copies.op_phase, np.full(len(names), UPDATE, dtype=np.int8)]),
        "time_s": time_s,
        "temporary_bytes": np.concatenate([copies.temporary_bytes, np.zeros(len(names), dtype=np.int64)]),
        **tensor_fields(tensors),
        "op_kind": (copies.op_kind or ("",) * copies.num_ops) + (COLLECTIVE,) * len(names),
        "collectives": tuple(collectives),
        "optimizer_bytes": optimizer,
        "resident_bytes": resident,
    }
    return dataclasses.replace(copies, **changed)


def _slowed(
    copies: Problem, problem: Problem, buckets: list[Bucket], seconds: list[float], plan: PlacementPlan, rows: list[list[int]]
) -> NDArray[np.float64]:
    """Op times of the copies, the backward ones with their share of compute that runs under a collective."""
    time_s = copies.time_s.copy()
    backward = (problem.op_phase == BACKWARD) | (problem.op_phase == BACKWARD_WEIGHT)
    device_of_op = plan.device_of_group[problem.op_group]
    for device in range(problem.num_devices):
        here = np.flatnonzero(backward & (device_of_op == device))
        under = sum([s for bucket, s in zip(buckets, seconds, strict=True) if bucket.device == device][:-1])
        for copy, row in enumerate(rows if len(here) else ()):
            total = float(np.nansum(problem.time_s[here, row[device]]))
            share = min(under, total) / total / plan.microbatches if total > 0.0 else 0.0
            time_s[here + copy * problem.num_ops] *= 1.0 + (COMPUTE_SLOWDOWN - 1.0) * share
    return time_s
