"""The engine of placements: forward and backward ops of a model, each on the process that the plan says.

Every process computes the same order of all ops and runs its own part of it. A value is sent once to each process that reads
it, a parameter once per step from its owner. Gradients of parameters are sent to the owner when the last op has run.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from rlplace.runtime.distributed.execution import activity
from rlplace.runtime.distributed.execution.recorder import Recorder
from rlplace.runtime.distributed.execution.wire import Wire
from rlplace.runtime.distributed.graph.randomness import random_key
from rlplace.runtime.distributed.joint.assign import JointPlacement
from rlplace.runtime.distributed.joint.program import BEGIN, FINISH, Part, call_of, joint_turns, lay_out, like, value_of
from rlplace.runtime.distributed.joint.turns import Message, Turn
from rlplace.runtime.distributed.joint.views import base_of
from rlplace.runtime.distributed.ranks import Ranks, group_of
from rlplace.runtime.distributed.state.tensors import Own


@dataclass(eq=False)
class StepState:
    """What one step keeps between its turns."""

    leaves: Sequence[Any]
    wire: Wire
    loss: torch.Tensor
    values: dict[fx.Node, Any] = field(default_factory=dict)
    gradients: dict[Part, torch.Tensor] = field(default_factory=dict)
    pending: dict[Message, tuple[Any, torch.Tensor]] = field(default_factory=dict)


class Engine:
    """Runs this process's turns of the steps of one plan, for one signature of inputs.

    All processes of the plan call the same methods in the same order with the same inputs.

    Attributes:
        placement: The graph and where its nodes run.
        ranks: Which process this is.
        parameters: The parameters that this rank owns, by name: those that it updates.
        buffers: Likewise buffers and constants.
        recorder: Takes the intervals of a step, once it is switched on.
    """

    def __init__(self, placement: JointPlacement, ranks: Ranks, own: Own) -> None:
        """Prepares a process; nothing is sent.

        Args:
            placement: What runs where.
            ranks: Which process this is.
            own: What this process holds, by ``placement.owners``.
        """
        joint = placement.joint
        own = own.holding(joint.constants, ranks.device)
        self.placement, self.ranks, self.parameters, self.buffers = placement, ranks, own.parameters, own.buffers
        self.recorder = Recorder(ranks.device)
        self._programs: dict[bool, Sequence[Turn]] = {}
        here = [node for node, there in placement.device_of.items() if there == ranks.rank]
        self._calls = {node: call_of(node, ranks.device) for node in here if node.target is not operator.getitem}
        self._gradients: dict[fx.Node, list[Part]] = {}
        for name, parts in joint.gradients.items():
            for part in parts:
                self._gradients.setdefault(base_of(part), []).append(Part(name, part))
        outputs = (base_of(item) for item in joint.outputs if isinstance(item, fx.Node))
        self._shared = Counter(base_of(part) for parts in joint.gradients.values() for part in parts) + Counter(outputs)

    def train(self, leaves: Sequence[Any], key: tuple[int, int, int]) -> torch.Tensor:
        """Forward and backward.

        Afterwards ``.grad`` of every own parameter holds the gradient of the loss (it is None on entry; it stays None for a
        parameter without any gradient).

        Args:
            leaves: Flat inputs, see `flat_inputs`; the same on every rank.
            key: Seed, step and micro-batch, which name the random streams.

        Returns:
            The loss, 0-d, detached, the same on every rank.
        """
        state = self._run(leaves, True, key)
        dist.all_reduce(state.loss)
        return state.loss

    def evaluate(self, leaves: Sequence[Any]) -> list[Any]:
        """Forward only, without gradients.

        Returns:
            The flat outputs of the model (its loss node last, when the graph has a loss function outside the model), on every
            rank of the plan; nothing on the others.
        """
        state = self._run(leaves, False, (0, 0, 0))
        if self.ranks.replica is None:
            return []
        joint = self.placement.joint
        outputs = [*joint.outputs]
        if joint.loss is not None and not any(item is joint.loss for item in outputs):
            outputs.append(joint.loss)
        with torch.no_grad():
            return [self._output(state, item) for item in outputs]

    def _run(self, leaves: Sequence[Any], training: bool, key: tuple[int, int, int]) -> StepState:
        ranks, joint = self.ranks, self.placement.joint
        double = joint.loss is not None and joint.loss.meta["val"].dtype == torch.float64
        loss = torch.zeros((), device=ranks.device, dtype=torch.float64 if double else torch.float32)
        state = StepState(leaves, Wire(ranks.rank, ranks.device), loss)
        if ranks.replica is None:
            return state
        if training not in self._programs:
            program = self._programs[training] = joint_turns(self.placement, ranks.rank, training)
            messages = [m for turn in program for m in (*turn.posts, *turn.sends)]
            state.wire.connect([(m.source, m.destination) for m in messages])
        # Casts of the caller's autocast are nodes of the graph.
        with torch.no_grad(), torch.autocast(ranks.device.type, enabled=False), random_key(*key):
            for turn in self._programs[training]:
                self._turn(state, turn, training)
            self.recorder.mark("wait")
            state.wire.finish()
            self.recorder.mark(None)
        return state

    def _turn(self, state: StepState, turn: Turn, training: bool) -> None:
        for message in turn.posts:
            state.pending[message] = state.wire.receive(like(message.value), message.source, message.tag, message)
        if turn.needs:
            self.recorder.mark("wait")
            for message in turn.needs:
                work, value = state.pending.pop(message)
                work.wait()
                if isinstance(message.value, Part):
                    state.gradients[message.value] = value
                else:
                    state.values[message.value] = lay_out(value, message.value)
        if isinstance(turn.run, fx.Node):
            self._node(state, turn.run, training)
        elif turn.run == BEGIN:
            self._begin(state)
        elif turn.run == FINISH:
            self._finish(state, training)
        for message in turn.sends:
            leaving = state.gradients.pop(message.value) if isinstance(message.value, Part) else state.values[message.value]
            state.wire.send(leaving, like(message.value), message.destination, message.tag)
        for gone in turn.frees:
            state.values.pop(gone, None)

    def _begin(self, state: StepState) -> None:
        for name, node in self.placement.joint.held.items():
            tensor = self.parameters.get(name, self.buffers.get(name))
            if tensor is not None:
                state.values[node] = tensor.detach()
        for placeholder, leaf in zip(self.placement.joint.inputs, state.leaves, strict=True):
            if placeholder is not None:
                state.values[placeholder] = leaf.to(self.ranks.device, non_blocking=True)

    def _node(self, state: StepState, node: fx.Node, training: bool) -> None:
        self.recorder.mark("backward" if node.meta["backward"] else "forward")
        activity.doing("the op {}", node)
        result = self._calls[node](state.values.__getitem__)
        if isinstance(result, torch.Tensor):
            state.values[node] = result
            self._collect(state, node, training)
        else:
            for item in node.users:
                state.values[item] = result[item.args[1]]
                self._collect(state, item, training)

    def _collect(self, state: StepState, node: fx.Node, training: bool) -> None:
        """Takes a loss or gradient that was just made to those of the step."""
        loss = self.placement.joint.loss
        if training and loss is not None and node is base_of(loss):
            state.loss += state.values[node].reshape(())
        for part in self._gradients.get(node, ()) if training else ():
            value = value_of(part.node, state.values.__getitem__)
            # Optimizers write to gradients: each has memory of its own.
            state.gradients[part] = value.clone() if self._shared[node] > 1 else value

    def _finish(self, state: StepState, training: bool) -> None:
        """Adds up the parts of every own gradient; puts the new values of what the forward writes into the buffers."""
        activity.doing("the gradients of its parameters")
        joint, owners, rank = self.placement.joint, self.placement.owners, self.ranks.rank
        for name, parts in joint.gradients.items():
            if training and owners[name][0] == rank:
                first, *others = (state.gradients[Part(name, part)] for part in parts)
                for other in others:
                    first = first + other
                parameter = self.parameters[name]
                if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                    torch.autograd.backward([parameter], [first])  # calls them
                else:
                    parameter.grad = lay_out_like(first, parameter)
        for name, node in joint.writes.items():
            if rank in owners[name]:
                self.buffers[name].copy_(state.values[node])

    def _output(self, state: StepState, item: Any) -> Any:
        """An output on every process of the plan."""
        if not isinstance(item, fx.Node):
            return item
        base, joint, ranks = base_of(item), self.placement.joint, self.ranks
        owner = next((name for name, node in joint.held.items() if node is base), None)
        source = self.placement.device_of.get(base) if owner is None else self.placement.owners[owner][0]
        if source is None:  # an input
            return value_of(item, state.values.__getitem__)
        row, traced = ranks.replicas[0], like(base)
        if source == ranks.rank:
            found = state.values[base].contiguous()
        else:
            found = torch.empty(traced.shape, dtype=traced.dtype, device=ranks.device)
        if len(row) > 1:
            dist.broadcast(found, source, group=group_of(row))
        # What the model returns of its own tensors is a copy.
        return value_of(item, lambda node: lay_out(found if owner is None else found.clone(), base))


def lay_out_like(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A gradient of its own memory that lies as the parameter does, as optimizers like it."""
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)
