"""Buffers that a forward writes, in a step of several micro-batches: each pass begins with the values of the step's beginning.

The step of a batch in one piece writes a counter once, that of four micro-batches would write it four times. A write that
depends on samples has no right value here; the first step finds it, on a process or between processes, and refuses it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from rlplace.errors import InputError
from rlplace.runtime.base.batches import Batch, Pass, counting_alone
from rlplace.runtime.base.ranks import digest, gather_objects
from rlplace.runtime.torch_adapter import NormBase, reduce_in_order


class StepBuffers:
    """The buffers of some modules while a step runs; torch's norms keep their own statistics of every pass.

    Args:
        modules: Roots of what this process runs.
        by_replica: Passes write one after the other, whatever they write.
    """

    def __init__(self, modules: Iterable[nn.Module], *, by_replica: bool) -> None:
        self._modules, self._by_replica = list(modules), by_replica
        self._written: set[str] | None = None  # None: no pass has run yet
        self._before: dict[str, torch.Tensor] = {}
        self._first: dict[str, torch.Tensor] = {}
        self._checked = False

    @property
    def _idle(self) -> bool:
        """True where every pass may write its own values, or a step has shown that none writes."""
        return self._by_replica or self._written == set()

    def begin(self) -> None:
        """Begins a step."""
        if self._idle:
            return
        self._first.clear()
        self._before = {name: held[key].detach().clone() for name, held, key in self._held()}
        self._marks = {name: (id(held[key]), held[key]._version) for name, held, key in self._held()}
        self._objects = {name: held[key] for name, held, key in self._held()}

    def begin_pass(self) -> None:
        """Gives written buffers the values that the step began with."""
        if self._first:
            for name, held, key in self._held():
                if name in self._first:
                    held[key] = self._before[name].clone()

    def end_pass(self) -> None:
        """Notes what the first pass has written, and refuses a later one that writes something else.

        Raises:
            InputError: A buffer is written by the samples.
        """
        if self._idle:
            return
        for name, held, key in self._held():
            mark = (id(held[key]), held[key]._version)
            if name in self._first:
                if not self._checked and not torch.equal(held[key], self._first[name]):
                    raise InputError(_refusal(name))
            elif mark != self._marks.get(name):
                self._first[name] = held[key].detach().clone()

    def end(self) -> None:
        """Ends the step: every buffer is the tensor that it was, with what one pass has written."""
        if self._idle:
            return
        with torch.no_grad():
            for name, held, key in self._held():
                if name in self._first:
                    held[key] = self._objects[name].copy_(self._first[name])
        self._written, self._checked = set(self._first), True

    def written(self) -> dict[str, bytes]:
        """Returns digests of what the last step has written, by name."""
        return {name: digest(value) for name, value in self._first.items()}

    def _held(self) -> list[tuple[str, dict[str, Any], str]]:
        """Returns name, dictionary and key of every buffer that may have been written."""
        found: list[tuple[str, dict[str, Any], str]] = []
        for root in self._modules:
            for path, module in root.named_modules():
                if not isinstance(module, NormBase):
                    rows = ((f"{path}.{key}".lstrip("."), module._buffers, key) for key in module._buffers)
                    found += [row for row in rows if row[1][row[2]] is not None]
        return found if self._written is None else [row for row in found if row[0] in self._written]


def check_same_writes(parts: Iterable[StepBuffers]) -> None:
    """Compares what processes have written in their first step; every process of the job calls it.

    Raises:
        InputError: They have written other values into a buffer.
    """
    values: dict[str, bytes] = {}
    for own in gather_objects({name: value for part in parts for name, value in part.written().items()}):
        for name, value in own.items():
            if values.setdefault(name, value) != value:
                raise InputError(_refusal(name))


def _refusal(name: str) -> str:
    return (
        f"native: the forward writes the buffer {name} by the samples that it gets, so replicas and micro-batches write others "
        "than the whole batch; plan with replicate=1 shard=1 microbatches=1, or let each write its own (--buffers replica)"
    )


Loss = Callable[[Any, Batch], torch.Tensor]
"""Called with the model's output and the micro-batch; returns the mean loss over its samples."""


class Accumulation:
    """A runner of micro-batches one after the other.

    Args:
        root: The model as `wrap_stage` returned it.
        device: Device that it computes on.
        every_pass: Reduce gradients after every micro-batch (levels 2 and 3), not once a step.
        in_order: Reduce them after the last backward, block by block, since processes may call unlike blocks.
        buffers: Buffers that forwards write.
    """

    def __init__(
        self, root: nn.Module, device: torch.device, *, every_pass: bool, buffers: StepBuffers, in_order: bool = False
    ) -> None:
        self.root, self._device, self._every_pass, self._buffers = root, device, every_pass, buffers
        self._in_order = in_order and isinstance(root, FSDPModule)
        self._first_step = True
        self.keeps_gradients = isinstance(root, DistributedDataParallel)  # the next step overwrites those of this one

    def step(
        self, passes: Sequence[Pass], loss: Loss, counted: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Runs forward and backward of every micro-batch.

        Args:
            passes: The micro-batches.
            loss: Their loss.
            counted: Returns from the weight of the only micro-batch that by which its gradients are divided in the backward.

        Returns:
            float [2], the weighted sum of their losses, and the sum of the weights.
        """
        sums = []
        self._buffers.begin()
        with forward_autocast(self._device) as region:
            for number, one in enumerate(passes):
                last = number == len(passes) - 1 and not self._in_order
                self._buffers.begin_pass()
                with _reducing(self.root, last or self._every_pass, last):
                    with region(), one.counting() as targets:
                        output = self.root(**one.inputs)
                        with counting_alone(targets):
                            value = loss(output, one.part)
                        del output
                    weight = one.counted(targets, self._device, trains=True)
                    self._buffers.end_pass()
                    share = weight if counted is None else weight / counted(weight.clone())
                    (value * share.to(value.dtype)).backward()  # type: ignore[no-untyped-call]
                sums.append(torch.stack([value.detach().to(weight).reshape(()) * weight, weight]))
        if self._in_order:
            reduce_in_order(self.root)
        self._buffers.end()
        if self._first_step:
            check_same_writes([self._buffers])
            self._first_step = False
        return torch.stack(sums).sum(0)

    def evaluate(self, passes: Sequence[Pass]) -> list[tuple[Any, float]]:
        """Returns output and weight of every micro-batch."""
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
    """Returns whether gradients are reduced over the replicas in the backward of this pass, which runs inside."""
    if isinstance(root, FSDPModule):
        root.set_is_last_backward(last)
        root.set_requires_gradient_sync(reduce)
        root.set_reshard_after_backward(reduce)
    return root.no_sync() if isinstance(root, DistributedDataParallel) and not reduce else contextlib.nullcontext()
