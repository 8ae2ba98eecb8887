"""What one process does in a step of a joint graph: its part of the common order, and how it runs a node."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils import _pytree as pytree

from rlplace.runtime.distributed.joint.assign import JointPlacement
from rlplace.runtime.distributed.joint.order import joint_order
from rlplace.runtime.distributed.joint.turns import Pass, Turn, turns_of
from rlplace.runtime.distributed.joint.views import base_of, is_view_node

BEGIN, COLLECT, FINISH = "begin", "collect", "finish"
"""Turns beside those of nodes: held tensors are there; gradients are complete; everything of other processes has come."""


class Part(NamedTuple):
    """A part of the gradient of a parameter."""

    name: str
    node: fx.Node

    def __str__(self) -> str:
        return f"the gradient of {self.name}"


def like(value: fx.Node | Part) -> torch.Tensor:
    """A value as tracing promised it, without its numbers."""
    return (value.node if isinstance(value, Part) else value).meta["val"]


def joint_turns(placement: JointPlacement, plan_device: int, training: bool) -> list[Turn]:
    """The part of one device of the plan; before the nodes and after them come turns that bring in and put away.

    Args:
        placement: Where everything runs.
        plan_device: The device of the plan that this process is.
        training: Runs the backward, too, and brings gradients to the owners of their parameters; else outputs are kept.
    """
    joint, of, owners = placement.joint, placement.device_of, placement.owners
    held = {node: name for name, node in joint.held.items()}
    devices = range(1 + max([*of.values(), *(device for who in owners.values() for device in who)]))
    keep = {base_of(node) for node in joint.writes.values()}
    if not training:
        keep |= {base_of(node) for node in (*joint.outputs, joint.loss) if isinstance(node, fx.Node)}

    def reads(node: fx.Node) -> tuple[fx.Node, ...]:
        """What may have to come from elsewhere; inputs are everywhere."""
        here = of[node]
        return tuple(n for n in placement.reads[node] if n in of or (n in held and here not in owners[held[n]]))

    passes = [
        Pass(BEGIN, device, (), tuple(node for node, name in held.items() if owners[name][0] == device)) for device in devices
    ]
    order = joint_order(placement, placement.device_of if training else placement.forward)
    passes += [Pass(node, of[node], reads(node), tuple(results_of(node))) for node in order]
    parts = [Part(name, node) for name, nodes in joint.gradients.items() if training for node in nodes]
    moving = [part for part in parts if of[base_of(part.node)] != owners[part.name][0]]
    for device in devices:
        passes.append(Pass(COLLECT, device, (), tuple(part for part in moving if of[base_of(part.node)] == device)))
    for device in devices:
        gradients = [part for part in moving if owners[part.name][0] == device]
        new = [node for name, node in joint.writes.items() if device in owners[name]]
        passes.append(Pass(FINISH, device, (*gradients, *new), ()))

    def kept(value: Any) -> bool:
        return isinstance(value, Part) or value in keep or (value in held and plan_device in owners[held[value]])

    return turns_of(passes, plan_device, kept)


def results_of(node: fx.Node) -> list[fx.Node]:
    """The values that a run makes: the node's own, or its items."""
    items = [user for user in node.users if user.target is operator.getitem]
    return items if items else [node]


Call = Callable[[Callable[[fx.Node], Any]], Any]


def call_of(node: fx.Node, device: torch.device) -> Call:
    """A function that runs a node, given a function that looks up bases; views of its inputs are made on the way."""
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
    traced = like(node)
    expanded = any(step == 0 and size > 1 for step, size in zip(traced.stride(), traced.shape, strict=True))
    if value.stride() == traced.stride() or expanded:
        return value
    return torch.empty_strided(traced.shape, traced.stride(), dtype=value.dtype, device=value.device).copy_(value)
