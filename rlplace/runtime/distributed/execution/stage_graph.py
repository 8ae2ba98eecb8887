"""The stage-graph engine: any cut of the forward, run by autograd segment by segment.

A process runs the segments of its device in the order of `order.step_order`. A value is sent once to each process that reads
it, its gradient comes back once from each. Between segments of one process values are handed over, cut off from the autograd
graph like those that were received. Values and gradients travel while other segments compute: sends do not wait, and receives
are posted one segment ahead.
"""

from __future__ import annotations

from typing import Any

import torch

from rlplace.runtime.distributed.execution.engine import Engine, StepState, to_device
from rlplace.runtime.distributed.execution.outputs import output_names
from rlplace.runtime.distributed.execution.turns import Message, Turn, segment_turns
from rlplace.runtime.distributed.graph.cut import Cut, Segment
from rlplace.runtime.distributed.graph.layouts import Layout
from rlplace.runtime.distributed.graph.order import Expected, Step, step_order
from rlplace.runtime.distributed.graph.randomness import random_key
from rlplace.runtime.distributed.graph.segment import segment_module
from rlplace.runtime.distributed.ranks import Ranks
from rlplace.runtime.distributed.state.tensors import Own


class StageGraphEngine(Engine):
    """Runs the segments of one device of the plan."""

    def __init__(self, cut: Cut, ranks: Ranks, own: Own, schedule: str, expected: Expected | None = None) -> None:
        """Prepares a process; nothing is sent.

        Args:
            cut: The segments of the forward.
            ranks: Which process this is.
            own: What it holds, by ``cut.owners``.
            schedule: The plan's schedule.
            expected: Times of the priced problem, by which passes are ordered; None: by the sizes of their values.
        """
        super().__init__(ranks, own, cut.graph.loss_dtype)
        self.cut, self._schedule, self._expected = cut, schedule, expected
        plan_device = ranks.plan_device
        self._mine = {segment.index: segment for segment in cut.segments if segment.placement.device == plan_device}
        self._code = {index: segment_module(cut, segment, ranks.device) for index, segment in self._mine.items()}

    def _turns(self, microbatches: int, training: bool, plan_device: int) -> list[Turn[Step]]:
        order = step_order(self.cut, microbatches, self._schedule, training=training, expected=self._expected)
        return segment_turns(self.cut, order, plan_device)

    def _numbers(self, run: Step) -> tuple[int, int]:
        return run.segment, run.microbatch

    def _outputs(self) -> list[Any]:
        return output_names(self.cut.graph)

    def _output(self, state: StepState, item: Any, microbatch: int) -> Any:
        graph = self.cut.graph
        if not isinstance(item, str):
            return item
        if item in graph.inputs:
            return to_device(state.microbatches[microbatch].leaves[graph.inputs.index(item)], self.ranks.device)
        # A parameter or buffer that is returned as it is.
        held = None if item in self.cut.maker else graph.held_of_node[item]
        source = self.cut.segments[self.cut.maker[item]].placement.device if held is None else self.owners.get(held, (0,))[0]

        def own() -> torch.Tensor:
            value = state.values[item, microbatch] if held is None else {**self.parameters, **self.buffers}[held]
            return value.detach().clone(memory_format=torch.contiguous_format)

        return self._everywhere(source, own, graph.layout[item])

    def _layout(self, value: str) -> Layout:
        return self.cut.graph.layout[value]

    def _pass(self, state: StepState, run: Step, training: bool, seed: int, step: int) -> None:
        segment, number = self._mine[run.segment], run.microbatch
        if run.backward:
            with self.recorder.interval("backward", segment.index, number):
                self._backward(state, segment, number)
        else:
            stream = random_key(seed, step, state.microbatches[number].number)
            with self.recorder.interval("forward", segment.index, number), stream:
                self._forward(state, segment, number, training)

    def _arrive(self, state: StepState, message: Message, value: torch.Tensor) -> None:
        key = (message.value, message.microbatch)
        if not message.gradient:
            state.values[key] = value
        else:
            state.gradients[key] = state.gradients[key] + value if key in state.gradients else value

    def _leaving(self, state: StepState, message: Message) -> torch.Tensor:
        key = (message.value, message.microbatch)
        if not message.gradient:
            value: torch.Tensor = state.values[key]
            return value
        leaf = state.leaves.pop(key)
        # A copy: autograd may have given this gradient's memory to a parameter too, which the next pass adds to.
        return leaf.grad.clone() if leaf.grad is not None else torch.zeros_like(leaf)

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
