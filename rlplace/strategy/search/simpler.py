"""Which of two strategies is simpler: of those that are near the quickest, the simplest is the answer."""

from __future__ import annotations

from collections.abc import Iterable

from rlplace.strategy.drafts import Draft
from rlplace.strategy.search.tries import Tried

NEAR = 1.01
"""A plan that takes at most so many times as long as the quickest is as good: the simpler one is answered."""


def simplicity(draft: Draft) -> tuple[int, ...]:
    """What makes a strategy simple, the most important first; the smaller is simpler.

    Fewer devices, fewer pipelines beside each other, fewer stages, no ops that are cut (tensor, context and expert axes),
    nothing offloaded, nothing that runs again, whole copies or a low sharding level, fewer axes, fewer micro-batches.
    """
    pipelines = draft.pipelines
    places = [place for one in pipelines for place in one.places]
    axes = {
        axis: max(getattr(place, axis) for place in places) for axis in ("tensor", "context", "expert", "shard", "replicate")
    }
    return (
        len(draft.devices),
        len(pipelines),
        sum(one.stages for one in pipelines),
        axes["tensor"] * axes["context"] * axes["expert"],
        int(any(any(one.offload) for one in pipelines)),
        int(any(any(one.recompute) for one in pipelines)),
        max(place.sharding for place in places),
        sum(size > 1 for size in axes.values()),
        max(count for one in pipelines for count in one.microbatches),
    )


def simpler(tried: Iterable[Tried], than: Tried, most_s: float) -> list[Tried]:
    """Returns drafts that fit, take at most `most_s` and are simpler than another, the simplest first; of those alike the
    first.
    """
    found: dict[tuple[int, ...], Tried] = {}
    for one in tried:
        if one.fits and one.step_s <= most_s:
            found.setdefault(simplicity(one.draft), one)
    own = simplicity(than.draft)
    return [found[key] for key in sorted(found) if key < own]
