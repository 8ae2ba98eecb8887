"""A stage as a module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from rlplace.errors import RlplaceError
from rlplace.runtime.distributed.execution import activity
from rlplace.runtime.distributed.execution.engine import Microbatch, Recorder, to_device
from rlplace.runtime.distributed.execution.replicas import GradientReducer
from rlplace.runtime.distributed.execution.wire import Arrival, Message, Wire
from rlplace.runtime.distributed.graph.layouts import Layout
from rlplace.runtime.distributed.graph.randomness import random_key
from rlplace.runtime.distributed.graph.segment import segment_module
from rlplace.runtime.distributed.pipeline.chain import Chain
from rlplace.runtime.distributed.ranks import Ranks


def asides_of(chain: Chain, forwards: Mapping[int, Sequence[tuple[int, int]]]) -> list[Message]:
    """All messages of a step that go past the pipeline, those of one source in the order in which it sends them.

    Args:
        chain: The stages.
        forwards: By device of the plan the (stage, micro-batch) of its forward passes in order.
    """
    messages: list[Message] = []
    for plan_device, passes in sorted(forwards.items()):
        for stage, microbatch in passes:
            for value, (maker, readers) in chain.aside.items():
                if maker == stage:
                    for there in sorted({chain.devices[reader] for reader in readers} - {plan_device}):
                        messages.append(Message(value, microbatch, plan_device, there, len(messages) + 1))
    return messages


class Current:
    """A step that runs.

    Attributes:
        microbatches: Those that this replica runs.
        seed, step: Seed of the run and number of the step; random ops draw by them.
        recorder: Takes the times.
        most_in_flight: By own stage the most micro-batches at once whose forward had begun and whose backward had not ended.
        most_held: The same for all own stages together.
    """

    def __init__(
        self,
        chain: Chain,
        ranks: Ranks,
        microbatches: Sequence[Microbatch],
        random: tuple[int, int],
        asides: Sequence[Message],
        recorder: Recorder,
        reducer: GradientReducer,
    ) -> None:
        """Starts to receive everything that comes past the pipeline, in the order in which it is sent.

        Args:
            chain: The stages.
            ranks: The processes.
            microbatches: Those that this replica runs.
            random: Seed of the run and number of the step.
            asides: Messages of the step, see `asides_of`.
            recorder: Takes the times.
            reducer: Is told which gradients are complete.
        """
        self.microbatches = microbatches
        self.seed, self.step = random
        self.recorder = recorder
        self.most_in_flight: dict[int, int] = {}
        self.most_held = 0
        self._in_flight: dict[int, int] = {}
        self._reducer = reducer
        self._ranks = ranks
        self._layout = chain.cut.graph.layout
        self._wire = Wire(ranks.rank, ranks.device)
        own = [number for number, plan_device in enumerate(chain.devices) if plan_device == ranks.plan_device]
        held = [name for number in own for name in chain.stages[number].held]
        self._passes_left = {name: held.count(name) * len(microbatches) for name in held}
        self._readers_here = {value: len({*own} & {*readers}) for value, (_, readers) in chain.aside.items()}
        self._here: dict[tuple[str, int], tuple[torch.Tensor, int]] = {}
        self._coming: dict[tuple[str, int], tuple[Arrival, torch.Tensor]] = {}
        self._leaving: dict[tuple[str, int], list[Message]] = {}
        moving = [m for m in asides if ranks.plan_device in (m.source, m.destination)]
        self._wire.connect((ranks.rank_of(m.source), ranks.rank_of(m.destination)) for m in moving)
        for message in moving:
            key = (message.value, message.microbatch)
            if message.source == ranks.plan_device:
                self._leaving.setdefault(key, []).append(message)
            else:
                layout = self._layout[message.value]
                self._coming[key] = self._wire.receive(layout, ranks.rank_of(message.source), message.tag, message)

    def take(self, value: str, microbatch: int, segment: int) -> torch.Tensor:
        """A value that went past the pipeline; each own stage that reads it takes it once."""
        key = (value, microbatch)
        if key in self._coming:
            arrival, tensor = self._coming.pop(key)
            with self.recorder.interval("wait", segment, microbatch):
                arrival.wait()
            self._here[key] = (tensor, self._readers_here[value])
        tensor, readers = self._here.pop(key)
        if readers > 1:
            self._here[key] = (tensor, readers - 1)
        return tensor

    def give(self, value: str, microbatch: int, tensor: torch.Tensor) -> None:
        """Hands a value to the stages that read it, here and elsewhere."""
        key = (value, microbatch)
        if self._readers_here[value]:
            self._here[key] = (tensor, self._readers_here[value])
        for message in self._leaving.get(key, ()):
            self._wire.send(tensor, self._layout[value], self._ranks.rank_of(message.destination), message.tag)

    def begin(self, stage: int) -> None:
        """A stage begins the forward of one more micro-batch."""
        self._in_flight[stage] = self._in_flight.get(stage, 0) + 1
        self.most_in_flight[stage] = max(self.most_in_flight.get(stage, 0), self._in_flight[stage])
        self.most_held = max(self.most_held, sum(self._in_flight.values()))

    def ending(self, held: Sequence[str]) -> AbstractContextManager[Any]:
        """Around a pass that adds to the gradients of some parameters, once for every own stage and micro-batch."""
        for name in held:
            self._passes_left[name] -= 1
        return self._reducer.completing([name for name in held if self._passes_left[name] == 0])

    def end(self, stage: int) -> None:
        """A stage has ended the backward of a micro-batch."""
        self._in_flight[stage] -= 1

    def finish(self) -> None:
        """Waits until everything that was sent past the pipeline has gone."""
        with self.recorder.interval("wait"):
            self._wire.finish()


NOTHING = Layout((1,), torch.float32, True)
"""What one stage hands to the next when no value with a gradient goes there; torch wants at least one tensor."""


class StageModule(nn.Module):
    """The forward of a stage.

    Called with the values from the stage before it and ``number=``, the micro-batch as a tensor of one number. User inputs are
    taken from the batch, which every process has. Returns the values for the next stage as a tuple, contiguous; the last stage
    returns the loss.

    Attributes:
        segment: Its part of the cut.
        index: Number of the stage.
        taken, handed_on: Names of the values from the stage before and for the next.
        is_last: Whether it is the last stage.
        current: The step that runs.
    """

    _code: Callable[..., tuple[Any, ...]]

    def __init__(
        self,
        chain: Chain,
        number: int,
        parameters: Mapping[str, nn.Parameter],
        buffers: Mapping[str, torch.Tensor],
        device: torch.device,
        recompute: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__()
        graph = chain.cut.graph
        self.segment = chain.stages[number]
        self.index = number
        self.taken = chain.taken(number)
        self.handed_on = chain.carried[number]
        self.is_last = number == chain.last
        self.current: Current | None = None
        self._layout = graph.layout
        self._loss = str(graph.loss)
        self._device = device
        self._aside = [name for name in self.segment.makes if name in chain.aside]
        self._tensors = {**buffers, **parameters}
        self.own = nn.ParameterList([parameters[name] for name in self.segment.held if name in parameters])
        # Not a child: what it has of tensors is above.
        vars(self)["_code"] = segment_module(chain.cut, self.segment, device, recompute)

    def layouts(self, names: Sequence[str]) -> tuple[torch.Tensor, ...]:
        """Meta tensors that describe what goes between two stages."""
        described = [self._layout[name] for name in names] or [NOTHING]
        return tuple(torch.empty(v.shape, dtype=v.dtype, device="meta", requires_grad=True) for v in described)

    def loss_layout(self) -> torch.Tensor:
        """A meta tensor that describes the loss."""
        return torch.empty((), dtype=self._layout[self._loss].dtype, device="meta", requires_grad=True)

    def now(self) -> Current:
        """The step that runs."""
        if self.current is None:
            raise RlplaceError(f"pipeline: stage {self.index} was called outside of a step")
        return self.current

    def forward(self, *carried: torch.Tensor, number: torch.Tensor) -> Any:
        """One micro-batch; see the class."""
        current, at = self.now(), int(number)
        current.begin(self.index)
        values = dict(zip(self.taken, carried, strict=False))
        reads = [values[n] if n in values else current.take(n, at, self.segment.index) for n in self.segment.reads]
        microbatch = current.microbatches[at]
        held = [self._tensors[name] for name in self.segment.held]
        inputs = [to_device(microbatch.leaves[index], self._device) for index in self.segment.inputs]
        with current.recorder.interval("forward", self.segment.index, at):
            activity.doing("the forward of stage {} (micro-batch {})", self.index, at)
            with random_key(current.seed, current.step, microbatch.number):
                results = self._code(*held, *inputs, *reads)
        values.update(zip(self.segment.makes, results, strict=True))
        for name in self._aside:
            current.give(name, at, values[name].detach())
        if self.is_last:
            return values[self._loss].view(())  # a view, because torch cuts any other loss off its graph in place
        if not self.handed_on:
            return (torch.zeros(NOTHING.shape, dtype=NOTHING.dtype, device=self._device, requires_grad=True),)
        return tuple(self._checked(name, values[name]) for name in self.handed_on)

    def _checked(self, name: str, value: torch.Tensor) -> torch.Tensor:
        self._layout[name].check(value, f"pipeline: what stage {self.index} makes for the next one")
        return value.contiguous()
