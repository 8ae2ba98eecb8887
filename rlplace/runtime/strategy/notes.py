"""What a strategy means for the loss and the buffers of a model: sentences for whoever reads the answer."""

from __future__ import annotations

from collections.abc import Iterator

from rlplace.plan.strategy import Strategy
from rlplace.runtime.base.conduct import COUPLES, MEAN, SUM, TARGETS, Conduct
from rlplace.runtime.strategy.why_not import ModelFacts


def notes_of(strategy: Strategy, facts: ModelFacts) -> tuple[str, ...]:
    """Sentences about what a strategy computes that the model in one piece would not; empty where it computes the same.

    Args:
        strategy: The answer.
        facts: Of the model.
    """
    return tuple(_notes(strategy, facts))


def _notes(strategy: Strategy, facts: ModelFacts) -> Iterator[str]:
    pipeline, conduct = strategy.pipelines[0], facts.conduct or Conduct()
    micro = max(pipeline.microbatches) > 1
    if pipeline.data_degree == 1 and not micro:
        return
    sizes = sorted({min(pipeline.microbatch), max(pipeline.microbatch)})
    samples = f"{' to '.join(map(str, sizes))} a {'micro-batch' if micro else 'replica'}"
    norm = facts.batch_norm or (facts.sync_norm and micro)
    if norm:
        yield f"BatchNorm normalizes by the statistics of {samples}, not of all {strategy.batch} samples of a step"
    if conduct.couples and strategy.couple == "gather" and not micro:
        yield f"{COUPLES}: replicas gather what it reads, and compute it over all {strategy.batch} of a step"
    elif conduct.couples and not norm and not facts.sync_norm:
        how = "" if conduct.indivisible or not conduct.samples else f" ({_figures(conduct)})"
        yield (
            f"{COUPLES}{_where(conduct)}: it is computed over {samples}{how}; --couple gather keeps the loss of the whole batch"
        )
    if facts.branches:
        yield f"the forward looks at values outside of its blocks, and branches by those of {samples}"
    if conduct.reduction == SUM:
        yield "the loss is a sum over samples: the losses of replicas and micro-batches are added up"
    elif conduct.reduction == TARGETS:
        yield "the loss is a mean over targets: replicas and micro-batches count by their targets that are not ignored"
    elif conduct.reduction not in (MEAN, ""):
        yield f"the loss is a mean weighted by an input: replicas and micro-batches count by {conduct.reduction}"
    if conduct.written and strategy.buffers == "replica":
        yield f"every replica and micro-batch writes {conduct.written[0]} by its own samples"


def _where(conduct: Conduct) -> str:
    return f" (first in {conduct.where})" if conduct.where else ""


def _figures(conduct: Conduct) -> str:
    whole, halves = f"{conduct.whole:.4g} in one piece", f"{conduct.parts:.4g} as the mean of two parts"
    return f"of {conduct.samples} example samples, {whole} and {halves}"
