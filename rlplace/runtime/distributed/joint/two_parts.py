"""A joint graph on several devices of one process: its forward part and its backward part as two modules, copies inserted."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from rlplace.runtime.distributed.joint.assign import JointPlacement
from rlplace.runtime.distributed.joint.emit import Emitter
from rlplace.runtime.distributed.joint.views import base_of, results_of


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
    joint, on = placement.joint, dict(enumerate(devices))
    order = [node for node in placement.device_of if node.target is not operator.getitem]
    first = [node for node in order if node in placement.forward]
    second = [node for node in order if node not in placement.forward]
    late = {result for node in second for result in results_of(node)}
    home = {name: placement.owners[name][0] for name in joint.held}
    held = [name for name in joint.held if name not in constants]
    inputs = tuple(i for i, node in enumerate(joint.inputs) if node is not None)
    outputs = tuple(i for i, item in enumerate(joint.outputs) if isinstance(item, fx.Node))
    given: list[tuple[fx.Node, int | None]] = [(joint.held[name], home[name]) for name in (*held, *constants)]
    given += [(node, None) for node in joint.inputs if node is not None]
    new = [(node, home[name]) for name, node in joint.writes.items()]
    parts = [(part, home[name]) for name, summands in joint.gradients.items() for part in summands]

    # What the backward part reads of the forward part, and where.
    tangents = list(joint.tangents.values())
    reads = [(base, placement.device_of[node]) for node in second for base in placement.reads[node]]
    reads += [(base_of(part), device) for part, device in parts]
    saved = list(dict.fromkeys((base, device) for base, device in reads if base not in late and base not in tangents))

    forward = Emitter(placement, on, first, given, [*saved, *new])
    returned = [forward.anywhere(joint.outputs[i]) for i in outputs]
    kept = [forward.at(node, device) for node, device in (*new, *saved)]
    forward_module = forward.module([*(node for node in returned if node is not None), *kept])
    backward = Emitter(placement, on, second, [*saved, *((node, None) for node in tangents)], parts)
    gradients = [*backward.gradients().values(), *(backward.anywhere(node) for node in joint.input_gradients.values())]
    return TwoParts(
        placement=placement,
        forward=forward_module,
        backward=backward.module(node for node in gradients if node is not None),
        constants=tuple(value.to(devices[home[name]]) for name, value in constants.items()),
        inputs=inputs,
        outputs=outputs,
        copies=forward.copies,
    )
