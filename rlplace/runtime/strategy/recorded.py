"""Comparison of a recorded forward with the model itself, by values.

A record is made while the model is traced, and some models do other things then: masks that a run leaves out, other kernels, a
cache. Stages run the record, so they would train another model.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from rlplace.model.capture.caches import turn_off_caches
from rlplace.model.capture.fake import computed_values
from rlplace.model.capture.outputs import register_dataclasses
from rlplace.model.torch_adapter import FakeTensor, pytree
from rlplace.runtime.base.batches import Batch
from rlplace.runtime.strategy.capture import UnitGraph
from rlplace.runtime.strategy.rehearsal import AlikeDraws, affordable

TOLERANCE = 3e-5
"""Difference that rounding may make in 32 bits, as a part of the largest result; in 16 bits a hundred times as much."""


def why_unlike(model: nn.Module, captured: UnitGraph, inputs: Batch, flops: float = 0.0) -> str | None:
    """Explains how results of a recorded forward differ from those of the model.

    Args:
        model: With values, in the mode that it trains in; it is not changed.
        captured: Its record.
        inputs: Keyword inputs of the record.
        flops: Of a step, where that is known.

    Returns:
        None where they do not differ, where the model is too large or has no values, and where two runs of itself differ.
    """
    held = [*model.parameters(), *model.buffers(), *pytree.tree_leaves(dict(inputs))]
    tensors = [leaf for leaf in held if isinstance(leaf, torch.Tensor)]
    if any(leaf.is_meta or isinstance(leaf, FakeTensor) for leaf in tensors) or affordable(model, flops) is not None:
        return None
    try:
        wanted, again = (_results(_copy(model, model), inputs) for _ in range(2))
    except Exception:  # the model's own code runs; its rehearsal says how it fails
        return None
    if _apart(wanted, again):
        return None
    made = fx.GraphModule(_copy(captured.module, model), captured.graph)
    try:
        found = _results(lambda **fresh: made(*pytree.tree_leaves(((), fresh))), inputs)
    except Exception as error:
        return f"native: its recorded forward raises {type(error).__name__}: {str(error)[:200]}; plan with pipeline=1"
    if (how := _apart(wanted, found)) is not None:
        return f"native: its recorded forward computes other results than the model ({how}); plan with pipeline=1"
    return None


def _copy(module: nn.Module, model: nn.Module) -> nn.Module:
    """Copies a model, or a module of its parts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch copies what it tells others not to use
        made = copy.deepcopy(module, computed_values(model))
    turn_off_caches(made)
    return made


def _results(forward: Callable[..., Any], inputs: Batch) -> list[torch.Tensor]:
    """Runs a forward, whose random numbers depend neither on what ran before nor on the order of ops, and lists its tensors."""
    fresh = pytree.tree_map_only(torch.Tensor, lambda leaf: leaf.detach().clone(), dict(inputs))
    with torch.random.fork_rng(devices=[]), torch.no_grad(), AlikeDraws():
        output = forward(**fresh)
    register_dataclasses(output)
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided]


def _apart(wanted: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> str | None:
    """Says how results differ; None where they do not."""
    if len(wanted) != len(found):
        return f"{len(found)} tensors, not {len(wanted)}"
    for one, other in zip(wanted, found, strict=True):
        if one.shape != other.shape or one.dtype != other.dtype:
            return f"a tensor of {tuple(other.shape)} in {other.dtype}, not {tuple(one.shape)} in {one.dtype}"
        tolerance = TOLERANCE * (100.0 if one.element_size() < 4 else 1.0) if one.is_floating_point() else 0.0
        a, b = (value.to(torch.complex128) for value in (one, other))
        largest = float(a.abs().nan_to_num(posinf=0.0).max()) if a.numel() else 0.0
        if not torch.allclose(b, a, rtol=0.0, atol=tolerance * largest, equal_nan=True):
            return f"apart by {float((b - a).abs().nan_to_num().max()) / (largest or 1.0):.1e} of the largest"
    return None
