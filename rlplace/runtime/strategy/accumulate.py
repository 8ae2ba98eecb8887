"""A step without a pipeline: the passes of a replica one after the other, gradients collected as the sharding level says."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from rlplace.runtime.base.batches import Batch, Pass
from rlplace.runtime.strategy.buffers import StepBuffers, check_same_writes

Loss = Callable[[Any, Batch], torch.Tensor]
"""Called with the model's output and the micro-batch; returns the mean loss over its samples."""


class Accumulation:
    """Runs micro-batches one after the other.

    Args:
        root: The model as `wrap_stage` returned it.
        device: Where it computes.
        every_pass: Reduce gradients after every micro-batch (levels 2 and 3), not once a step.
        buffers: Those that forwards write.

    Attributes:
        root: Likewise.
        keeps_gradients: The next step writes into the memory of the gradients that this one made.
    """

    def __init__(self, root: nn.Module, device: torch.device, *, every_pass: bool, buffers: StepBuffers) -> None:
        self.root, self._device, self._every_pass, self._buffers = root, device, every_pass, buffers
        self._first_step = True
        self.keeps_gradients = isinstance(root, DistributedDataParallel)

    def step(self, passes: Sequence[Pass], loss: Loss) -> torch.Tensor:
        """Forward and backward of every micro-batch.

        Returns:
            float [2], the weighted sum of their losses, and the sum of the weights.
        """
        sums = []
        self._buffers.begin()
        with forward_autocast(self._device) as region:
            for number, one in enumerate(passes):
                last = number == len(passes) - 1
                self._buffers.begin_pass()
                with _reducing(self.root, last or self._every_pass, last):
                    with region(), one.counting() as targets:
                        value = loss(self.root(**one.inputs), one.part)
                    weight = one.counted(targets, self._device)
                    self._buffers.end_pass()
                    (value * weight.to(value.dtype)).backward()  # type: ignore[no-untyped-call]
                sums.append(torch.stack([value.detach().to(weight).reshape(()) * weight, weight]))
        self._buffers.end()
        if self._first_step:
            check_same_writes([self._buffers])
            self._first_step = False
        return torch.stack(sums).sum(0)

    def evaluate(self, passes: Sequence[Pass]) -> list[tuple[Any, float]]:
        """What the model returns for every micro-batch, and what that counts."""
        made = []
        for one in passes:
            with one.counting() as targets:
                output = self.root(**one.inputs)
            made.append((output, float(one.counted(targets, self._device))))
        return made


Region = Callable[[], contextlib.AbstractContextManager[Any]]


@contextlib.contextmanager
def forward_autocast(device: torch.device) -> Iterator[Region]:
    """Switches the caller's autocast off for a step; what it yields switches it on again, for forwards alone.

    Weights that were cast are not kept from pass to pass: `fully_shard` would miss gradients through a kept copy.
    """
    kind = device.type
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    with torch.autocast(kind, enabled=False):
        yield lambda: torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False)


def _reducing(root: nn.Module, reduce: bool, last: bool) -> contextlib.AbstractContextManager[None]:
    """Whether gradients are reduced over the replicas in the backward of this pass, which runs inside."""
    if isinstance(root, FSDPModule):
        root.set_is_last_backward(last)
        root.set_requires_gradient_sync(reduce)
        root.set_reshard_after_backward(reduce)
    return root.no_sync() if isinstance(root, DistributedDataParallel) and not reduce else contextlib.nullcontext()
