"""Weights of micro-batches in a mean over something else than samples: valid targets, or the ones of a mask.

The mean over a batch is the mean over its parts weighted by their counts.
Cross-entropies count their own targets when they are called; a mask is an input, and is counted by the name of the input:
``sum:mask``, ``valid:labels`` (elements that are not -100), ``nonzero:ids``, with ``[1:]`` or ``[:-1]`` behind where the model
drops the first or the last position.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.nn import functional as F

from rlplace.errors import InputError
from rlplace.model.torch_adapter import FakeTensor
from rlplace.runtime.torch_adapter import counted_losses

IGNORED = -100
"""The target that torch and transformers ignore."""

_COUNTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda value: value,
    "valid": lambda value: value != IGNORED,
    "nonzero": lambda value: value != 0,
}
_REDUCTIONS = ("none", "mean", "sum")
"""By torch's numbers."""

_SLICES = {"": slice(None), "[1:]": slice(1, None), "[:-1]": slice(None, -1)}


def candidates(inputs: Any, rows: int) -> dict[str, float]:
    """Returns the count of a batch of so many samples by every reduction that its keyword inputs offer."""
    return {way: count_of(way, inputs) for way in _ways(inputs, rows)}


def _ways(inputs: Any, rows: int) -> Iterator[str]:
    for name, leaf in inputs.items() if isinstance(inputs, Mapping) else ():
        if not isinstance(leaf, torch.Tensor) or leaf.is_complex() or not leaf.dim() or len(leaf) != rows:
            continue
        integers = not leaf.is_floating_point() and leaf.dtype != torch.bool
        kinds = [kind for kind in _COUNTS if kind == "sum" or integers]
        if not bool(((leaf == 0) | (leaf == 1)).all()):
            kinds.remove("sum")
        yield from (f"{kind}:{name}{cut}" for kind in kinds for cut in (_SLICES if leaf.dim() > 1 else ("",)))


def count_of(way: str, inputs: Mapping[str, Any]) -> float:
    """Returns the count of a batch or a micro-batch with these keyword inputs, by a reduction such as ``"sum:mask"``."""
    kind, _, rest = way.partition(":")
    cut = next((cut for cut in _SLICES if cut and rest.endswith(cut)), "")
    name = rest.removesuffix(cut)
    value = inputs.get(name)
    if kind not in _COUNTS or not isinstance(value, torch.Tensor):
        raise InputError(f"reduction {way!r} counts an input {name!r}, which is no tensor of this batch; plan the model again")
    value = value if not cut else value[:, _SLICES[cut]]
    return float(_COUNTS[kind](value).sum(dtype=torch.float64))


class Targets:
    """Counts of the targets of cross-entropies that are not ignored, by their class weights where there are any.

    As a context it intercepts torch's calls of their kernels. A mean over no targets at all is 0 inside, and not a number
    outside.

    Attributes:
        count: Of all calls so far; float64 [] on the device of the targets after the first.
    """

    def __init__(self, *, thin: bool = False) -> None:
        """Starts at 0; `thin` ignores a third of the targets, by their values."""
        self.count: torch.Tensor = torch.zeros((), dtype=torch.float64)
        self._thin, self._inside = thin, contextlib.ExitStack()

    def __enter__(self) -> Targets:
        self._inside.enter_context(counted_losses(self._counted))
        return self

    def __exit__(self, *_: object) -> None:
        self._inside.close()

    def _counted(
        self,
        kernel: Callable[..., torch.Tensor],
        value: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor | None = None,
        reduction: int = 1,
        ignore_index: int = IGNORED,
        *smoothing: float,
    ) -> torch.Tensor:
        traced = isinstance(target, FakeTensor) or target.is_meta
        if traced or _REDUCTIONS[reduction] != "mean" or target.is_floating_point():
            return kernel(value, target, weight, reduction, ignore_index, *smoothing)
        if self._thin:
            target = torch.where(target % 3 == 1, ignore_index, target)
        valid = target != ignore_index
        if weight is None:
            own = valid.sum(dtype=torch.float64)
        else:
            own = (weight.detach()[torch.where(valid, target, 0)] * valid).sum(dtype=torch.float64)
        self.count = self.count.to(own.device) + own
        total = kernel(value, target, weight, _REDUCTIONS.index("sum"), ignore_index, *smoothing)
        return total / own.clamp_min(1e-30).to(total.dtype)


def _seen(function: Callable[..., torch.Tensor], *names: str) -> Callable[..., torch.Tensor]:
    """Returns a function that takes the arguments of an op and calls torch's function."""

    def called(value: torch.Tensor, target: torch.Tensor, *options: Any, **named: Any) -> torch.Tensor:
        given = dict(zip(names, options, strict=False)) | named
        return function(value, target, **given | {"reduction": _REDUCTIONS[given.get("reduction", 1)]})

    return called


_OPTIONS = ("weight", "reduction", "ignore_index")
SEEN: dict[Any, Callable[..., torch.Tensor]] = {
    torch.ops.aten.cross_entropy_loss.default: _seen(F.cross_entropy, *_OPTIONS, "label_smoothing"),
    torch.ops.aten.nll_loss_nd.default: _seen(F.nll_loss, *_OPTIONS),
    torch.ops.aten.nll_loss.default: _seen(F.nll_loss, *_OPTIONS),
}
"""Functions in place of ops of a recorded graph, whose targets `Targets` counts."""
