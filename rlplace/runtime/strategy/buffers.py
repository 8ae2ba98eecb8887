"""Buffers that a forward writes, in a step of several micro-batches: each pass begins with what the step began with.

The step of a batch in one piece writes a counter once, that of four micro-batches would write it four times. A write that
depends on samples has no right value here; the first step finds it, on a process or between processes, and refuses it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from rlplace.errors import InputError
from rlplace.runtime.base.ranks import gather_objects
from rlplace.runtime.base.values import digest


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
        """Whether there is nothing to do: every pass may write its own, or a step has shown that none writes."""
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
        """Digests of what the last step has written, by name."""
        return {name: digest(value) for name, value in self._first.items()}

    def _held(self) -> list[tuple[str, dict[str, Any], str]]:
        """Name, dictionary and key of every buffer that may have been written."""
        found: list[tuple[str, dict[str, Any], str]] = []
        for root in self._modules:
            for path, module in root.named_modules():
                if not isinstance(module, _NormBase):
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
