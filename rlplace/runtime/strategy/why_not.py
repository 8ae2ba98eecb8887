"""Reasons why a strategy cannot be run by torch's parts, or would silently run wrong.

They follow from the strategy and from facts about the model, never from the model itself, so that a planner can ask for
thousands of strategies; nothing here loads torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from itertools import chain
from typing import Any

from rlplace.model.capture.optimizers import OPTIMIZERS
from rlplace.plan.schedule import ONE_F_ONE_B, SCHEDULES, V
from rlplace.plan.strategy import Pipeline, Strategy
from rlplace.runtime.strategy.fact_records import Conduct, ModelFacts, TensorFacts
from rlplace.runtime.strategy.why_not_divided import why_no_context, why_no_experts, why_no_tables

OLDEST = (2, 11)
"""Of torch; what runs here was compared with the plain model on this version and on the newest."""

MOST_UNSHARDED = 3
"""Chunks of a device that torch's schedules keep unsharded at once; those beyond are resharded between their actions."""


def why_not(
    strategy: Strategy,
    facts: ModelFacts | None = None,
    torch_version: str | None = None,
    *,
    couple: str | None = None,
    buffers: str | None = None,
    optimizer: str | None = None,
    release: bool = False,
) -> str | None:
    """Returns the first reason why a strategy cannot run, None when it can.

    Args:
        strategy: What is to run.
        facts: Of the model (`model_facts`); without them only what is wrong for every model is found.
        torch_version: Such as ``"2.13.0"``; None takes the installed one.
        couple: See `Strategy`; None takes the strategy's. So does `buffers`.
        buffers: See `couple`.
        optimizer: Name of `OPTIMIZERS`; None: one that updates parts of parameters.
        release: Whether gradients are released, although the strategy does not say so.
    """
    number = minor_version(torch_version or _installed())
    if number < OLDEST:
        return f"torch {'.'.join(map(str, number))} is older than {'.'.join(map(str, OLDEST))}; upgrade it"
    facts, release, couple = facts or ModelFacts(), release or strategy.release_gradients, couple or strategy.couple
    several = len(strategy.pipelines) > 1
    found = [_several(strategy.pipelines, facts, couple, optimizer, release)] if several else []
    for pipeline in strategy.pipelines:
        found += [_release(pipeline)] if release else []
        found += [
            _axes(pipeline, facts),
            why_no_experts(pipeline, facts),
            why_no_tables(pipeline, facts, optimizer, release=release, gathers=couple == "gather", several=several),
            _memory(pipeline, facts),
            _levels(pipeline, facts),
            _pipeline(pipeline, facts, number),
            _optimizer(pipeline, optimizer, release),
            _model(pipeline, facts),
            _hooks(pipeline, facts),
            _values(pipeline, facts, number, release),
            _conduct(pipeline, facts, buffers or strategy.buffers, several=several),
            _gather(pipeline, facts, couple),
        ]
    return next(chain(*found), None)


def judge(
    facts: ModelFacts | None, couple: str | None = None, buffers: str | None = None, **asked: Any
) -> tuple[Callable[[Strategy], str | None], Mapping[str, str] | None]:
    """Returns this runtime's answers to planning: `why_not` for a model, and the layouts of modules over a tensor group.

    Args:
        facts: Of the model; None asks about strategies alone.
        couple: See `why_not`.
        buffers: See `why_not`.
        **asked: Further arguments of `why_not`.

    Returns:
        The modules are None where all may be cut.
    """
    tensor = TensorFacts() if facts is None else facts.tensor
    cut = tensor.words if tensor.layouts else None
    return lambda strategy: why_not(strategy, facts, couple=couple, buffers=buffers, **asked), cut


@cache
def _installed() -> str:
    return version("torch")


def minor_version(text: str) -> tuple[int, int]:
    """Returns the first two numbers of a version, such as (2, 13) of ``"2.13.0+cpu"``."""
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def _several(
    pipelines: Sequence[Pipeline], facts: ModelFacts, couple: str, optimizer: str | None, release: bool
) -> Iterator[str]:
    """Yields why unlike pipelines cannot run side by side: after the backward they sum whole gradients (`sums`)."""
    conduct, rule = facts.conduct or Conduct(), None if optimizer is None else OPTIMIZERS[optimizer]
    alone = "unlike pipelines side by side: "
    if release:
        yield f"{alone}they sum gradients after the backward, which releases them; plan without --release-gradients"
    if couple == "gather":
        yield f"{alone}--couple gather is for the replicas of one; plan without it"
    if facts.batch_norm or facts.sync_norm:
        yield f"{alone}each would have running statistics of its own; plan one"
    if conduct.sparse:
        yield f"{alone}the gradient of {conduct.sparse[0]} is sparse, and they sum dense ones; plan one"
    if conduct.toggles:
        yield f"{alone}the forward changes requires_grad of {conduct.toggles[0]}, which their sums do not follow; plan one"
    if any(stage.offload for pipeline in pipelines for stage in pipeline.stages):
        yield f"{alone}sums of gradients in host memory were never compared with the plain model; plan without offload"
    if rule is not None and (rule.products or rule.quantized or rule.rounds):
        yield f"{alone}updates of {optimizer} depend on how parameters are cut, and copies would drift apart; plan one"


def _axes(pipeline: Pipeline, facts: ModelFacts) -> Iterator[str]:
    for stage in pipeline.stages:
        if stage.axis("branch") > 1:
            yield "the axis branch is not run inside of strategies yet; plan without it"
        if stage.axis("context") > 1:
            yield from why_no_context(pipeline, stage, facts)
    degrees = {stage.data_degree for stage in pipeline.stages}
    if len(degrees) > 1 and max(len(set(pipeline.microbatch)), len(set(pipeline.microbatches))) > 1:
        yield "stages of unlike data degrees run replicas with micro-batches of one size and number; give all the same"
    if len(degrees) > 1 and facts.no_samples is not None:
        yield f"stages of unlike data degrees: {facts.no_samples}"


def _memory(pipeline: Pipeline, facts: ModelFacts) -> Iterator[str]:
    for stage in pipeline.stages:
        if "optimizer" in stage.offload.values():
            yield "optimizer state alone in host memory is not in torch and not run yet; offload 'all', or nothing"
        if stage.offload and stage.sharding == 0:
            yield "offload is fully_shard's (CPUOffloadPolicy) and needs a sharding level of at least 1"
        if stage.offload and len(pipeline.stages) > 1:
            yield "offload in a pipeline was never compared with the plain model; plan it without a pipeline"
        if facts.batch_norm and stage.recompute:
            yield "recomputation runs a forward twice, and BatchNorm would count its running statistics twice"


def _levels(pipeline: Pipeline, facts: ModelFacts) -> Iterator[str]:
    level = max(stage.sharding for stage in pipeline.stages)
    if len(pipeline.stages) > 1 and level > 1:
        yield "a pipeline has sharding level 0 or 1: torch keeps its gradients unsharded until the step ends"
    if level > 1 and len(set(pipeline.microbatches)) > 1:
        yield "unlike numbers of micro-batches at sharding level 2 or 3 wait for each other's collectives for ever"
    if facts.batch_norm and facts.no_single is not None and min(pipeline.microbatch) == 1:
        yield f"micro-batches of one sample: {facts.no_single}; plan with microbatch=2 or more"
    if facts.batch_norm and len({stage.data_degree for stage in pipeline.stages}) > 1:
        yield "stages of unlike data degrees would normalize by the statistics of unlike numbers of samples; give all the same"


def _optimizer(pipeline: Pipeline, optimizer: str | None, release: bool) -> Iterator[str]:
    rule = None if optimizer is None else OPTIMIZERS[optimizer]
    whole, turns = (None, 0) if rule is None else (rule.whole, rule.products)
    if turns and any(stage.sharding and stage.axis("tensor") > 1 for stage in pipeline.stages):
        yield f"the matrices of {optimizer} are gathered over shards or tensor groups, not both; plan with shard=1 or tensor=1"
    if turns and release and any(stage.sharding or stage.axis("tensor") > 1 for stage in pipeline.stages):
        yield (
            f"processes share the matrices of {optimizer} out among them, and released gradients come one by one; plan without "
            "--release-gradients"
        )
    if whole is not None and any(stage.sharding or stage.axis("tensor") > 1 for stage in pipeline.stages):
        yield f"{whole}, and shards and tensor groups have parts; plan with shard=1 tensor=1, or take another optimizer"


def _release(pipeline: Pipeline) -> Iterator[str]:
    """Yields why gradients cannot be released: each has to be whole when its backward ends, and nothing else may hold it."""
    stages = pipeline.stages
    if any(stage.data_degree * stage.axis("context") > 1 and stage.sharding == 0 for stage in stages):
        yield (
            "DistributedDataParallel keeps all gradients in its buckets, so that replicas release none; plan with shares "
            "(levels 1 to 3), or without --release-gradients"
        )
    if len(stages) > 1 or max(pipeline.microbatches) > 1:
        yield (
            "released gradients are gone before those of the next micro-batch come, and cannot be added up; plan with "
            "pipeline=1 microbatches=1, or without --release-gradients"
        )
    if any(stage.offload for stage in stages):
        yield "updates in the backward of blocks in host memory were never compared; plan without offload"


def _pipeline(pipeline: Pipeline, facts: ModelFacts, torch: tuple[int, int]) -> Iterator[str]:
    if len(pipeline.stages) == 1:
        return
    places = pipeline.device_sets
    schedule = SCHEDULES[pipeline.schedule or ""]
    if schedule.layout == V and torch < (2, 13):
        yield "stages in a v need torch 2.13: before, neighbours in one process send to themselves"
    if not pipeline.unlike_meshes and any(list(column) != sorted(column) for column in zip(*places, strict=False)):
        yield "torch numbers the places of a pipeline by rising process; number devices in the order of the chain"
    for stage in pipeline.stages[1:] if schedule.splits_backward else ():
        first = next(
            (one for one in facts.blocks for name in stage.blocks[:1] if one == name or one.startswith(f"{name}.")), ""
        )
        if first in facts.untrained:
            yield f"no gradient flows back from {first}, which a split backward needs; take {ONE_F_ONE_B}, say"
    if schedule.splits_backward and any("selective" in stage.recompute.values() for stage in pipeline.stages):
        yield (
            "a schedule that splits the backward goes through a block twice, and torch recomputes it selectively once; "
            f"recompute in full, or take {ONE_F_ONE_B}, say"
        )
    sharded, chunks = any(stage.sharding for stage in pipeline.stages), len(pipeline.stages) // len(places)
    if sharded and chunks > MOST_UNSHARDED and (schedule.splits_backward or len(set(pipeline.microbatches)) > 1):
        yield (
            f"torch keeps {MOST_UNSHARDED} chunks a device unsharded and reshards others between actions, found {chunks}: "
            "a split backward then loses weight gradients, and replicas of unlike micro-batches wait for each other for ever"
        )


def _model(pipeline: Pipeline, facts: ModelFacts) -> Iterator[str]:
    stages = pipeline.stages
    if len(stages) > 1:
        named = {block for stage in stages for block in stage.blocks}
        if facts.no_cut is not None:
            yield f"the model cannot be cut into stages: {facts.no_cut}"
        for block in facts.blocks:
            if block not in named and not any(block.startswith(f"{name}.") or name.startswith(f"{block}.") for name in named):
                yield f"no stage names the block {block}"
    tensor = facts.tensor
    for degree in sorted({stage.axis("tensor") for stage in stages} - {1}):
        if tensor.no_tensor is not None:
            yield f"no tensor-parallel layout: {tensor.no_tensor}"
        if tensor.parts % degree:
            yield f"the tensor degree {degree} does not divide {tensor.parts}, what heads and widths have in common"
        for heads in (heads for heads in tensor.heads if heads % degree and degree % heads):
            yield f"the tensor degree {degree} neither divides {heads} heads of keys and values nor is their multiple"
    for path, word in {path: word for stage in stages for path, word in stage.tensor.items()}.items():
        own = tensor.words.get(path, "none")
        plain = "vocabulary" if word == "embedding" or "gathered" in word else word.rpartition(" ")[2]
        if plain not in (own, "sequence") and (tensor.layouts or plain not in ("column", "row", "vocabulary")):
            yield f"the plan lays {path} out as {word!r}, this runtime as {own}; plan again with this model"
    for stage in stages:
        for path in tensor.layouts if stage.tensor else ():
            if path not in stage.tensor and any(path.startswith(f"{block}.") or path == block for block in stage.blocks):
                yield f"the plan leaves {path} whole, this runtime cuts it as {tensor.layouts[path]}; plan this model again"
    for degree in sorted({stage.axis("tensor") for stage in stages if stage.sequence_parallel}):
        if tensor.no_sequence is not None:
            yield f"no sequence parallelism: {tensor.no_sequence}"
        if tensor.positions % degree:
            yield f"{tensor.positions} positions cannot be split over {degree} processes; pad them to a multiple"


def _hooks(pipeline: Pipeline, facts: ModelFacts) -> Iterator[str]:
    stages = pipeline.stages
    splits = len(stages) > 1 and SCHEDULES[pipeline.schedule or ""].splits_backward
    if facts.subclass is not None:
        yield f"the parameter {facts.subclass} is no plain tensor, which no engine here trains; convert it to a plain one"
    if facts.hooked and any(stage.axis("tensor") > 1 for stage in stages):
        yield f"the hooks of {facts.hooked[0]} would see parts of activations and weights; remove them, or plan with tensor=1"
    if len(stages) > 1 and facts.hooked_outside:
        yield (
            f"the hooks of {facts.hooked_outside[0]} lie outside of all blocks, where a pipeline does not call them; move them "
            "to a block, or plan with pipeline=1"
        )
    if facts.backward_hooks and splits:
        yield (
            f"a schedule that splits the backward would call the hooks of {facts.backward_hooks[0]} twice; take another, such "
            f"as {ONE_F_ONE_B}"
        )
    if (twice := facts.recurrent or facts.reused) is not None and splits:
        yield f"a schedule that splits the backward goes through {twice} twice; take {ONE_F_ONE_B}, say"
    if facts.recurrent is not None and any("selective" in stage.recompute.values() for stage in stages):
        yield (
            f"selective recomputation keeps products that {facts.recurrent} writes to in place, and gradients would be others; "
            "recompute in full"
        )
    if facts.handed is not None and any(stage.recompute for stage in stages):
        yield (
            f"recomputation runs a forward twice, and {facts.handed}, which would be filled twice; for a cache of keys and "
            "values, set model.config.use_cache = False"
        )
    if facts.backward_hooks and any(stage.recompute for stage in stages):
        yield f"recomputation would call the hooks of {facts.backward_hooks[0]} on other activations; plan without recompute"


def _values(pipeline: Pipeline, facts: ModelFacts, torch: tuple[int, int], release: bool) -> Iterator[str]:
    """Yields why processes cannot go unlike ways through a forward that reads values (`reach`)."""
    stages = pipeline.stages
    several = [stage for stage in stages if stage.data_degree * stage.axis("context") > 1]
    wrapped = any(stage.sharding or stage.axis("tensor") > 1 or len(stages) > 1 for stage in several)
    if not wrapped:
        return
    if (facts.skips or facts.branches) and torch < (2, 13):
        yield (
            "the forward reads values, by which processes may reach unlike parameters, whose gradients are reduced together "
            "since torch 2.13; upgrade it, or plan with shard=1 tensor=1 pipeline=1"
        )
    if facts.skips and release:
        yield "released gradients of parameters that no sample reaches would be zeros; plan without --release-gradients"
    if facts.skips and len(stages) > 1 and SCHEDULES[pipeline.schedule or ""].splits_backward:
        yield (
            "a schedule that splits the backward does not tell which parameters a forward that reads values has reached; take "
            f"{ONE_F_ONE_B}, say"
        )
    if facts.branches and any(stage.sharding > 1 or stage.offload for stage in stages):
        yield (
            "the forward looks at values outside of its blocks, so that processes may call unlike blocks and wait for each "
            "other's parameters for ever; plan with sharding=1, which gathers all of them in one order, and without offload"
        )


def _conduct(pipeline: Pipeline, facts: ModelFacts, buffers: str, *, several: bool) -> Iterator[str]:
    conduct = facts.conduct or Conduct()
    stages, parts = pipeline.stages, pipeline.data_degree * max(pipeline.microbatches) + several
    in_parts = len(stages) > 1 or any(stage.sharding or stage.recompute or stage.axis("tensor") > 1 for stage in stages)
    alone = "plan with replicate=1 shard=1 microbatches=1"
    if conduct.indivisible is not None and parts > 1:
        yield f"the batch cannot be divided: a part of it raised {conduct.indivisible}; {alone}"
    if conduct.written and parts > 1 and buffers == "whole":
        yield (
            f"the forward writes {conduct.written[0]} by the samples that it gets, so replicas and micro-batches would write "
            f"others; {alone}, or let each write its own (--buffers replica)"
        )
    if conduct.kept and (len(stages) > 1 or max(pipeline.microbatches) > 1):
        yield (
            f"the forward writes {conduct.kept[0]}, a plain attribute, which stages and micro-batches do not follow; register "
            "it as a buffer, or plan with pipeline=1 microbatches=1"
        )
    if (conduct.written or conduct.counters) and any(stage.recompute for stage in stages):
        yield f"recomputation runs a forward twice, and {(*conduct.written, *conduct.counters)[0]} would be written twice"
    if conduct.toggles and in_parts:
        yield (
            f"the forward changes requires_grad of {conduct.toggles[0]}, which shares, stages, tensor groups and recomputation "
            "do not follow; plan with shard=1 pipeline=1 tensor=1"
        )
    if conduct.differentiates and in_parts:
        yield (
            "the forward computes gradients itself, which shares, stages, tensor groups and recomputation do not follow; plan "
            "with shard=1 pipeline=1 tensor=1"
        )
    sparse = [name for name in conduct.sparse if name.rpartition(".")[0] not in stages[0].tables]
    if sparse and any(stage.data_degree * stage.axis("tensor") * stage.axis("context") > 1 for stage in stages):
        yield (
            f"the gradient of {sparse[0]} is sparse, and replicas, shares and groups sum dense ones, as NCCL does; divide all "
            "such tables, or build them with sparse=False"
        )


def _gather(pipeline: Pipeline, facts: ModelFacts, couple: str) -> Iterator[str]:
    if couple != "gather":
        return
    if max(pipeline.microbatches) > 1:
        yield "--couple gather computes the loss of the whole batch at once; plan with microbatches=1"
    if pipeline.data_degree > 1 and (len(pipeline.stages) > 1 or len(set(pipeline.microbatch)) > 1):
        yield "--couple gather is for replicas of one stage and equal size; plan with pipeline=1"
    if any(stage.axis("context") > 1 for stage in pipeline.stages):
        yield "--couple gather is for replicas of whole samples; plan with context=1"
    if pipeline.data_degree > 1 and facts.no_gather is not None:
        yield f"--couple gather: {facts.no_gather}"
    if pipeline.data_degree > 1 and (facts.batch_norm or (facts.conduct is not None and facts.conduct.written)):
        yield "--couple gather gathers what a loss reads, and statistics inside of the model stay a replica's; plan without it"
