"""Notes of a plan on how its strategy treats the loss and the buffers of a model; nothing here loads torch."""

from __future__ import annotations

from collections.abc import Iterator

from rlplace.plan.strategy import MEAN, SUM, TARGETS, Strategy
from rlplace.runtime.strategy.fact_records import COUPLES, Conduct, ModelFacts


def notes_of(strategy: Strategy, facts: ModelFacts) -> Iterator[str]:
    """Yields sentences about how the results of a strategy differ from those of the model in one piece."""
    pipelines, conduct = strategy.pipelines, facts.conduct or Conduct()
    replicas, micro = sum(one.data_degree for one in pipelines), max(n for one in pipelines for n in one.microbatches) > 1
    if replicas == 1 and not micro:
        return
    each = [size for one in pipelines for size in one.microbatch]
    sizes = sorted({min(each), max(each)})
    samples = f"{' to '.join(map(str, sizes))} a {'micro-batch' if micro else 'replica'}"
    joined = replicas > 1 and (facts.sync_norm or strategy.statistics == "batch")
    if facts.batch_norm and not joined:
        how = "" if micro else ", as DDP does"
        other = "; --statistics batch joins replicas" if replicas > 1 else f", not of all {strategy.batch}"
        yield f"BatchNorm normalizes by the statistics of {samples}{how}{other}"
    elif (facts.batch_norm or facts.sync_norm) and micro:
        yield f"BatchNorm normalizes by the statistics of one micro-batch of every replica, not of all {strategy.batch} samples"
    if conduct.couples and strategy.couple == "gather" and not micro:
        yield f"{COUPLES}: replicas gather what it reads, and compute it over all {strategy.batch} of a step"
    elif conduct.couples:
        where = f" (first in {conduct.where})" if conduct.where else ""
        whole, halves = f"{conduct.whole:.4g} in one piece", f"{conduct.parts:.4g} as the mean of two parts"
        figures = f" (of {conduct.samples} example samples, {whole} and {halves})"
        how = "" if conduct.indivisible or not conduct.samples else figures
        yield f"{COUPLES}{where}: it is computed over {samples}{how}; --couple gather keeps the loss of the whole batch"
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
