"""A model run as a strategy says: the one thing that a training loop holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rlplace.errors import InputError
from rlplace.plan.strategy import Strategy
from rlplace.runtime.native.accumulate import Loss, accumulate
from rlplace.runtime.native.batches import Batch, micro_batches, own_samples, share_of
from rlplace.runtime.native.blocks import units
from rlplace.runtime.native.facts import model_facts
from rlplace.runtime.native.mesh import Place, find_place
from rlplace.runtime.native.why_not import why_not
from rlplace.runtime.native.wrap import wrap_stage


class NativeModel:
    """This process's part of a model under a strategy.

    Attributes:
        model: The model that was prepared; its modules hold the parameters of this process's stages, shared out in place.
        strategy: What is run.
        place: Where this process stands.
        share: What its replica computes of a step.
    """

    def __init__(self, model: nn.Module, strategy: Strategy, place: Place, roots: Mapping[int, nn.Module]) -> None:
        self.model, self.strategy, self.place = model, strategy, place
        self.share = share_of(strategy, place.replica)
        self._roots = dict(roots)

    def own_samples(self, batch: Batch) -> dict[str, Any]:
        """The samples of this process's replica out of a whole batch, the same on all processes."""
        return own_samples(batch, self.share, self.strategy.batch)

    def step(self, batch: Batch, loss: Loss) -> torch.Tensor:
        """Forward and backward of one batch; gradients are added to ``.grad`` of the parameters.

        Args:
            batch: Keyword inputs of the model: the samples of this process's replica (`own_samples`).
            loss: Called with the model's output and a micro-batch; returns the mean over its samples.

        Returns:
            The mean loss over all samples of the batch, the same on every process.
        """
        parts = micro_batches(batch, self.share)
        total = self._run(parts, loss)
        degree = self.strategy.pipelines[0].data_degree * self.place.mesh["tensor"].size()
        total = (total.double() if self.place.device.type == "cpu" else total.float()) / degree
        dist.all_reduce(total)
        return total

    def _run(self, parts: list[dict[str, Any]], loss: Loss) -> torch.Tensor:
        level = self.strategy.stages[0].sharding
        return accumulate(self._roots[0], parts, loss, self.share.weight, every_pass=level > 1)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This process's parameters under the model's names; `DTensor` where they are shared or laid out."""
        yield from self.model.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """What an optimizer gets."""
        return (parameter for _, parameter in self.named_parameters())

    def state_dict(self) -> dict[str, Any]:
        """This process's parameters and buffers under the model's names, for `torch.distributed.checkpoint`."""
        return dict(self.model.state_dict())

    def zero_grad(self) -> None:
        """Drops all gradients."""
        for parameter in self.parameters():
            parameter.grad = None


def prepare(model: nn.Module, strategy: Strategy, example_inputs: Batch, device_type: str = "cpu") -> NativeModel:
    """Makes this process run its part of a model as a strategy says.

    Every process of the job calls it with the same model, values included, after `torch.distributed.init_process_group`.

    Args:
        model: On any device; its modules are changed in place, and parameters keep their names.
        strategy: Stages on meshes; its lowest device number is the first process.
        example_inputs: Keyword inputs of one micro-batch; only shapes and dtypes matter.
        device_type: ``"cpu"`` or an accelerator's, such as ``"cuda"``.

    Raises:
        InputError: It cannot be run, with the reason (`why_not`).
    """
    reason = why_not(strategy, model_facts(model), torch.__version__)
    if reason is not None:
        raise InputError(f"native: {reason}")
    place = find_place(strategy, device_type)
    stage = strategy.stages[0]
    model.to(place.device)
    blocks = dict(units(model, stage.blocks))
    root = wrap_stage(model, blocks, stage, place, pipelined=False)
    return NativeModel(model, strategy, place, {0: root})
