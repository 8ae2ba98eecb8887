"""The joint-graph engine: forward and backward ops of a model, each on the process that the plan says.

Every process computes the same order of all ops of all micro-batches (`order`) and runs its own part of it. A value is sent
once to each process that reads it, a parameter once per step from its owner. Gradients of parameters are collected where they
are made and sent to the owner after the last micro-batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from rlplace.errors import InputError
from rlplace.runtime.distributed.execution import activity
from rlplace.runtime.distributed.execution.engine import Engine, Microbatch, Recorder, zero_loss
from rlplace.runtime.distributed.execution.gradients import sum_gradients
from rlplace.runtime.distributed.execution.wire import Message, StepState, Turn, Wire
from rlplace.runtime.distributed.graph.randomness import random_key, seeded
from rlplace.runtime.distributed.joint.assign import JointPlacement, Task, forward_nodes, joint_order
from rlplace.runtime.distributed.joint.program import JointProgram, calls_of, lay_out, layout_of, program_of, value_of
from rlplace.runtime.distributed.joint.views import base_of
from rlplace.runtime.distributed.ranks import Ranks, group_of
from rlplace.runtime.distributed.state.tensors import Own
from rlplace.schedule import LIST


class JointEngine(Engine):
    """Runs the nodes of one device of the plan.

    Attributes:
        placement: The graph and where its nodes run.
        owners: Devices of the plan that hold a tensor, by name.
    """

    def __init__(self, placement: JointPlacement, ranks: Ranks, own: Own, schedule: str = LIST) -> None:
        """Prepares a process; nothing is sent.

        Args:
            placement: What runs where.
            ranks: Which process this is.
            own: What this process holds, by ``placement.owners``.
            schedule: One of `rlplace.schedule.FREE_SCHEDULES`.
        """
        self.placement = placement
        self.ranks = ranks
        self.parameters = own.parameters
        self.buffers = own.holding(placement.joint.constants, ranks.device).buffers
        self.owners = own.owners
        self.schedule = schedule
        self.recorder = Recorder(ranks.device)
        self._programs: dict[tuple[int, bool], JointProgram] = {}
        self._nodes = {node.name: node for node in placement.joint.graph.nodes}
        self._calls = calls_of(
            [node for node, plan_device in placement.device_of.items() if plan_device == ranks.plan_device], ranks.device
        )
        self._carried = {placement.joint.held[name]: node for name, node in placement.joint.writes.items()}
        self._gradients: dict[fx.Node, list[tuple[str, fx.Node]]] = {}
        for name, parts in placement.joint.gradients.items():
            for part in parts:
                self._gradients.setdefault(base_of(part), []).append((name, part))

    def train(self, microbatches: Sequence[Microbatch], seed: int, step: int) -> torch.Tensor:
        """See `Engine.train`."""
        if self.placement.joint.loss is None:
            raise InputError("distribute: the graph has no scalar loss to train on; trace it with grad enabled, or give a loss")
        state = self._run(microbatches, training=True, seed=seed, step=step)
        if self.ranks.replica is not None:
            with self.recorder.interval("reduce"):
                sum_gradients(self.parameters, self.owners, self.ranks)
        dist.all_reduce(state.loss)
        return state.loss

    def evaluate(self, microbatches: Sequence[Microbatch]) -> list[list[Any]]:
        """See `Engine.evaluate`."""
        state = self._run(microbatches, training=False, seed=0, step=0)
        if self.ranks.replica is None:
            return []
        joint = self.placement.joint
        outputs = [*joint.outputs]
        if joint.loss is not None and not any(item is joint.loss for item in outputs):
            outputs.append(joint.loss)
        return [[self._share(state, item, number) for item in outputs] for number in range(len(microbatches))]

    def _share(self, state: StepState, item: Any, number: int) -> Any:
        """An output on every rank of the replica."""
        if not isinstance(item, fx.Node):
            return item
        base, row = base_of(item), self.ranks.replicas[self.ranks.replica or 0]
        source = self._place_of(base)
        if source is None or len(row) == 1:
            return value_of(item, lambda node: self._look_up(state, node, number))
        value = (
            self._look_up(state, base, number).contiguous()
            if source == self.ranks.plan_device
            else layout_of(base).empty(self.ranks.device)
        )
        dist.broadcast(value, row[source], group=group_of(row))
        return value_of(item, lambda node: lay_out(value, base))

    def _place_of(self, base: fx.Node) -> int | None:
        """Where a value is; None: everywhere."""
        for name, node in self.placement.joint.held.items():
            if node is base:
                return self.placement.owners[name][0]
        return self.placement.device_of.get(base)

    def _program(self, count: int, training: bool) -> JointProgram:
        key = (count, training)
        if key not in self._programs:
            joint = self.placement.joint
            nodes = set(self.placement.device_of) if training else forward_nodes(self.placement)
            order = joint_order(self.placement, nodes, count, self.schedule)
            keep = {base_of(node) for node in joint.writes.values()}
            if not training:
                keep |= {base_of(node) for node in (*joint.outputs, joint.loss) if isinstance(node, fx.Node)}
            self._connect(order)
            self._programs[key] = program_of(self.placement, order, self.ranks.plan_device or 0, keep)
        return self._programs[key]

    def _connect(self, order: Sequence[Task]) -> None:
        """Makes the groups of all directions in one order, so that no two processes wait for each other's."""
        if dist.get_backend() == "gloo":
            return
        pairs: set[tuple[int, int]] = set()
        for plan_device in range(len(self.ranks.replicas[0])):
            program = program_of(self.placement, order, plan_device, ())
            messages = [*program.first, *(m for turn in program.turns for m in turn.sends)]
            pairs |= {(m.source, m.destination) for m in messages}
        of = self.placement.device_of
        for name, parts in self.placement.joint.gradients.items():
            pairs |= {(of[base_of(part)], self.owners[name][0]) for part in parts}
        for name, node in self.placement.joint.writes.items():
            pairs |= {(of[node], owner) for owner in self.placement.owners[name]}
        moving = {(self.ranks.rank_of(a), self.ranks.rank_of(b)) for a, b in pairs if a != b}
        Wire(self.ranks.rank, self.ranks.device).connect(pair for pair in moving if self.ranks.rank in pair)

    def _run(self, microbatches: Sequence[Microbatch], training: bool, seed: int, step: int) -> StepState:
        loss = self.placement.joint.loss
        total = zero_loss(None if loss is None else loss.meta["val"].dtype, self.ranks.device)
        state = StepState(microbatches, Wire(self.ranks.rank, self.ranks.device), total)
        if self.ranks.plan_device is None or not microbatches:
            return state
        with torch.no_grad(), torch.autocast(self.ranks.device.type, enabled=False):  # casts are nodes of the graph
            self._load(state)
            program = self._program(len(microbatches), training)
            for message in program.first:
                self._send(state, message)
            for turn in program.turns:
                self._turn(state, turn, training, seed, step)
            with self.recorder.interval("wait"):
                if training:
                    self._deliver(state)
                state.wire.finish()
            self._write(state, len(microbatches) - 1)
        return state

    def _load(self, state: StepState) -> None:
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

    def _turn(self, state: StepState, turn: Turn[Task], training: bool, seed: int, step: int) -> None:
        for message in turn.posts:
            source, layout = self.ranks.rank_of(message.source), layout_of(self._nodes[message.value])
            state.pending[message] = state.wire.receive(layout, source, message.tag, message)
        if turn.needs:
            with self.recorder.interval("wait"):
                for message in turn.needs:
                    self._arrive(state, message)
        node, number = turn.run
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
        for message in turn.sends:
            self._send(state, message)
        for key in turn.frees:
            del state.values[key]

    def _arrive(self, state: StepState, message: Message) -> None:
        work, value = state.pending.pop(message)
        work.wait()
        node = self._nodes[message.value]
        state.values[node, message.microbatch] = lay_out(value, node)

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
            if (name, part) in state.gradients:
                state.gradients[name, part].add_(value, alpha=weight)
            else:
                state.gradients[name, part] = value * weight

    def _deliver(self, state: StepState) -> None:
        """Brings the parts of every gradient to the parameter's owner."""
        plan_device = self.ranks.plan_device
        tag = 1 << 24  # beyond those of the messages
        arriving = []
        for name, parts in self.placement.joint.gradients.items():
            owner = self.owners[name][0]
            for part in parts:
                tag += 1
                source = self.placement.device_of[base_of(part)]
                if source == plan_device and source != owner:
                    state.wire.send(state.gradients.pop((name, part)), layout_of(part), self.ranks.rank_of(owner), tag)
                elif owner == plan_device and source != owner:
                    work, value = state.wire.receive(layout_of(part), self.ranks.rank_of(source), tag)
                    arriving.append((work, name, part, value))
        for work, name, part, value in arriving:
            work.wait()
            state.gradients[name, part] = value
        for name, parts in self.placement.joint.gradients.items():
            if self.owners[name][0] == plan_device:
                first, *others = (state.gradients.pop((name, part)) for part in parts)
                for other in others:
                    first = first + other
                parameter = self.parameters[name]
                parameter.grad = lay_out_like(first, parameter)

    def _send(self, state: StepState, message: Message) -> None:
        node = self._nodes[message.value]
        destination = self.ranks.rank_of(message.destination)
        state.wire.send(state.values[node, message.microbatch], layout_of(node), destination, message.tag)

    def _write(self, state: StepState, last: int) -> None:
        """Puts the new values of what the forward writes into the buffers of their owners."""
        tag = 1 << 25
        for name, node in self.placement.joint.writes.items():
            source = self.placement.device_of[node]
            for owner in self.placement.owners[name]:
                tag += 1
                if owner == self.ranks.plan_device and source != owner:
                    work, value = state.wire.receive(layout_of(node), self.ranks.rank_of(source), tag)
                    work.wait()
                    self.buffers[name].copy_(value)
                elif source == self.ranks.plan_device and owner != source:
                    state.wire.send(state.values[node, last], layout_of(node), self.ranks.rank_of(owner), tag)
                elif owner == self.ranks.plan_device:
                    self.buffers[name].copy_(state.values[node, last])
        state.wire.finish()


def lay_out_like(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A gradient of its own memory that lies as the parameter does, as optimizers like it."""
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)
