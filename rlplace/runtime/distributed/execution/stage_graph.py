"""The stage-graph engine: any cut of the forward, run by autograd segment by segment.

A process runs the segments of its device in the order of `order.step_order`. A value is sent once to each process that reads
it, its gradient comes back once from each. Between segments of one process values are handed over, cut off from the autograd
graph like those that were received. Values and gradients travel while other segments compute: sends do not wait, and receives
are posted one segment ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from rlplace.runtime.distributed.execution.engine import Engine, Microbatch, Recorder, StepOptions, to_device, zero_loss
from rlplace.runtime.distributed.execution.gradients import sum_gradients
from rlplace.runtime.distributed.execution.outputs import output_names
from rlplace.runtime.distributed.execution.turns import turns_of
from rlplace.runtime.distributed.execution.wire import Message, StepState, Turn, Wire
from rlplace.runtime.distributed.graph.cut import Cut, Segment
from rlplace.runtime.distributed.graph.order import Step, step_order
from rlplace.runtime.distributed.graph.randomness import random_key
from rlplace.runtime.distributed.graph.segment import segment_module
from rlplace.runtime.distributed.ranks import Ranks, group_of
from rlplace.runtime.distributed.state.tensors import Own


class StageGraphEngine(Engine):
    """Runs the segments of one device of the plan.

    Attributes:
        recorder: Takes the times of a step, once it is switched on.
    """

    def __init__(self, cut: Cut, ranks: Ranks, own: Own, options: StepOptions) -> None:
        self.cut = cut
        self.ranks = ranks
        self.parameters = own.parameters
        self.buffers = own.buffers
        self.owners = own.owners
        self.options = options
        self.recorder = Recorder(ranks.device)
        plan_device = ranks.plan_device
        self._mine = {segment.index: segment for segment in cut.segments if segment.placement.device == plan_device}
        self._code = {index: segment_module(cut, segment, ranks.device) for index, segment in self._mine.items()}
        self._programs: dict[tuple[int, bool], list[Turn[Step]]] = {}

    def train(self, microbatches: Sequence[Microbatch], seed: int, step: int) -> torch.Tensor:
        """See `Engine.train`."""
        state = self._run(microbatches, training=True, seed=seed, step=step)
        with self.recorder.interval("reduce"):
            if self.ranks.plan_device is not None:
                sum_gradients(self.parameters, self.owners, self.ranks)
        total = state.loss
        dist.all_reduce(total)
        return total

    def evaluate(self, microbatches: Sequence[Microbatch]) -> list[list[Any]]:
        """See `Engine.evaluate`."""
        with torch.no_grad():
            state = self._run(microbatches, training=False, seed=0, step=0)
        if self.ranks.replica is None:
            return []
        names = output_names(self.cut.graph)
        return [[self._share(state, name, number) for name in names] for number in range(len(microbatches))]

    def _share(self, state: StepState, name: Any, microbatch: int) -> Any:
        graph = self.cut.graph
        if not isinstance(name, str):
            return name
        if name in graph.inputs:
            return to_device(state.microbatches[microbatch].leaves[graph.inputs.index(name)], self.ranks.device)
        # A parameter or buffer that is returned as it is.
        held = None if name in self.cut.maker else graph.held_of_node[name]
        source = self.cut.segments[self.cut.maker[name]].placement.device if held is None else self.owners.get(held, (0,))[0]
        row = self.ranks.replicas[self.ranks.replica or 0]
        if source == self.ranks.plan_device:
            own = state.values[name, microbatch] if held is None else {**self.parameters, **self.buffers}[held]
            value = own.detach().clone(memory_format=torch.contiguous_format)
        else:
            value = graph.layout[name].empty(self.ranks.device)
        if len(row) > 1:
            dist.broadcast(value, row[source], group=group_of(row))
        return value

    def _run(self, microbatches: Sequence[Microbatch], training: bool, seed: int, step: int) -> StepState:
        plan_device = self.ranks.plan_device
        state = StepState(
            microbatches, Wire(self.ranks.rank, self.ranks.device), zero_loss(self.cut.graph.loss_dtype, self.ranks.device)
        )
        if plan_device is None:
            return state
        key = (len(microbatches), training)
        if key not in self._programs:
            how = self.options
            order = step_order(self.cut, len(microbatches), how.schedule, training=training, expected=how.expected)
            self._programs[key] = turns_of(self.cut, order, plan_device)
            state.wire.connect(self._directions(self._programs[key]))
        for turn in self._programs[key]:
            self._post(state, turn.posts)
            segment, number = self._mine[turn.run.segment], turn.run.microbatch
            if turn.needs:
                with self.recorder.interval("wait", segment.index, number):
                    for message in turn.needs:
                        self._arrive(state, message)
            if turn.run.backward:
                with self.recorder.interval("backward", segment.index, number):
                    self._backward(state, segment, number)
            else:
                stream = random_key(seed, step, microbatches[number].number)
                with self.recorder.interval("forward", segment.index, number), stream:
                    self._forward(state, segment, number, training)
            for message in turn.sends:
                self._send(state, message)
            for gone in turn.frees:
                state.values.pop(gone, None)
                state.leaves.pop(gone, None)
        with self.recorder.interval("wait"):
            state.wire.finish()
        return state

    def _directions(self, program: Sequence[Turn[Step]]) -> list[tuple[int, int]]:
        """Ranks that send and receive in a program, this one being one of them."""
        messages = [m for turn in program for m in (*turn.posts, *turn.sends)]
        return [(self.ranks.rank_of(message.source), self.ranks.rank_of(message.destination)) for message in messages]

    def _post(self, state: StepState, messages: Sequence[Message]) -> None:
        for message in messages:
            layout = self.cut.graph.layout[message.value]
            state.pending[message] = state.wire.receive(layout, self.ranks.rank_of(message.source), message.tag, message)

    def _arrive(self, state: StepState, message: Message) -> None:
        work, value = state.pending.pop(message)
        work.wait()
        key = (message.value, message.microbatch)
        if not message.gradient:
            state.values[key] = value
        else:
            state.gradients[key] = state.gradients[key] + value if key in state.gradients else value

    def _send(self, state: StepState, message: Message) -> None:
        key = (message.value, message.microbatch)
        layout = self.cut.graph.layout[message.value]
        if message.gradient:
            leaf = state.leaves.pop(key)
            # A copy: autograd may have given this gradient's memory to a parameter too, which the next pass adds to.
            value = leaf.grad.clone() if leaf.grad is not None else torch.zeros_like(leaf)
        else:
            value = state.values[key]
        state.wire.send(value, layout, self.ranks.rank_of(message.destination), message.tag)

    def _forward(self, state: StepState, segment: Segment, number: int, training: bool) -> None:
        graph = self.cut.graph
        held = [self.parameters[n] if n in self.parameters else self.buffers[n] for n in segment.held]
        leaves = state.microbatches[number].leaves
        inputs = [to_device(leaves[index], self.ranks.device) for index in segment.inputs]
        reads = []
        for name in segment.reads:
            key = (name, number)
            if key not in state.leaves:
                local = self.cut.maker[name] in self._mine
                leaf = (state.values[key] if local or not training else state.values.pop(key)).detach()
                state.leaves[key] = leaf.requires_grad_(training and graph.layout[name].requires_grad)
            reads.append(state.leaves[key])
        with torch.set_grad_enabled(training):
            results = self._code[segment.index](*held, *inputs, *reads)
        for name, value in zip(segment.makes, results, strict=True):
            state.values[name, number] = value
        if training and graph.loss in segment.makes:
            state.loss += state.values[graph.loss, number].detach().reshape(()) * state.microbatches[number].weight

    def _backward(self, state: StepState, segment: Segment, number: int) -> None:
        graph = self.cut.graph
        tensors, gradients = [], []
        for name in segment.makes:
            value = state.values.pop((name, number), None)
            if value is None or not value.requires_grad:
                continue
            gradient = state.gradients.pop((name, number), None)
            leaf = state.leaves.pop((name, number), None)
            if leaf is not None and leaf.grad is not None:  # read by other segments of this process
                gradient = leaf.grad if gradient is None else gradient + leaf.grad
            if name == graph.loss:
                own = torch.full_like(value, state.microbatches[number].weight)
                gradient = own if gradient is None else gradient + own
            if gradient is not None:
                tensors.append(value)
                gradients.append(gradient)
        # The caller's autocast is for the forward; its choice of dtypes is part of the autograd graph by now.
        with torch.autocast(self.ranks.device.type, enabled=False):
            if tensors:
                torch.autograd.backward(tensors, gradients)
