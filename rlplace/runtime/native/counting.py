"""What the samples of a micro-batch count in a mean over something else than samples: valid targets, or the ones of a mask.

The mean over a batch is the mean over its parts weighted by their counts. Cross-entropies count their own targets when they are
called; a mask is an input, and is counted by the name of the input: ``sum:mask``, ``valid:labels`` (elements that are not
-100), ``nonzero:ids``, with ``[1:]`` or ``[:-1]`` behind where the model drops the first or the last position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from rlplace.errors import InputError

IGNORED = -100
"""The target that torch and transformers ignore."""

_COUNTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda value: value,
    "valid": lambda value: value != IGNORED,
    "nonzero": lambda value: value != 0,
}
_SLICES = {"": slice(None), "[1:]": slice(1, None), "[:-1]": slice(None, -1)}


def candidates(inputs: Any, rows: int) -> dict[str, float]:
    """What a batch counts by every way of counting that its inputs offer.

    Args:
        inputs: Keyword inputs.
        rows: Samples of the batch.
    """
    return {way: count_of(way, inputs) for way in _ways(inputs, rows)} if isinstance(inputs, Mapping) else {}


def _ways(inputs: Mapping[str, Any], rows: int) -> Iterator[str]:
    for name, leaf in inputs.items():
        if not isinstance(leaf, torch.Tensor) or leaf.is_complex() or not leaf.dim() or len(leaf) != rows:
            continue
        whole = not leaf.is_floating_point() and leaf.dtype != torch.bool
        kinds = [kind for kind in _COUNTS if kind == "sum" or whole]
        if not bool(((leaf == 0) | (leaf == 1)).all()):
            kinds.remove("sum")
        yield from (f"{kind}:{name}{cut}" for kind in kinds for cut in (_SLICES if leaf.dim() > 1 else ("",)))


def count_of(way: str, inputs: Mapping[str, Any]) -> float:
    """What a batch counts.

    Args:
        way: Such as ``"sum:mask"``.
        inputs: Keyword inputs of the batch, or of a micro-batch.

    Raises:
        InputError: It has no such input.
    """
    kind, _, rest = way.partition(":")
    cut = next((cut for cut in _SLICES if cut and rest.endswith(cut)), "")
    name = rest.removesuffix(cut)
    value = inputs.get(name)
    if kind not in _COUNTS or not isinstance(value, torch.Tensor):
        raise InputError(f"reduction {way!r} counts an input {name!r}, which is no tensor of this batch; plan the model again")
    value = value if not cut else value[:, _SLICES[cut]]
    return float(_COUNTS[kind](value).sum(dtype=torch.float64))


class Targets(TorchFunctionMode):
    """Counts the targets of cross-entropies that are not ignored, by their class weights where there are any.

    A cross-entropy without a valid target, whose mean is not a number, is 0 inside.

    Attributes:
        count: Of all calls so far.
    """

    def __init__(self, *, thin: bool = False) -> None:
        """Starts at 0; `thin` ignores a third of the targets, by their values."""
        super().__init__()
        self.count, self._thin = 0.0, thin

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if function not in (F.cross_entropy, F.nll_loss):
            return function(*args, **given)
        given |= dict(
            zip(("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction"), args, strict=False)
        )
        target, ignored = given["target"], given.get("ignore_index", IGNORED)
        if (
            target.is_floating_point()
            or isinstance(target, FakeTensor)
            or target.is_meta
            or given.get("reduction", "mean") != "mean"
            or given.get("reduce") is not None
        ):
            return function(**given)
        if self._thin:
            given["target"] = target = torch.where(target % 3 == 1, ignored, target)
        valid = target != ignored
        weight = given.get("weight")
        own = valid.sum() if weight is None else weight.detach()[target[valid]].sum()
        self.count += float(own)
        if not float(own):
            given["reduction"] = "sum"
        return function(**given)


def cross_entropy(
    value: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = IGNORED,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Computes ``aten.cross_entropy_loss`` where `Targets` sees it."""
    given: dict[str, Any] = {"weight": weight, "ignore_index": ignore_index, "reduction": _REDUCTIONS[reduction]}
    return F.cross_entropy(value, target, label_smoothing=label_smoothing, **given)


def nll_loss(
    value: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = IGNORED,
) -> torch.Tensor:
    """Computes ``aten.nll_loss_nd`` where `Targets` sees it."""
    return F.nll_loss(value, target, weight=weight, ignore_index=ignore_index, reduction=_REDUCTIONS[reduction])


_REDUCTIONS = ("none", "mean", "sum")
SEEN: dict[Any, Callable[..., torch.Tensor]] = {
    torch.ops.aten.cross_entropy_loss.default: cross_entropy,
    torch.ops.aten.nll_loss_nd.default: nll_loss,
    torch.ops.aten.nll_loss.default: nll_loss,
}
"""Functions to put in the place of ops of a recorded graph."""
