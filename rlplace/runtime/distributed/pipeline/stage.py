"""A stage as a module, and the values that go past the pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from rlplace.errors import RlplaceError
from rlplace.runtime.distributed import activity
from rlplace.runtime.distributed.engine import Microbatch
from rlplace.runtime.distributed.layouts import Layout
from rlplace.runtime.distributed.pipeline.chain import Chain
from rlplace.runtime.distributed.randomness import random_key
from rlplace.runtime.distributed.ranks import Ranks
from rlplace.runtime.distributed.segment import segment_module
from rlplace.runtime.distributed.wire import Wire

NOTHING = Layout((1,), torch.float32, True)
"""What one stage hands to the next when no value with a gradient goes there; torch wants at least one tensor."""


@dataclass(frozen=True)
class Aside:
    """A value without a gradient on its way between two places.

    Attributes:
        value: Node name.
        microbatch: Number in the step.
        source, destination: Places.
        tag: Unique in the step.
    """

    value: str
    microbatch: int
    source: int
    destination: int
    tag: int


def asides_of(chain: Chain, forwards: Mapping[int, Sequence[tuple[int, int]]]) -> list[Aside]:
    """All messages of a step that go past the pipeline, those of one source in the order in which it sends them.

    Args:
        chain: The stages.
        forwards: By place the (stage, micro-batch) of its forward passes in order.
    """
    found: list[Aside] = []
    for place, passes in sorted(forwards.items()):
        for stage, microbatch in passes:
            for value, (maker, readers) in chain.aside.items():
                if maker == stage:
                    for there in sorted({chain.places[reader] for reader in readers} - {place}):
                        found.append(Aside(value, microbatch, place, there, len(found) + 1))
    return found


@dataclass(eq=False)
class Pass:
    """What the stages of one process share during a step.

    Attributes:
        microbatches: Of this replica.
        seed, step: Of the random ops.
        ranks: The processes.
        wire: For the values that go past the pipeline.
        asides: Messages of the step, see `asides_of`.
        in_flight: Per own stage the micro-batches whose forward has begun and whose backward has not ended.
        most_in_flight: The most there were.
    """

    microbatches: Sequence[Microbatch]
    seed: int
    step: int
    ranks: Ranks
    wire: Wire
    asides: Sequence[Aside]
    in_flight: dict[int, int] = field(default_factory=dict)
    most_in_flight: dict[int, int] = field(default_factory=dict)
    _coming: dict[tuple[str, int], tuple[Any, torch.Tensor]] = field(default_factory=dict)
    _here: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)

    def receive_all(self, layout: Mapping[str, Layout]) -> None:
        """Starts to receive everything that comes past the pipeline, in the order in which it is sent."""
        for message in self.asides:
            if message.destination == self.ranks.place:
                work = self.wire.receive(layout[message.value], self.ranks.rank_of(message.source), message.tag)
                self._coming[message.value, message.microbatch] = work

    def take(self, value: str, microbatch: int) -> torch.Tensor:
        """A value that came past the pipeline."""
        key = (value, microbatch)
        if key in self._coming:
            work, tensor = self._coming.pop(key)
            work.wait()
            self._here[key] = tensor
        return self._here[key]

    def give(self, value: str, microbatch: int, tensor: torch.Tensor, layout: Layout) -> None:
        """Hands a value to the stages that read it, here and elsewhere."""
        self._here[value, microbatch] = tensor
        for message in self.asides:
            if message.value == value and message.microbatch == microbatch and message.source == self.ranks.place:
                self.wire.send(tensor, layout, self.ranks.rank_of(message.destination), message.tag)

    def begin(self, stage: int) -> None:
        """A stage begins the forward of one more micro-batch."""
        self.in_flight[stage] = self.in_flight.get(stage, 0) + 1
        self.most_in_flight[stage] = max(self.most_in_flight.get(stage, 0), self.in_flight[stage])

    def end(self, stage: int) -> None:
        """A stage has ended the backward of a micro-batch."""
        self.in_flight[stage] -= 1


class StageModule(nn.Module):
    """The forward of a stage.

    Called with the values from the stage before it and ``number=``, the micro-batch as a tensor of one number. User inputs are
    taken from the batch, which every process has. Returns the values for the next stage as a tuple, contiguous; the last stage
    returns the loss.
    """

    def __init__(
        self,
        chain: Chain,
        number: int,
        parameters: Mapping[str, nn.Parameter],
        buffers: Mapping[str, torch.Tensor],
        device: torch.device,
    ) -> None:
        super().__init__()
        self.segment = chain.stages[number]
        self.index = number
        self.taken = chain.taken(number)
        self.given = chain.carried[number]
        self.is_last = number == chain.last
        self.current: Pass | None = None
        graph = chain.cut.graph
        self._layout = graph.layout
        self._loss = graph.loss
        self._device = device
        self._aside = [name for name in self.segment.makes if chain.aside.get(name, (-1, ()))[0] == number]
        self._tensors = {**buffers, **parameters}
        self.own = nn.ParameterList([parameters[name] for name in self.segment.held if name in parameters])
        vars(self)["_code"] = segment_module(chain.cut, self.segment, device)  # not a child: it has no tensors of its own

    def layouts(self, names: Sequence[str]) -> tuple[torch.Tensor, ...]:
        """Meta tensors that describe what goes between two stages."""
        found = [self._layout[name] for name in names] or [NOTHING]
        return tuple(torch.empty(v.shape, dtype=v.dtype, device="meta", requires_grad=True) for v in found)

    def scalar(self) -> torch.Tensor:
        """A meta tensor that describes the loss."""
        return torch.empty((), dtype=self._layout[self._loss].dtype, device="meta", requires_grad=True)

    def forward(self, *carried: torch.Tensor, number: torch.Tensor) -> Any:
        current = self.current
        if current is None:
            raise RlplaceError(f"pipeline: stage {self.index} was called outside of a step")
        at = int(number)
        microbatch = current.microbatches[at]
        activity.doing("the forward of stage {} (micro-batch {})", self.index, at)
        current.begin(self.index)
        values = dict(zip(self.taken, carried, strict=False))
        held = [self._tensors[name] for name in self.segment.held]
        inputs = [self._local(microbatch.leaves[index]) for index in self.segment.inputs]
        reads = [values[name] if name in values else current.take(name, at) for name in self.segment.reads]
        with random_key(current.seed, current.step, microbatch.number):
            made = self._code(*held, *inputs, *reads)
        values.update(zip(self.segment.makes, made, strict=True))
        for name in self._aside:
            current.give(name, at, values[name].detach(), self._layout[name])
        if self.is_last:
            return values[self._loss].view(())  # a view, because torch cuts any other loss off its graph in place
        if not self.given:
            return (torch.zeros(NOTHING.shape, dtype=NOTHING.dtype, device=self._device),)
        return tuple(self._checked(name, values[name]) for name in self.given)

    def _checked(self, name: str, value: torch.Tensor) -> torch.Tensor:
        layout = self._layout[name]
        if tuple(value.shape) != layout.shape or value.dtype != layout.dtype:
            raise RlplaceError(
                f"pipeline: stage {self.index} makes {value.dtype}{list(value.shape)} where tracing promised "
                f"{layout.dtype}{list(layout.shape)}; the model depends on values that tracing cannot see"
            )
        return value.contiguous()

    def _local(self, leaf: Any) -> Any:
        return leaf.to(self._device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf
