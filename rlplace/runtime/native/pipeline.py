"""A step of a pipeline by `torch.distributed.pipelining`: a process's stages, and the schedule that drives them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.utils import _pytree as pytree

from rlplace.plan.strategy import Pipeline
from rlplace.runtime.native.accumulate import Loss
from rlplace.runtime.native.batches import Batch, Signature
from rlplace.runtime.native.cut import StageGraph
from rlplace.runtime.native.mesh import Place
from rlplace.schedule import SCHEDULES


class StageModule(nn.Module):
    """What torch's stage calls: reads the micro-batch itself, and on the last stage ends with its loss.

    Torch splits and sends tensors only; so each process has the micro-batches at hand, and is told which one is to run.

    Attributes:
        body: The stage's graph of the model's own modules.
        parts: Micro-batches of the step that runs.
        leaves: Flat inputs of each.
        number: The one that runs.
        loss: Of the step that runs.
    """

    def __init__(self, body: nn.Module, stage: StageGraph, out_spec: Any, weight: float) -> None:
        super().__init__()
        self.body = body
        self.parts: Sequence[Batch] = ()
        self.number = 0
        self.loss: Loss | None = None
        self.leaves: Sequence[list[Any]] = ()
        self._inputs, self._out_spec, self._weight, self._last = stage.inputs, out_spec, weight, not stage.given

    def forward(self, *taken: torch.Tensor) -> Any:
        """What the stage hands on; the weighted loss, in one dimension, on the last."""
        part, leaves = self.parts[self.number], self.leaves[self.number]
        values = self.body(*taken, *(leaves[position] for position in self._inputs))
        if not self._last:  # a split backward detaches what was handed on, which torch does not do with views
            return tuple(value.clone() if value._is_view() else value for value in values)
        assert self.loss is not None
        return self.loss(pytree.tree_unflatten(values, self._out_spec), part).reshape(1) * self._weight


class _Stage(pipelining.PipelineStage):
    """Tells the module which micro-batch runs."""

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.root.number = fwd_chunk_id
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    root: StageModule


class PipelineRun:
    """The stages of this process under torch's schedule.

    Args:
        pipeline: What the strategy says.
        place: Where this process stands.
        roots: Stage modules by number, with torch's wrappers on.
        stages: All stages of the cut.
        signature: What the model was recorded with.
        microbatches: Passes of this process's replica.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        place: Place,
        roots: dict[int, StageModule],
        stages: Sequence[StageGraph],
        signature: Signature,
        microbatches: int,
    ) -> None:
        self._roots, self._device, self._microbatches = roots, place.device, microbatches
        self._signature = signature
        made = []
        for number, root in roots.items():
            stage = _Stage(
                root,
                number,
                len(stages),
                place.device,
                input_args=_examples(stages[number].taken, place.device),
                output_args=_examples(stages[number].given or (torch.empty(1, requires_grad=True),), place.device),
                group=place.mesh["pipeline"].get_group(),
            )
            stage.root = root
            made.append(stage)
        kind = getattr(pipelining, SCHEDULES[pipeline.schedule or ""].torch_class)
        single = issubclass(kind, PipelineScheduleSingle)
        self._schedule = kind(made[0] if single else made, microbatches, loss_fn=_same, scale_grads=False)

    def step(self, parts: Sequence[Batch], loss: Loss) -> torch.Tensor:
        """Forward and backward of all micro-batches; returns the weighted sum of their losses, 0 without the last stage."""
        leaves = [self._signature.leaves(part) for part in parts]
        for root in self._roots.values():
            root.parts, root.leaves, root.loss = parts, leaves, loss
        losses: list[torch.Tensor] = []
        self._schedule.step(target=torch.arange(self._microbatches), losses=losses, return_outputs=False)
        for root in self._roots.values():
            root.parts, root.leaves, root.loss = (), (), None
        return torch.stack(losses).sum() if losses else torch.zeros((), device=self._device)


def _same(output: torch.Tensor, target: Any) -> torch.Tensor:
    """The last stage returns the loss itself."""
    return output.sum()


def _examples(values: Sequence[torch.Tensor], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Torch wants tensors to know shapes by; without them it would run a forward and a backward of its own."""
    made = (torch.empty(value.shape, dtype=value.dtype, device=device) for value in values)
    return tuple(tensor.requires_grad_(value.requires_grad) for tensor, value in zip(made, values, strict=True))
