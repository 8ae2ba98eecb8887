"""Problems of fewer or more pieces: one task per cluster and phase; the backward of a group apart from its forward."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InputError
from rlplace.model.capture.optimizers import OPTIMIZERS
from rlplace.model.graph.coarsen import Grouping
from rlplace.plan import PlacementPlan
from rlplace.problem import FORWARD, PHASES, Problem


@dataclass(frozen=True, eq=False)
class PricedOps:
    """Ops and tensors of a problem, at either level: fields and axes of `Problem`.

    Attributes:
        op_names: N unique names.
        op_group: int32 [N].
        op_phase: int8 [N].
        time_s: float64 [N, D].
        temporary_bytes: int64 [N].
        op_kind: N op kinds.
        tensor_producer: int32 [T], or -1.
        tensor_owner: int32 [T], or -1.
        tensor_bytes: int64 [T].
        consumer_ptr: int64 [T + 1].
        consumers: int32 [E].
    """

    op_names: tuple[str, ...]
    op_group: NDArray[np.int32]
    op_phase: NDArray[np.int8]
    time_s: NDArray[np.float64]
    temporary_bytes: NDArray[np.int64]
    op_kind: tuple[str, ...]
    tensor_producer: NDArray[np.int32]
    tensor_owner: NDArray[np.int32]
    tensor_bytes: NDArray[np.int64]
    consumer_ptr: NDArray[np.int64]
    consumers: NDArray[np.int32]


def contract_tasks(ops: PricedOps, grouping: Grouping) -> PricedOps:
    """Returns one task per cluster and phase.

    A task takes the sum of its ops' times and needs their inner live peak, minus what leaves it, as temporary memory. Tensors
    that stay inside a task disappear; those with the same producer (or owner) and the same consumers become one. An edge
    without bytes that another tensor between the same tasks implies is left out.
    """
    task, first = _tasks(ops, grouping)
    count = len(first)
    num_tensors = len(ops.tensor_bytes)
    edge_tensor = np.repeat(np.arange(num_tensors, dtype=np.int64), np.diff(ops.consumer_ptr))
    produced = ops.tensor_producer >= 0
    home = np.where(produced, task[np.maximum(ops.tensor_producer, 0)], -1)
    consumer_task = task[ops.consumers]
    inside = consumer_task == home[edge_tensor]

    last_use = np.where(produced, ops.tensor_producer, -1).astype(np.int64)
    np.maximum.at(last_use, edge_tensor[inside], ops.consumers[inside])
    last_use[edge_tensor[~inside]] = -1
    temporary = inner_temporary_bytes(
        task,
        count,
        ops.temporary_bytes,
        ops.tensor_producer[produced].astype(np.int64),
        last_use[produced],
        ops.tensor_bytes[produced],
    )
    time_s = np.zeros((count, ops.time_s.shape[1]))
    np.add.at(time_s, task, ops.time_s)
    producer, owner, size, consumers = _merge_tensors(ops, home, edge_tensor[~inside], consumer_task[~inside], count)
    return PricedOps(
        op_names=_task_names(ops, grouping, first),
        op_group=ops.op_group[first],
        op_phase=ops.op_phase[first],
        time_s=time_s,
        temporary_bytes=temporary,
        op_kind=_dominant_kinds(ops, task, count),
        tensor_producer=producer,
        tensor_owner=owner,
        tensor_bytes=size,
        consumer_ptr=np.concatenate([[0], np.cumsum([len(c) for c in consumers])]).astype(np.int64),
        consumers=np.array([c for row in consumers for c in row], dtype=np.int32),
    )


def _tasks(ops: PricedOps, grouping: Grouping) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the task of every op, numbered by first op, and that first op."""
    key = grouping.op_cluster.astype(np.int64) * len(PHASES) + ops.op_phase
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    number = np.empty(len(order), dtype=np.int64)
    number[order] = np.arange(len(order))
    return number[inverse], first[order]


def _task_names(ops: PricedOps, grouping: Grouping, first: NDArray[np.int64]) -> tuple[str, ...]:
    """Names tasks ``group/phase``; further clusters of one group get "#2", "#3", ... in the order of their first ops."""
    names: list[str] = []
    taken: set[str] = set()
    for group, phase in zip(ops.op_group[first].tolist(), ops.op_phase[first].tolist(), strict=True):
        base = name = f"{grouping.names[group]}/{PHASES[phase]}"
        number = 1
        while name in taken:
            number += 1
            name = f"{base}#{number}"
        taken.add(name)
        names.append(name)
    return tuple(names)


def _dominant_kinds(ops: PricedOps, task: NDArray[np.int64], count: int) -> tuple[str, ...]:
    """Returns per task the op kind that takes most of its time."""
    kinds = sorted(set(ops.op_kind))
    number = {kind: index for index, kind in enumerate(kinds)}
    code = np.fromiter((number[kind] for kind in ops.op_kind), dtype=np.int64, count=len(ops.op_kind))
    share = np.bincount(task * len(kinds) + code, weights=ops.time_s.mean(axis=1), minlength=count * len(kinds))
    return tuple(kinds[i] for i in share.reshape(count, len(kinds)).argmax(axis=1).tolist())


def _merge_tensors(
    ops: PricedOps, home: NDArray[np.int64], tensor: NDArray[np.int64], consumer_task: NDArray[np.int64], count: int
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int64], list[tuple[int, ...]]]:
    """Adds up tensors with the same producer or owner and the same consumer tasks."""
    pairs = np.unique(tensor * count + consumer_task)
    tensors, targets = pairs // count, (pairs % count).tolist()
    ids, starts = np.unique(tensors, return_index=True)
    ends = [*starts[1:].tolist(), len(pairs)][: len(ids)]
    total: dict[tuple[int, int, tuple[int, ...]], int] = {}
    rows = zip(
        ids.tolist(),
        starts.tolist(),
        ends,
        home[ids].tolist(),
        ops.tensor_owner[ids].tolist(),
        ops.tensor_bytes[ids].tolist(),
        strict=True,
    )
    for _, start, end, source, owner, size in rows:
        key = (source, owner, tuple(targets[start:end]))
        total[key] = total.get(key, 0) + size
    implied = {(source, target) for (source, _, row), size in total.items() if size and source >= 0 for target in row}
    kept = []
    for (source, owner, row), size in total.items():
        if size == 0 and source >= 0:
            row = tuple(target for target in row if (source, target) not in implied)
            implied.update((source, target) for target in row)
        if row and (size or source >= 0):
            kept.append((source, owner, size, row))
    kept.sort(key=lambda item: (item[0] < 0, item[0], item[1], item[3]))
    sources, owners, sizes, targets_of = zip(*kept, strict=True) if kept else ((), (), (), ())
    return np.array(sources, np.int32), np.array(owners, np.int32), np.array(sizes, np.int64), list(targets_of)


def inner_temporary_bytes(
    task: NDArray[np.int64],
    num_tasks: int,
    op_temporary_bytes: NDArray[np.int64],
    producer: NDArray[np.int64],
    last_use: NDArray[np.int64],
    tensor_bytes: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Computes temporary bytes of tasks that run their ops one after another.

    A task holds all tensors that leave it from its start to its end; on top of them it needs its inner peak, as far as that
    exceeds them. Ops run in order of their number within each task.

    Args:
        task: int [N], the task of every op.
        num_tasks: Number of tasks.
        op_temporary_bytes: int [N].
        producer: int [T], of tensors that ops make.
        last_use: int [T], the last op of the producer's own task that reads the tensor; the producer itself when none
            reads it; -1 when the tensor leaves the task.
        tensor_bytes: int [T].

    Returns:
        int64 [num_tasks].
    """
    count = len(task)
    sequence = np.argsort(task, kind="stable")  # ops of a task are neighbours, in order
    position = np.empty(count, dtype=np.int64)
    position[sequence] = np.arange(count)
    start = np.searchsorted(task[sequence], np.arange(num_tasks + 1))
    leaves = last_use < 0
    end = np.where(leaves, start[task[producer] + 1] - 1, position[np.maximum(last_use, 0)])
    change = np.zeros(count + 1, dtype=np.int64)
    np.add.at(change, position[producer], tensor_bytes)
    np.add.at(change, end + 1, -tensor_bytes)
    live = np.cumsum(change[:-1]) + op_temporary_bytes[sequence]
    peak = np.zeros(num_tasks, dtype=np.int64)
    held = start[1:] > start[:-1]
    if held.any():
        peak[held] = np.maximum.reduceat(live, start[:-1][held])
    leaving = np.zeros(num_tasks, dtype=np.int64)
    np.add.at(leaving, task[producer[leaves]], tensor_bytes[leaves])
    return np.maximum(peak - leaving, 0)


def foreach_update_bytes(
    problem: Problem, plan: PlacementPlan, optimizer: str, *, master_weights: bool = False
) -> NDArray[np.int64]:
    """Computes the memory of every device while torch's foreach update runs: resident bytes and the copies of the update.

    Activations are gone by then. The executor's peaks leave the copies out (an op of one group knows nothing of the others),
    so where this exceeds them a plan needs ``fused=True`` or ``foreach=False``.

    Args:
        problem: The problem.
        plan: A plan for it.
        optimizer: One of `rlplace.model.capture.optimizers.OPTIMIZERS`.
        master_weights: Whether the state holds a float32 copy of the weights besides its moments.

    Returns:
        int64 [D], 0 for devices that hold no group.
    """
    kind = OPTIMIZERS[optimizer]
    copies = kind.moments + master_weights
    held = np.maximum(problem.optimizer_bytes, 0)
    extra = held * kind.foreach_temporaries // copies if copies else np.zeros_like(held)
    total = np.zeros(problem.num_devices, dtype=np.int64)
    np.add.at(total, plan.device_of_group, problem.resident_bytes + extra)
    reserved = np.array([device.reserved_bytes for device in problem.devices], dtype=np.int64)
    return np.where(total > 0, total + reserved, 0)


def split_backward(problem: Problem) -> Problem:
    """Gives the forward and the backward + update of every group a group of their own.

    The second group ("NAME.backward") owns the weights with their gradients and optimizer state; the first reads the weights
    as an owner's tensor. Saved activations are ordinary tensors from the one to the other already. A group whose parts are
    not given counts all its resident bytes as weights; a group with ops of one side only is not split.

    Args:
        problem: Any problem whose groups are not split yet.

    Returns:
        A problem with the same ops; groups keep their order, each followed by its backward group.

    Raises:
        InputError: A group called "NAME.backward" exists already beside "NAME".
    """
    forward = problem.op_phase == FORWARD
    has_forward, has_other = np.zeros((2, problem.num_groups), dtype=bool)
    has_forward[problem.op_group[forward]] = True
    has_other[problem.op_group[~forward]] = True
    split = has_forward & has_other
    first = np.arange(problem.num_groups) + np.concatenate([[0], np.cumsum(split)[:-1]])
    second = first + split  # owns the weights
    count = problem.num_groups + int(split.sum())
    origin = np.zeros(count, dtype=np.int64)
    origin[second], origin[first] = np.arange(problem.num_groups), np.arange(problem.num_groups)

    backward = np.zeros(count, dtype=bool)
    backward[second[split]] = True
    groups = list(zip(origin.tolist(), backward.tolist(), strict=True))
    names = [f"{problem.group_names[group]}.backward" if later else problem.group_names[group] for group, later in groups]
    ops, modules = problem.group_ops, problem.group_modules
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"split_backward: group {twice[:80]!r} exists already; the problem is split or uses that name")

    resident, weight, gradient, optimizer = np.zeros((4, count), dtype=np.int64)
    resident[second] = problem.resident_bytes
    for part, whole in (
        (weight, problem.weight_bytes),
        (gradient, problem.gradient_bytes),
        (optimizer, problem.optimizer_bytes),
    ):
        part[second] = whole
        part[first[split & (whole < 0)]] = -1
    read_bytes = np.where(problem.weight_bytes >= 0, problem.weight_bytes, problem.resident_bytes)

    owner = np.where(problem.tensor_owner >= 0, second[np.maximum(problem.tensor_owner, 0)], -1).astype(np.int32)
    op_group = np.where(forward, first[problem.op_group], second[problem.op_group]).astype(np.int32)
    readers = [np.flatnonzero(forward & (problem.op_group == g)) for g in np.flatnonzero(split & (read_bytes > 0))]
    owned = np.flatnonzero(split & (read_bytes > 0))
    return dataclasses.replace(
        problem,
        group_names=tuple(names),
        resident_bytes=resident,
        weight_bytes=weight,
        gradient_bytes=gradient,
        optimizer_bytes=optimizer,
        group_device=problem.group_device[origin],
        op_group=op_group,
        tensor_producer=np.concatenate([problem.tensor_producer, np.full(len(owned), -1, dtype=np.int32)]),
        tensor_owner=np.concatenate([owner, second[owned].astype(np.int32)]),
        tensor_bytes=np.concatenate([problem.tensor_bytes, read_bytes[owned]]),
        consumer_ptr=np.concatenate(
            [problem.consumer_ptr, problem.consumer_ptr[-1] + np.cumsum([len(r) for r in readers], dtype=np.int64)]
        ),
        consumers=np.concatenate([problem.consumers, *readers]).astype(np.int32),
        source={**(problem.source or {}), "split_backward": True},
        group_ops=None if ops is None else tuple(() if later else ops[group] for group, later in groups),
        group_modules=None if modules is None else tuple(modules[group] for group, _ in groups),
    )
