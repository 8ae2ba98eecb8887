"""What `why_not` must know of a model: names and kinds, no tensors."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from rlplace.errors import InputError
from rlplace.runtime.native.batches import Batch
from rlplace.runtime.native.blocks import block_names, has_batch_norm, tied_names
from rlplace.runtime.native.capture import capture
from rlplace.runtime.native.cut import cut
from rlplace.runtime.native.model_layouts import ModelLayouts, find_layouts
from rlplace.runtime.native.why_not import ModelFacts


def model_facts(model: nn.Module, layouts: ModelLayouts | None = None) -> ModelFacts:
    """Looks at the modules of a model, and at its layouts where they are known; nothing is run."""
    return _facts(model, None, layouts)


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
        cut(captured, [[block] for block in blocks])
    except InputError as error:
        return _facts(model, str(error), None)
    return replace(_facts(model, None, find_layouts(captured.units, captured.calls)), blocks=blocks)


def _facts(model: nn.Module, no_cut: str | None, layouts: ModelLayouts | None) -> ModelFacts:
    facts = ModelFacts(block_names(model), has_batch_norm(model), tied_names(model), no_cut)
    if layouts is None:
        return facts
    return replace(
        facts,
        no_tensor=layouts.no_tensor,
        tensor_parts=layouts.parts,
        no_sequence=layouts.no_sequence,
        layouts=layouts.by_module(),
        vocabulary=layouts.vocabulary,
    )
