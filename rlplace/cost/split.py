"""Problems that place the backward of a group apart from its forward."""

from __future__ import annotations

import dataclasses

import numpy as np

from rlplace.errors import InputError
from rlplace.problem import FORWARD, Problem


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

    names, group_ops, group_modules = [], [], []
    for group, name in enumerate(problem.group_names):
        names.append(name)
        group_ops.append(() if problem.group_ops is None else problem.group_ops[group])
        group_modules.append(() if problem.group_modules is None else problem.group_modules[group])
        if split[group]:
            names.append(f"{name}.backward")
            group_ops.append(())
            group_modules.append(group_modules[-1])
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"split_backward: group {twice[:80]!r} exists already; the problem is split or uses that name")

    resident, weight, gradient, optimizer = (np.zeros(count, dtype=np.int64) for _ in range(4))
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
        group_ops=None if problem.group_ops is None else tuple(group_ops),
        group_modules=None if problem.group_modules is None else tuple(group_modules),
    )
