"""What `why_not` must know of a model: names and kinds, no tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from rlplace.errors import InputError
from rlplace.runtime.native.batches import Batch
from rlplace.runtime.native.blocks import block_names, has_batch_norm, has_sync_norm, tied_names
from rlplace.runtime.native.capture import capture
from rlplace.runtime.native.cut import StageGraph, cut
from rlplace.runtime.native.model_layouts import find_layouts
from rlplace.runtime.native.why_not import ModelFacts, TensorFacts


def model_facts(model: nn.Module, tensor: TensorFacts | None = None, no_cut: str | None = None) -> ModelFacts:
    """Looks at the modules of a model, and at what is known of its layouts and its cut; nothing is run."""
    return ModelFacts(_needed(model), has_batch_norm(model), has_sync_norm(model), no_cut, None, tensor or TensorFacts())


def examine(model: nn.Module, inputs: Batch) -> ModelFacts:
    """Everything that `why_not` asks, from a forward on fake tensors; blocks in the order in which the forward calls them.

    Args:
        model: Real or meta module; it is not changed.
        inputs: Keyword inputs of one micro-batch; only shapes and dtypes matter.
    """
    try:
        captured = capture(model, inputs)
        called = dict.fromkeys(str(node.target) for node in captured.graph.nodes if node.op == "call_module")
        known = set(block_names(model))
        blocks = tuple(path for path in called if path in known)
        stages = cut(captured, [[block] for block in blocks])
    except InputError as error:
        return model_facts(model, no_cut=str(error))
    layouts = find_layouts(captured.units, captured.calls)
    facts = model_facts(model, TensorFacts(**{item.name: getattr(layouts, item.name) for item in fields(TensorFacts)}))
    return replace(facts, blocks=blocks, no_samples=_no_samples(stages, inputs))


def facts_of(module: nn.Module, inputs: Any) -> ModelFacts:
    """Everything that `why_not` asks; with other than keyword inputs only the names of its modules are looked at."""
    return examine(module, inputs) if isinstance(inputs, Mapping) else model_facts(module)


def _no_samples(stages: Sequence[StageGraph], inputs: Batch) -> str | None:
    """Which value crosses between stages without the samples as its first dimension."""
    samples = {leaf.shape[0] for leaf in pytree.tree_leaves(dict(inputs)) if isinstance(leaf, torch.Tensor) and leaf.dim()}
    shapes = dict.fromkeys(tuple(value.shape) for stage in stages for value in stage.taken)
    strange = next((shape for shape in shapes if not shape or shape[0] not in samples), None)
    return None if strange is None else f"a value of shape {strange} is handed on, which has not the samples first"


def _needed(model: nn.Module) -> tuple[str, ...]:
    """Blocks that a strategy has to name: what holds tied parameters alone may be a mere name of them, as T5's `shared` is."""
    tied = {name for names in tied_names(model) for name in names}
    held = {path: model.get_submodule(path).named_parameters(path) for path in block_names(model)}
    return tuple(path for path, parameters in held.items() if any(name not in tied for name, _ in parameters))
