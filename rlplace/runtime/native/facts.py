"""What `why_not` must know of a model: names and kinds, no tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from rlplace.errors import InputError
from rlplace.plan.strategy import Strategy
from rlplace.runtime.native.batches import Batch
from rlplace.runtime.native.blocks import block_names, has_batch_norm, has_sync_norm, tied_names
from rlplace.runtime.native.capture import capture
from rlplace.runtime.native.cut import StageGraph, cut
from rlplace.runtime.native.model_layouts import find_layouts
from rlplace.runtime.native.why_not import ModelFacts, TensorFacts, why_not


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
    facts = model_facts(model, find_layouts(captured.units, captured.calls))
    return replace(facts, blocks=blocks, no_samples=_no_samples(stages, inputs))


def what_runs(module: nn.Module | None, inputs: Any) -> tuple[Callable[[Strategy], str | None], frozenset[str] | None]:
    """What planning asks of this runtime: `why_not` for the model, and the modules whose weights a tensor group may cut.

    Args:
        module: The model; None asks about strategies alone.
        inputs: Its keyword inputs; with others it is asked about the names of its modules only.

    Returns:
        The modules are None where all may be cut.
    """
    facts = None
    if module is not None:
        facts = examine(module, inputs) if isinstance(inputs, Mapping) else model_facts(module)
    tensor = TensorFacts() if facts is None else facts.tensor
    cut = frozenset({*tensor.layouts, *tensor.vocabulary}) if tensor.layouts else None
    return lambda strategy: why_not(strategy, facts), cut


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
