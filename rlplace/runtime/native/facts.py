"""What `why_not` must know of a model: names and kinds, no tensors."""

from __future__ import annotations

from torch import nn

from rlplace.runtime.native.blocks import block_names, has_batch_norm, tied_names
from rlplace.runtime.native.why_not import ModelFacts


def model_facts(model: nn.Module) -> ModelFacts:
    """Looks at the modules of a model; nothing is run."""
    return ModelFacts(block_names(model), has_batch_norm(model), tied_names(model))
