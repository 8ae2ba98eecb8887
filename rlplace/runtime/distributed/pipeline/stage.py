"""A stage as a module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rlplace.errors import RlplaceError
from rlplace.runtime.distributed.execution import activity
from rlplace.runtime.distributed.execution.engine import to_device
from rlplace.runtime.distributed.graph.layouts import Layout
from rlplace.runtime.distributed.graph.randomness import random_key
from rlplace.runtime.distributed.graph.segment import segment_module
from rlplace.runtime.distributed.pipeline.chain import Chain
from rlplace.runtime.distributed.pipeline.current import Current

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
