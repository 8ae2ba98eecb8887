"""Problems of fewer or more pieces: one task per cluster and phase; the backward of a group apart from its forward."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InputError
from rlplace.model.capture.optimizers import OPTIMIZERS
from rlplace.model.graph.coarsen import Grouping
from rlplace.plan import PlacementPlan
from rlplace.problem import FORWARD, PHASES, Problem
from rlplace.problem.build import TensorRow, tensor_fields
from rlplace.problem.contract import alike, crossing


def contract_tasks(problem: Problem, grouping: Grouping) -> Problem:
    """Returns the problem with one task per cluster and phase.

    A task takes the sum of its ops' times and needs their inner live peak, minus what leaves it, as temporary memory. Tensors
    that stay inside a task disappear; those with the same producer (or owner) and the same consumers become one. An edge
    without bytes that another tensor between the same tasks implies is left out.

    Args:
        problem: The problem with every captured op.
        grouping: Clusters of its ops.
    """
    task, first = _tasks(problem, grouping)
    count = len(first)
    tensor, produced = problem.edge_tensor, problem.tensor_producer >= 0
    home = np.where(produced, task[np.maximum(problem.tensor_producer, 0)], -1)
    reader = task[problem.consumers]
    apart = reader != home[tensor]
    last_use = problem.tensor_producer.astype(np.int64)
    np.maximum.at(last_use, tensor[~apart], problem.consumers[~apart])
    last_use[tensor[apart]] = -1
    producer, size = problem.tensor_producer.astype(np.int64)[produced], problem.tensor_bytes[produced]
    time_s = np.zeros((count, problem.num_devices))
    np.add.at(time_s, task, problem.time_s)
    ids, number, ends = alike(*crossing(tensor, reader, apart, count), home, problem.tensor_owner)
    total = np.zeros(len(ends), dtype=np.int64)
    np.add.at(total, number, problem.tensor_bytes[ids])
    return dataclasses.replace(
        problem,
        op_names=_task_names(problem, grouping, first),
        op_group=problem.op_group[first],
        op_phase=problem.op_phase[first],
        time_s=time_s,
        temporary_bytes=inner_temporary_bytes(task, count, problem.temporary_bytes, producer, last_use[produced], size),
        op_kind=_dominant_kinds(problem, task, count),
        op_dims={},
        **tensor_fields(_without_implied(ends, total.tolist())),
    )


def _tasks(problem: Problem, grouping: Grouping) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the task of every op, numbered by first op, and that first op."""
    key = grouping.op_cluster.astype(np.int64) * len(PHASES) + problem.op_phase
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    number = np.empty(len(order), dtype=np.int64)
    number[order] = np.arange(len(order))
    return number[inverse], first[order]


def _task_names(problem: Problem, grouping: Grouping, first: NDArray[np.int64]) -> tuple[str, ...]:
    """Names tasks ``group/phase``; further clusters of one group get "#2", "#3", ... in the order of their first ops."""
    names: list[str] = []
    taken: set[str] = set()
    for group, phase in zip(problem.op_group[first].tolist(), problem.op_phase[first].tolist(), strict=True):
        base = name = f"{grouping.names[group]}/{PHASES[phase]}"
        number = 1
        while name in taken:
            number += 1
            name = f"{base}#{number}"
        taken.add(name)
        names.append(name)
    return tuple(names)


def _dominant_kinds(problem: Problem, task: NDArray[np.int64], count: int) -> tuple[str, ...]:
    """Returns per task the op kind that takes most of its time."""
    kinds_of = problem.op_kind or ()
    kinds = sorted(set(kinds_of))
    number = {kind: index for index, kind in enumerate(kinds)}
    code = np.fromiter((number[kind] for kind in kinds_of), dtype=np.int64, count=len(kinds_of))
    share = np.bincount(task * len(kinds) + code, weights=problem.time_s.mean(axis=1), minlength=count * len(kinds))
    return tuple(kinds[i] for i in share.reshape(count, len(kinds)).argmax(axis=1).tolist())


def _without_implied(ends: Sequence[tuple[Any, ...]], sizes: Sequence[int]) -> list[TensorRow]:
    """Returns tensors with these ends (producer, owner, consumers), without edges of no bytes that others imply."""
    implied = {(end[0], target) for end, size in zip(ends, sizes, strict=True) if size and end[0] >= 0 for target in end[2]}
    kept: list[TensorRow] = []
    for (source, owner, row), size in zip(ends, sizes, strict=True):
        if size == 0 and source >= 0:
            row = tuple(target for target in row if (source, target) not in implied)
            implied.update((source, target) for target in row)
        if row and (size or source >= 0):
            kept.append((source, owner, size, row))
    return sorted(kept, key=lambda item: (item[0] < 0, item[0], item[1], item[3]))


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
