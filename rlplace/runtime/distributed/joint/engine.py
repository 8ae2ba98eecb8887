"""The engine of placements: forward and backward ops of a model, each on the process that the plan says.

Every process computes the same order of all ops and runs its own part of it. A value is sent once to each process that reads
it, a parameter once per step from its owner. Gradients of parameters are added up by the owner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from rlplace.runtime.distributed.execution import activity
from rlplace.runtime.distributed.execution.wire import Message, Wire
from rlplace.runtime.distributed.graph.randomness import random_key
from rlplace.runtime.distributed.joint.assign import JointPlacement
from rlplace.runtime.distributed.joint.emit import Emitter
from rlplace.runtime.distributed.joint.order import joint_order
from rlplace.runtime.distributed.joint.views import base_of, lay_out
from rlplace.runtime.distributed.ranks import Ranks
from rlplace.runtime.distributed.state.tensors import Own


@dataclass(frozen=True, eq=False)
class Program:
    """What this process runs in a step.

    Attributes:
        module: Called with the wire, the own held tensors and the inputs; returns what `names` says.
        messages: To and from this process.
        names: Of the results: numbers are outputs (-1: the loss), texts are parameters with a gradient; new values of buffers
            come as pairs.
    """

    module: fx.GraphModule
    messages: Mapping[int, Message]
    names: Sequence[Any]


class Engine:
    """Runs this process's part of the steps of one plan, for one signature of inputs.

    All processes of the plan call the same methods in the same order with the same inputs.

    Attributes:
        placement: The graph and where its nodes run.
        ranks: Which process this is.
        parameters: The parameters that this rank owns, by name: those that it updates.
        buffers: Likewise buffers and constants.
    """

    def __init__(self, placement: JointPlacement, ranks: Ranks, own: Own) -> None:
        """Prepares a process; nothing is sent.

        Args:
            placement: What runs where.
            ranks: Which process this is.
            own: What this process holds, by ``placement.owners``.
        """
        own = own.holding(placement.joint.constants, ranks.device)
        self.placement, self.ranks, self.parameters, self.buffers = placement, ranks, own.parameters, own.buffers
        self._programs: dict[bool, Program] = {}

    def train(self, leaves: Sequence[Any], key: tuple[int, int]) -> torch.Tensor:
        """Forward and backward.

        Afterwards ``.grad`` of every own parameter holds the gradient of the loss (it is None on entry; it stays None for a
        parameter without any gradient).

        Args:
            leaves: Flat inputs, see `flat_inputs`; the same on every rank.
            key: Seed and step, which name the random streams.

        Returns:
            The loss, 0-d, detached, the same on every rank.
        """
        joint = self.placement.joint
        double = joint.loss is not None and joint.loss.meta["val"].dtype == torch.float64
        loss = torch.zeros((), device=self.ranks.device, dtype=torch.float64 if double else torch.float32)
        for name, value in self._run(leaves, True, key).items():
            if name == -1:
                loss += value.reshape(())
            elif isinstance(name, str):
                parameter = self.parameters[name]
                if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                    torch.autograd.backward([parameter], [value])  # calls them
                else:  # it lies as the parameter does, as optimizers like it
                    parameter.grad = lay_out(value, parameter.stride())
        dist.all_reduce(loss)
        return loss

    def evaluate(self, leaves: Sequence[Any]) -> list[Any]:
        """Forward only, without gradients.

        Returns:
            The flat outputs of the model (its loss node last, when the graph has a loss function outside the model), on every
            rank.
        """
        found = self._run(leaves, False, (0, 0))
        return [self._everywhere(found.get(number), item) for number, item in enumerate(self._outputs())]

    def target_of(self, node: fx.Node) -> Any:
        """What is called for a node."""
        return node.target

    def _outputs(self) -> list[Any]:
        joint = self.placement.joint
        alone = joint.loss is not None and not any(item is joint.loss for item in joint.outputs)
        return [*joint.outputs, joint.loss] if alone else [*joint.outputs]

    def _run(self, leaves: Sequence[Any], training: bool, key: tuple[int, int]) -> dict[Any, torch.Tensor]:
        """A step; returns what this process has of the loss or the outputs, and the gradients that it owns."""
        ranks, joint = self.ranks, self.placement.joint
        if ranks.replica is None:
            return {}
        new = training not in self._programs
        program = self._programs[training] = self._program(training) if new else self._programs[training]
        wire = Wire(ranks.rank, ranks.device, program.messages)
        if new:
            wire.connect()
        tensors = {**self.parameters, **self.buffers}
        held = [tensors[name].detach() for name in joint.held if ranks.rank in self.placement.owners[name]]
        inputs = [leaf.to(ranks.device, non_blocking=True) for node, leaf in zip(joint.inputs, leaves, strict=True) if node]
        # Casts of the caller's autocast are nodes of the graph.
        with torch.no_grad(), torch.autocast(ranks.device.type, enabled=False), random_key(*key):
            values = program.module(wire, *held, *inputs)
            wire.finish()
            activity.doing("the gradients of its parameters")
            results = dict(zip(program.names, values, strict=True))
            for name in joint.writes:
                if (name, None) in results:
                    self.buffers[name].copy_(results.pop((name, None)))
        return results

    def _program(self, training: bool) -> Program:
        placement, rank = self.placement, self.ranks.rank
        joint, owners = placement.joint, placement.owners
        given = [(node, device) for name, node in joint.held.items() for device in owners[name]]
        given += [(node, device) for node in joint.inputs if node is not None for device in self.ranks.replicas[0]]
        wanted = [(node, device) for name, node in joint.writes.items() for device in owners[name]]
        if training:
            wanted += [(part, owners[name][0]) for name, parts in joint.gradients.items() for part in parts]
        order = joint_order(placement, placement.device_of if training else placement.forward)
        here = {rank: self.ranks.device}
        emitter = Emitter(placement, here, order, given, wanted, wired=True, target_of=self.target_of)
        outputs = {-1: joint.loss} if training else dict(enumerate(self._outputs()))
        found = {name: emitter.anywhere(node) for name, node in outputs.items() if isinstance(node, fx.Node)}
        results: dict[Any, fx.Node] = {name: node for name, node in found.items() if node is not None}
        results |= {(name, None): emitter.at(node, rank) for name, node in joint.writes.items() if rank in owners[name]}
        results |= emitter.gradients() if training else {}
        return Program(emitter.module(results.values()), emitter.messages, tuple(results))

    def _everywhere(self, value: torch.Tensor | None, item: Any) -> Any:
        """An output, which one process has made, on every process."""
        if not isinstance(item, fx.Node):
            return item
        traced = item.meta["val"]
        found = torch.empty(traced.shape, dtype=traced.dtype, device=self.ranks.device) if value is None else value.contiguous()
        dist.broadcast(found, self.placement.device_of[base_of(item)])
        return found
