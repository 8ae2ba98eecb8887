"""What people call strategies: one device, data parallel, fully sharded, tensor parallel, pipeline and what they combine to."""

from __future__ import annotations

from collections.abc import Sequence

from rlplace.strategy.drafts import Draft, Place

KINDS = ("one device", "data parallel", "fully sharded", "tensor parallel", "pipeline")
"""Kinds that have one dimension; others are named after all that they have."""

UNLIKE = "unlike pipelines"
"""Kind of several pipelines."""


def kind_of(draft: Draft) -> str:
    """What people call a strategy."""
    if draft.beside:
        return UNLIKE
    return kind_named(draft.stages, draft.places)


_WORDS = {
    "tensor": "tensor parallel",
    "context": "context parallel",
    "expert": "expert parallel",
    "shard": "fully sharded",
    "replicate": "data parallel",
}


def kind_named(stages: int, places: Sequence[Place]) -> str:
    """The name of a kind, from its number of stages and its places."""
    words = [word for axis, word in _WORDS.items() if any(getattr(place, axis) > 1 for place in places)]
    return " x ".join(["pipeline", *words] if stages > 1 else words) or KINDS[0]
