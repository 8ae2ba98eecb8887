"""The engine of placements: forward and backward ops of a model, each on the process that the plan says.

Every process computes the same order of all ops and runs its own part of it. A value is sent once to each process that reads
it, a parameter once per step from its owner. Gradients of parameters are added up by the owner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from rlplace.runtime.base import activity
from rlplace.runtime.base.ranks import Ranks
from rlplace.runtime.placement.assign import JointPlacement, joint_order
from rlplace.runtime.placement.emit import Emitter, Program
from rlplace.runtime.placement.record import lay_out
from rlplace.runtime.placement.wire import Wire
from rlplace.runtime.state.whole import gather_values


class Engine:
    """Runs this process's part of the steps of one plan, for one signature of inputs.

    All processes of the plan call the same methods in the same order with the same inputs.

    Attributes:
        placement: The graph and where its nodes run.
        ranks: Which process this is.
        tensors: What this rank holds by name, constants among it.
    """

    def __init__(self, placement: JointPlacement, ranks: Ranks, tensors: Mapping[str, torch.Tensor]) -> None:
        """Prepares a process; nothing is sent.

        Args:
            placement: What runs where.
            ranks: Which process this is.
            tensors: The parameters and buffers that it holds, by ``placement.owners``.
        """
        constants = {name: value.detach().to(ranks.device) for name, value in placement.joint.constants.items()}
        self.placement, self.ranks, self.tensors = placement, ranks, {**tensors, **constants}
        self._programs: dict[bool, Program] = {}

    def train(self, leaves: Sequence[Any], key: tuple[int, int]) -> torch.Tensor:
        """Returns forward and backward.

        Afterwards ``.grad`` of every own parameter holds the gradient of the loss (it is None on entry; it stays None for a
        parameter without any gradient).

        Args:
            leaves: Flat inputs, see `flat_inputs`; the same on every rank.
            key: Seed and step, which name the random streams.

        Returns:
            The loss, 0-d, detached, the same on every rank.
        """
        joint = self.placement.joint
        double = any(joint.outputs[number].meta["val"].dtype == torch.float64 for number in joint.tangents)
        loss = torch.zeros((), device=self.ranks.device, dtype=torch.float64 if double else torch.float32)
        for name, value in self._run(leaves, True, key).items():
            if name in joint.tangents:
                loss += value.reshape(())
                continue
            parameter = self.tensors[name]
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                torch.autograd.backward([parameter], [value])  # calls them
            else:  # it lies as the parameter does, as optimizers like it
                parameter.grad = lay_out(value, parameter.stride())
        dist.all_reduce(loss)
        return loss

    def evaluate(self, leaves: Sequence[Any]) -> list[Any]:
        """Returns forward only, without gradients.

        Returns:
            The outputs of the forward graph, on every rank.
        """
        outputs = self.placement.joint.outputs
        made = gather_values(self._run(leaves, False, (0, 0)), self.ranks.device, everywhere=True)
        return [made.get(number, item) for number, item in enumerate(outputs)]

    def _run(self, leaves: Sequence[Any], training: bool, key: tuple[int, int]) -> dict[Any, torch.Tensor]:
        """Returns a step; returns what this process has of the loss or the outputs, and the gradients that it owns."""
        ranks, joint = self.ranks, self.placement.joint
        if ranks.replica is None:
            return {}
        new = training not in self._programs
        program = self._programs[training] = self._program(training) if new else self._programs[training]
        wire = Wire(ranks.rank, ranks.device, program.messages)
        if new:
            wire.connect()
        held = [self.tensors[name].detach() for name in joint.held if ranks.rank in self.placement.owners[name]]
        roots = [node.meta["val"] for node in joint.tangents.values()]
        ones = [torch.ones(root.shape, dtype=root.dtype, device=ranks.device) for root in roots]
        inputs = [leaf.to(ranks.device, non_blocking=True) for node, leaf in zip(joint.inputs, leaves, strict=True) if node]
        results = program(key, wire, *held, *ones, *inputs)
        wire.finish()
        activity.doing("the gradients of its parameters")
        with torch.no_grad():
            for name in joint.writes:
                if (name, None) in results:
                    self.tensors[name].copy_(results.pop((name, None)))
        return results

    def _program(self, training: bool) -> Program:
        placement, rank = self.placement, self.ranks.rank
        joint, owners = placement.joint, placement.owners
        given = [(node, device) for name, node in joint.held.items() for device in owners[name]]
        inputs = [node for node in (*joint.tangents.values(), *joint.inputs) if node is not None]
        given += [(node, device) for node in inputs for device in self.ranks.replicas[0]]
        wanted = placement.written + (placement.summands if training else [])
        order = joint_order(placement, placement.device_of if training else placement.forward)
        here = {rank: self.ranks.device}
        emitter = Emitter(placement, here, order, given, wanted, wired=True)
        numbers = joint.tangents if training else range(len(joint.outputs))
        results: dict[Any, fx.Node | None] = {number: emitter.anywhere(joint.outputs[number]) for number in numbers}
        results |= {(name, None): emitter.at(node, rank) for name, node in joint.writes.items() if rank in owners[name]}
        return emitter.program(results | (emitter.gradients() if training else {}))
