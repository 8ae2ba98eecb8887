"""The joint-graph engine: forward and backward ops of a model, each on the process that the plan says.

Every process computes the same order of all ops of all micro-batches and runs its own part of it. A value is sent once to each
process that reads it, a parameter once per step from its owner. Gradients of parameters are collected where they are made and
sent to the owner after the last micro-batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from rlplace.runtime.distributed.execution import activity
from rlplace.runtime.distributed.execution.engine import Engine, Microbatch, StepState
from rlplace.runtime.distributed.execution.turns import Message, Turn
from rlplace.runtime.distributed.graph.layouts import Layout
from rlplace.runtime.distributed.graph.randomness import random_key, seeded
from rlplace.runtime.distributed.joint.assign import JointPlacement, Task, forward_nodes, joint_order
from rlplace.runtime.distributed.joint.program import BEGIN, FINISH, Part, calls_of, joint_turns, lay_out, layout_of, value_of
from rlplace.runtime.distributed.joint.views import base_of
from rlplace.runtime.distributed.ranks import Ranks
from rlplace.runtime.distributed.state.tensors import Own
from rlplace.schedule import LIST


class JointEngine(Engine):
    """Runs the nodes of one device of the plan.

    Attributes:
        placement: The graph and where its nodes run.
    """

    def __init__(self, placement: JointPlacement, ranks: Ranks, own: Own, schedule: str = LIST) -> None:
        """Prepares a process; nothing is sent.

        Args:
            placement: What runs where.
            ranks: Which process this is.
            own: What this process holds, by ``placement.owners``.
            schedule: One of `rlplace.schedule.FREE_SCHEDULES`.
        """
        joint = placement.joint
        loss_dtype = None if joint.loss is None else joint.loss.meta["val"].dtype
        super().__init__(ranks, own.holding(joint.constants, ranks.device), loss_dtype)
        self.placement, self._schedule = placement, schedule
        self._calls = calls_of(
            [node for node, plan_device in placement.device_of.items() if plan_device == ranks.plan_device], ranks.device
        )
        self._carried = {joint.held[name]: node for name, node in joint.writes.items()}
        self._gradients: dict[fx.Node, list[Part]] = {}
        for name, parts in joint.gradients.items():
            for part in parts:
                self._gradients.setdefault(base_of(part), []).append(Part(name, part))

    def _run(self, microbatches: Sequence[Microbatch], training: bool, seed: int, step: int) -> StepState:
        with torch.no_grad(), torch.autocast(self.ranks.device.type, enabled=False):  # casts are nodes of the graph
            return super()._run(microbatches, training, seed, step)

    def _turns(self, microbatches: int, training: bool, plan_device: int) -> list[Turn[Task | str]]:
        joint = self.placement.joint
        nodes = set(self.placement.device_of) if training else forward_nodes(self.placement)
        order = joint_order(self.placement, nodes, microbatches, self._schedule)
        keep = {base_of(node) for node in joint.writes.values()}
        if not training:
            keep |= {base_of(node) for node in self._outputs() if isinstance(node, fx.Node)}
        return joint_turns(self.placement, order, plan_device, training, keep)

    def _begin(self, state: StepState) -> None:
        for name, node in self.placement.joint.held.items():
            tensor = self.parameters.get(name, self.buffers.get(name))
            if tensor is not None:
                state.values[node, -1] = tensor.detach()
        for number, part in enumerate(state.microbatches):
            for placeholder, leaf in zip(self.placement.joint.inputs, part.leaves, strict=True):
                if placeholder is not None:
                    state.values[placeholder, number] = leaf.to(self.ranks.device, non_blocking=True)

    def _look_up(self, state: StepState, node: fx.Node, number: int) -> Any:
        carried = self._carried.get(node)
        if carried is not None and number > 0:
            return state.values[carried, number - 1]
        value = state.values.get((node, number))
        return state.values[node, -1] if value is None else value

    def _layout(self, value: fx.Node | Part) -> Layout:
        return layout_of(value)

    def _arrive(self, state: StepState, message: Message, value: torch.Tensor) -> None:
        if isinstance(message.value, Part):
            state.gradients[message.value] = value
        else:
            state.values[message.value, message.microbatch] = lay_out(value, message.value)

    def _leaving(self, state: StepState, message: Message) -> torch.Tensor:
        if isinstance(message.value, Part):
            return state.gradients.pop(message.value)
        value: torch.Tensor = state.values[message.value, message.microbatch]
        return value

    def _pass(self, state: StepState, run: Task | str, training: bool, seed: int, step: int) -> None:
        if isinstance(run, Task):
            self._node(state, run, training, seed, step)
        elif run == BEGIN:
            self._begin(state)
        elif run == FINISH:
            self._finish(state, training)

    def _node(self, state: StepState, task: Task, training: bool, seed: int, step: int) -> None:
        node, number = task
        kind = "backward" if node.meta["backward"] else "forward"
        with self.recorder.interval(kind, microbatch=number) if self.recorder.on else contextlib.nullcontext():
            activity.doing("op {} (micro-batch {})", node, number)
            if node.target is seeded:
                with random_key(seed, step, state.microbatches[number].number):
                    result = self._calls[node](lambda other: self._look_up(state, other, number))
            else:
                result = self._calls[node](lambda other: self._look_up(state, other, number))
        if isinstance(result, torch.Tensor):
            state.values[node, number] = result
            self._collect(state, node, number, training)
        else:
            for item in node.users:
                state.values[item, number] = result[item.args[1]]
                self._collect(state, item, number, training)

    def _collect(self, state: StepState, node: fx.Node, number: int, training: bool) -> None:
        """Adds a loss or gradient that was just made to that of the step."""
        joint = self.placement.joint
        if not training:
            return
        weight = state.microbatches[number].weight
        if joint.loss is not None and node is base_of(joint.loss):
            state.loss += state.values[node, number].reshape(()) * weight
        for name, part in self._gradients.get(node, ()):
            value = value_of(part, lambda other: self._look_up(state, other, number))
            key = Part(name, part)
            if key in state.gradients:
                state.gradients[key].add_(value, alpha=weight)
            else:
                state.gradients[key] = value * weight

    def _finish(self, state: StepState, training: bool) -> None:
        """Adds up the parts of every own gradient; puts the new values of what the forward writes into the buffers."""
        joint, owners, plan_device = self.placement.joint, self.placement.owners, self.ranks.plan_device
        for name, parts in joint.gradients.items():
            if training and owners[name][0] == plan_device:
                first, *others = (state.gradients.pop(Part(name, part)) for part in parts)
                for other in others:
                    first = first + other
                self.parameters[name].grad = lay_out_like(first, self.parameters[name])
        for name, node in joint.writes.items():
            if plan_device in owners[name]:
                self.buffers[name].copy_(state.values[node, len(state.microbatches) - 1])

    def _outputs(self) -> list[Any]:
        joint = self.placement.joint
        outputs = [*joint.outputs]
        if joint.loss is not None and not any(item is joint.loss for item in outputs):
            outputs.append(joint.loss)
        return outputs

    def _output(self, state: StepState, item: Any, microbatch: int) -> Any:
        if not isinstance(item, fx.Node):
            return item
        base = base_of(item)
        source = self._place_of(base)
        if source is None:
            return value_of(item, lambda node: self._look_up(state, node, microbatch))
        found = self._everywhere(source, lambda: self._look_up(state, base, microbatch).contiguous(), layout_of(base))
        return value_of(item, lambda node: lay_out(found, base))

    def _place_of(self, base: fx.Node) -> int | None:
        """Where a value is; None: everywhere."""
        for name, node in self.placement.joint.held.items():
            if node is base:
                return self.placement.owners[name][0]
        return self.placement.device_of.get(base)


def lay_out_like(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A gradient of its own memory that lies as the parameter does, as optimizers like it."""
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)
