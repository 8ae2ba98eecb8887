"""What people call strategies: one device, data parallel, fully sharded, tensor parallel, pipeline and what they combine to."""

from __future__ import annotations

from rlplace.strategy.drafts import Draft

KINDS = ("one device", "data parallel", "fully sharded", "tensor parallel", "pipeline")
"""Kinds that have one dimension; others are named after all that they have."""

UNLIKE = "unlike pipelines"
"""Kind of several pipelines."""


def kind_of(draft: Draft) -> str:
    """What people call a strategy."""
    if draft.beside:
        return UNLIKE
    return kind_named(draft.stages, *(max(getattr(place, axis) for place in draft.places) for axis in _WORDS))


_WORDS = {
    "tensor": "tensor parallel",
    "context": "context parallel",
    "expert": "expert parallel",
    "shard": "fully sharded",
    "replicate": "data parallel",
}


def kind_named(stages: int, *degrees: int) -> str:
    """The name of a kind, from its stages and the degrees of the axes of `_WORDS`."""
    words = zip(("pipeline", *_WORDS.values()), (stages, *degrees), strict=True)
    return " x ".join(word for word, degree in words if degree > 1) or "one device"
