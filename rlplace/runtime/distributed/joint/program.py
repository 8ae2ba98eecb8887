"""What one process does in a step of a joint graph: its part of the common order, with what it sends, awaits and forgets."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from rlplace.runtime.distributed.execution.wire import Message, Turn, posts_of
from rlplace.runtime.distributed.graph.layouts import Layout
from rlplace.runtime.distributed.joint.assign import JointPlacement, Task
from rlplace.runtime.distributed.joint.views import base_of, is_view_node

AHEAD = 32
"""Receives are posted this many turns before their values are needed."""


@dataclass(frozen=True, eq=False)
class JointProgram:
    """One process's part of a step.

    Attributes:
        first: Held tensors to send before the first turn.
        turns: In order.
    """

    first: tuple[Message, ...]
    turns: tuple[Turn[Task], ...]


def layout_of(node: fx.Node) -> Layout:
    """The wire layout of a node's value."""
    value = node.meta["val"]
    return Layout(tuple(value.shape), value.dtype, False)


def program_of(placement: JointPlacement, order: Sequence[Task], plan_device: int, keep: Collection[fx.Node]) -> JointProgram:
    """The part of one device of the plan.

    Args:
        placement: Where everything runs.
        order: All runs of the step, see `joint_order`.
        plan_device: The device of the plan that this process is.
        keep: Values to keep to the end of the step.
    """
    held = {node: name for name, node in placement.joint.held.items()}
    written = {placement.joint.held[name]: base_of(node) for name, node in placement.joint.writes.items()}
    tags = count()
    sent: dict[tuple[fx.Node, int, int], Message] = {}  # value, micro-batch, destination
    needs: list[list[Message]] = [[] for _ in order]
    sends: dict[tuple[fx.Node, int], list[tuple[fx.Node, int, int]]] = {}
    last: dict[tuple[fx.Node, int], int] = {}

    def wanted(value: fx.Node, number: int, index: int, here: int) -> None:
        """A task at `here` reads a value."""
        key: tuple[fx.Node, int] | None
        if value in held:
            name = held[value]
            if value in written and number > 0:
                key, source = (written[value], number - 1), placement.device_of[written[value]]
            else:
                key, source = (value, -1), (here if here in placement.owners[name] else placement.owners[name][0])
        elif value in placement.device_of:
            key, source = (value, number), placement.device_of[value]
        else:
            return  # inputs are everywhere
        if here == plan_device:
            last[key] = index
        if source == here:
            return
        if (*key, here) not in sent:
            sent[*key, here] = Message(key[0].name, key[1], source, here, 0)
            sends.setdefault(key, []).append((*key, here))
            needs[index].append((*key, here))  # type: ignore[arg-type]

    for index, task in enumerate(order):
        here = placement.device_of[task.node]
        for value in placement.reads[task.node]:
            wanted(value, task.microbatch, index, here)
    # Tags ascend in the order in which values are made.
    keys = [key for key in sends if key[1] < 0]
    for task in order:
        keys += [(node, task.microbatch) for node in results_of(task.node) if (node, task.microbatch) in sends]
    for key in keys:
        for full in sends[key]:
            sent[full] = replace(sent[full], tag=next(tags))
    mine = [index for index, task in enumerate(order) if placement.device_of[task.node] == plan_device]
    arriving = [tuple(sent[full] for full in needs[index]) for index in mine]  # type: ignore[index]
    posts = posts_of(arriving, AHEAD)
    frees = _frees(placement, order, mine, last, keep, plan_device, held)
    turns = []
    for at, index in enumerate(mine):
        task = order[index]
        out = [sent[f] for node in results_of(task.node) for f in sends.get((node, task.microbatch), ())]
        turns.append(Turn(task, posts[at], arriving[at], tuple(out), frees[at]))
    first = tuple(sent[full] for key in keys if key[1] < 0 for full in sends[key] if sent[full].source == plan_device)
    return JointProgram(first, tuple(turns))


def results_of(node: fx.Node) -> list[fx.Node]:
    """The values that a run makes: the node's own, or its items."""
    items = [user for user in node.users if user.target is operator.getitem]
    return items if items else [node]


def _frees(
    placement: JointPlacement,
    order: Sequence[Task],
    mine: Sequence[int],
    last: Mapping[tuple[fx.Node, int], int],
    keep: Collection[fx.Node],
    plan_device: int,
    held: Mapping[fx.Node, str],
) -> list[tuple[tuple[fx.Node, int], ...]]:
    turn_of = {index: at for at, index in enumerate(mine)}
    frees: list[list[tuple[fx.Node, int]]] = [[] for _ in mine]
    for key, index in last.items():
        node = key[0]
        own = node in held and plan_device in placement.owners[held[node]]
        if node not in keep and not own:
            frees[turn_of[index]].append(key)
    for at, index in enumerate(mine):
        task = order[index]
        for node in results_of(task.node):
            key = (node, task.microbatch)
            if key not in last and node not in keep:
                frees[at].append(key)
    return [tuple(row) for row in frees]


Call = Callable[[Callable[[fx.Node], Any]], Any]


def calls_of(nodes: Sequence[fx.Node], device: torch.device) -> dict[fx.Node, Call]:
    """For every node a function that runs it, given a function that looks up bases; views of its inputs are made on the way."""
    return {node: _call(node, device) for node in nodes}


def _call(node: fx.Node, device: torch.device) -> Call:
    target = node.target
    args, kwargs = pytree.tree_map(
        lambda value: device if isinstance(value, torch.device) else value, (node.args, dict(node.kwargs))
    )
    leaves, spec = pytree.tree_flatten((args, kwargs))
    slots = [index for index, leaf in enumerate(leaves) if isinstance(leaf, fx.Node)]
    strided = target is torch.ops.aten.as_strided.default
    flat = len(leaves) == len(args) and not any(isinstance(leaf, (list, tuple, dict)) for leaf in args)
    if flat and not strided:

        def call_flat(look_up: Callable[[fx.Node], Any]) -> Any:
            values = list(leaves)
            for index in slots:
                values[index] = value_of(leaves[index], look_up)
            return target(*values)  # type: ignore[operator]

        return call_flat

    def call(look_up: Callable[[fx.Node], Any]) -> Any:
        values = list(leaves)
        for index in slots:
            values[index] = value_of(leaves[index], look_up)
        if strided:
            values[slots[0]] = lay_out(values[slots[0]], leaves[slots[0]])
        positional, named = pytree.tree_unflatten(values, spec)
        return target(*positional, **named)  # type: ignore[operator]

    return call


def value_of(node: fx.Node, look_up: Callable[[fx.Node], Any]) -> Any:
    """The value of a node, views made from what is looked up for their base."""
    if not is_view_node(node):
        return look_up(node)
    inner = value_of(node.args[0], look_up)  # type: ignore[arg-type]
    op = node.target
    if op in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default):
        op = torch.ops.aten.reshape.default  # the base may lie otherwise in memory than it did when it was traced
    return op(inner, *node.args[1:], **node.kwargs)  # type: ignore[operator]


def lay_out(value: torch.Tensor, node: fx.Node) -> torch.Tensor:
    """The value with the strides that tracing promised."""
    like = node.meta["val"]
    expanded = any(step == 0 and size > 1 for step, size in zip(like.stride(), like.shape, strict=True))
    if value.stride() == like.stride() or expanded:
        return value
    return torch.empty_strided(like.shape, like.stride(), dtype=value.dtype, device=value.device).copy_(value)
