"""What one process does in a step of a joint graph: its part of the common order, and how it runs a node."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils import _pytree as pytree

from rlplace.runtime.distributed.execution.turns import Pass, Turn, Value, turns_of
from rlplace.runtime.distributed.graph.layouts import Layout
from rlplace.runtime.distributed.joint.assign import JointPlacement, Task
from rlplace.runtime.distributed.joint.views import base_of, is_view_node

AHEAD = 32
"""Receives are posted this many turns before their values are needed."""


BEGIN, COLLECT, FINISH = "begin", "collect", "finish"
"""Turns beside those of nodes: held tensors are there; gradients are complete; everything of other processes has come."""


class Part(NamedTuple):
    """A part of the gradient of a parameter, collected over the micro-batches."""

    name: str
    node: fx.Node

    def __str__(self) -> str:
        return self.name


def layout_of(value: fx.Node | Part) -> Layout:
    """The wire layout of a value."""
    like = (value.node if isinstance(value, Part) else value).meta["val"]
    return Layout(tuple(like.shape), like.dtype, False)


def joint_turns(
    placement: JointPlacement, order: Sequence[Task], plan_device: int, training: bool, keep: Collection[fx.Node]
) -> list[Turn[Task | str]]:
    """The part of one device of the plan; before the nodes and after them come turns that bring in and put away.

    Args:
        placement: Where everything runs.
        order: All runs of the step, see `joint_order`.
        plan_device: The device of the plan that this process is.
        training: Gradients are brought to the owners of their parameters.
        keep: Values to keep to the end of the step.
    """
    joint, of, owners = placement.joint, placement.device_of, placement.owners
    held = {node: name for name, node in joint.held.items()}
    written = {joint.held[name]: base_of(node) for name, node in joint.writes.items()}
    devices = range(1 + max([*of.values(), *(device for who in owners.values() for device in who)]))

    def read(node: fx.Node, number: int, here: int) -> Value | None:
        if node in written and number > 0:
            return Value(written[node], number - 1)
        if node in held:
            return None if here in owners[held[node]] else Value(node, -1)
        return Value(node, number) if node in of else None  # inputs are everywhere

    passes: list[Pass[Task | str]] = [
        Pass(BEGIN, device, (), tuple(Value(node, -1) for node, name in held.items() if owners[name][0] == device))
        for device in devices
    ]
    for task in order:
        here = of[task.node]
        reads = (read(node, task.microbatch, here) for node in placement.reads[task.node])
        makes = tuple(Value(node, task.microbatch) for node in results_of(task.node))
        passes.append(Pass(task, here, tuple(value for value in reads if value is not None), makes))
    parts = [Part(name, node) for name, nodes in joint.gradients.items() if training for node in nodes]
    moving = [part for part in parts if of[base_of(part.node)] != owners[part.name][0]]
    last = max((task.microbatch for task in order), default=0)
    for device in devices:
        collected = tuple(Value(part, -1, device) for part in moving if of[base_of(part.node)] == device)
        passes.append(Pass(COLLECT, device, (), collected))
    for device in devices:
        gradients = [Value(part, -1, of[base_of(part.node)]) for part in moving if owners[part.name][0] == device]
        new = [Value(node, last) for name, node in joint.writes.items() if device in owners[name]]
        passes.append(Pass(FINISH, device, (*gradients, *new), ()))

    def kept(value: Value) -> bool:
        return value.of in keep or (value.of in held and plan_device in owners[held[value.of]])

    return turns_of(passes, plan_device, AHEAD, kept)


def results_of(node: fx.Node) -> list[fx.Node]:
    """The values that a run makes: the node's own, or its items."""
    items = [user for user in node.users if user.target is operator.getitem]
    return items if items else [node]


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
