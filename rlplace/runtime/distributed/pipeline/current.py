"""What the stages of one process share during a step: the batch, the values that go past the pipeline, and the counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from rlplace.runtime.distributed.execution.engine import Microbatch
from rlplace.runtime.distributed.execution.events import Recorder
from rlplace.runtime.distributed.execution.messages import Message
from rlplace.runtime.distributed.execution.replicas import GradientReducer
from rlplace.runtime.distributed.execution.wire import Arrival, Wire
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
