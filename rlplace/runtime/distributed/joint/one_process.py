"""A joint graph on several devices of one process: its forward part and its backward part as two modules, copies inserted."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from rlplace.runtime import streams
from rlplace.runtime.distributed.joint.assign import JointPlacement
from rlplace.runtime.distributed.joint.views import base_of, is_view_node

_aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class TwoParts:
    """A joint graph in two parts.

    Attributes:
        placement: What was split.
        forward: Called with the held tensors, `constants` and the flat tensor inputs; returns the tensor outputs, the new
            values of what is written, and what the backward part reads.
        backward: Called with the latter and the tangents; returns the gradients of held tensors, each on its owner's device,
            and those of inputs, in the order of the joint graph.
        constants: Held tensors that never change, each on its device.
        inputs: Flat input numbers, in calling order.
        outputs: Flat output numbers that the forward part returns.
        copies: Copies between devices in the forward part.
    """

    placement: JointPlacement
    forward: fx.GraphModule
    backward: fx.GraphModule
    constants: tuple[torch.Tensor, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    copies: int


def two_parts(placement: JointPlacement, devices: Sequence[torch.device], constants: Mapping[str, torch.Tensor]) -> TwoParts:
    """Splits a joint graph into forward and backward and puts each node on its device.

    Args:
        placement: Where everything runs.
        devices: One per device of the plan.
        constants: Values of those held tensors that are no parameters or buffers of the model.
    """
    joint = placement.joint
    early = set(placement.forward)
    early |= {node for node in placement.device_of if node.target is operator.getitem and node.args[0] in early}
    first = [node for node in placement.device_of if node in early]
    second = [node for node in placement.device_of if node not in early]
    inputs = tuple(i for i, node in enumerate(joint.inputs) if node is not None)
    outputs = tuple(i for i, item in enumerate(joint.outputs) if isinstance(item, fx.Node))
    held = [name for name in joint.held if name not in constants]
    placeholders = [*(joint.held[name] for name in (*held, *constants)), *(joint.inputs[i] for i in inputs)]
    home = {node: placement.owners[name][0] for name, node in joint.held.items()}

    # What the backward part reads of the forward part, and where.
    tangents = list(joint.tangents.values())
    reads = [
        (base, placement.device_of[node])
        for node in second
        for base in placement.reads[node]
        if base in early or base in placeholders
    ]
    parts = [(part, placement.owners[name][0]) for name, summands in joint.gradients.items() for part in summands]
    reads += [
        (base_of(part), plan_device) for part, plan_device in parts if base_of(part) in early or base_of(part) in placeholders
    ]
    saved = list(dict.fromkeys(reads))

    forward = _Emitter(placement, devices, home)
    for node in placeholders:
        forward.placeholder(node)  # type: ignore[arg-type]
    new = [(node, home[joint.held[name]]) for name, node in joint.writes.items()]
    forward.emit(first, [*saved, *new])
    returned = [forward.anywhere(joint.outputs[i]) for i in outputs]
    written = [forward.at(node, plan_device) for node, plan_device in new]
    forward_module = forward.module((*returned, *written, *(forward.at(base, plan_device) for base, plan_device in saved)))

    backward = _Emitter(placement, devices, home)
    for base, plan_device in saved:
        backward.received(base, plan_device)
    for node in tangents:
        backward.placeholder(node)
    backward.emit(second, parts)
    sums = []
    shared = Counter(base_of(part) for part, _ in parts)
    for name, summands in joint.gradients.items():
        total, *others = (backward.at(part, placement.owners[name][0]) for part in summands)
        if not others and shared[base_of(summands[0])] > 1:  # optimizers write to gradients: each has memory of its own
            total = backward.graph.call_function(_aten.clone.default, (total,))
        for other in others:
            total = backward.graph.call_function(_aten.add.Tensor, (total, other))
        sums.append(total)
    of_inputs = [backward.anywhere(node) for node in joint.input_gradients.values()]
    return TwoParts(
        placement=placement,
        forward=forward_module,
        backward=backward.module((*sums, *of_inputs)),
        constants=tuple(value.to(devices[placement.owners[name][0]]) for name, value in constants.items()),
        inputs=inputs,
        outputs=outputs,
        copies=forward.copies,
    )


class _Emitter:
    """Writes nodes of a joint graph into a new graph, each on its device, and starts copies where their values are made."""

    def __init__(self, placement: JointPlacement, devices: Sequence[torch.device], home: Mapping[fx.Node, int]) -> None:
        self.graph = fx.Graph()
        self.graph.set_codegen(fx.graph.CodeGen())
        self.copies = 0
        self._placement = placement
        self._devices = devices
        self._home = home
        self._made: dict[tuple[fx.Node, int | None], fx.Node] = {}
        self._moving: dict[tuple[fx.Node, int], fx.Node] = {}

    def placeholder(self, node: fx.Node) -> None:
        """A value that comes from outside: a held tensor on its owner's device, anything else from anywhere."""
        self._made[node, self._home.get(node)] = self.graph.placeholder(node.name)

    def received(self, node: fx.Node, plan_device: int) -> None:
        """A value that comes from outside and is on a device already."""
        self._made[node, plan_device] = self.graph.placeholder(f"{node.name}_at_{plan_device}")

    def emit(self, nodes: Sequence[fx.Node], also: Iterable[tuple[fx.Node, int]]) -> None:
        """Writes nodes, and starts the copies that they and `also` need."""
        wanted: dict[fx.Node, dict[int, None]] = {}
        for node in nodes:
            for base in self._placement.reads[node]:
                wanted.setdefault(base, {})[self._placement.device_of[node]] = None
        for node, plan_device in also:
            wanted.setdefault(base_of(node), {})[plan_device] = None
        for node in {key[0]: None for key in self._made}:
            self._start(node, wanted.get(node, ()))
        for node in nodes:
            here = self._placement.device_of[node]
            args, kwargs = pytree.tree_map(lambda value, here=here: self._operand(value, here), (node.args, dict(node.kwargs)))
            self._made[node, here] = self.graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
            if "val" in node.meta:
                self._start(node, wanted.get(node, ()))

    def at(self, node: fx.Node, plan_device: int | None) -> fx.Node:
        """A value on a device."""
        if (node, plan_device) not in self._made:
            if is_view_node(node):
                inner, op = self.at(node.args[0], plan_device), node.target  # type: ignore[arg-type]
                if op in (_aten.view.default, _aten._unsafe_view.default):
                    op = _aten.reshape.default  # a copy may lie otherwise in memory than what was traced
                self._made[node, plan_device] = self.graph.call_function(op, (inner, *node.args[1:]), dict(node.kwargs))  # type: ignore[arg-type]
            else:
                self._made[node, plan_device] = self.graph.call_function(streams.finish, (self._moving[node, plan_device],))  # type: ignore[index]
        return self._made[node, plan_device]

    def anywhere(self, node: fx.Node) -> fx.Node:
        """A value where it was made."""
        base = base_of(node)
        return self.at(node, next(plan_device for value, plan_device in self._made if value is base))

    def module(self, results: tuple[fx.Node, ...]) -> fx.GraphModule:
        """The graph with its results."""
        self.graph.output(results)
        self.graph.lint()
        return fx.GraphModule(nn.Module(), self.graph)

    def _operand(self, value: object, plan_device: int) -> object:
        if isinstance(value, fx.Node):
            if value.meta.get("val") is None:  # several results: their items are where they are
                return self._made[value, plan_device]
            return self.at(value, plan_device)
        return self._devices[plan_device] if isinstance(value, torch.device) else value

    def _start(self, node: fx.Node, placement: Iterable[int]) -> None:
        """Starts the copies of a value to every other device that reads it."""
        sources = [at for value, at in self._made if value is node]
        for plan_device in placement:
            if plan_device in sources or (node, plan_device) in self._moving:
                continue
            source = self._made[node, sources[0]]
            self._moving[node, plan_device] = self.graph.call_function(streams.start_copy, (source, self._devices[plan_device]))
            self.copies += 1
