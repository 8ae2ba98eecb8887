"""Reasons why processes cannot divide positions, experts or embedding tables; see `rlplace.runtime.strategy.why_not`."""

from __future__ import annotations

from collections.abc import Iterator

from rlplace.model.capture.optimizers import OPTIMIZERS
from rlplace.plan.schedule import ONE_F_ONE_B, SCHEDULES
from rlplace.plan.strategy import HEADS, RING, Pipeline, Stage
from rlplace.runtime.strategy.fact_records import Conduct, ContextFacts, ModelFacts


def uneven(length: int, degree: int) -> str:
    """Explains why a sequence of so many positions cannot be cut over a context group."""
    return (
        f"{length} positions cannot be cut into {2 * degree} parts, two for each process of the context; pad them to a "
        "multiple, or plan with context=1"
    )


def why_no_method(stage: Stage, facts: ContextFacts) -> Iterator[str]:
    """Yields why the attention of a model cannot run by the method of a stage."""
    degree, tensor = stage.axis("context"), stage.axis("tensor")
    other = "plan with another context_method, such as gather"
    if stage.context_method == RING and facts.no_ring is not None:
        yield f"{facts.no_ring}; {other}"
    if stage.context_method == HEADS and facts.heads % (degree * tensor):
        yield f"context {degree}{f' x tensor {tensor}' if tensor > 1 else ''} does not divide {facts.heads} heads; {other}"
    for shared in facts.shared if stage.context_method == HEADS else ():
        own = max(1, shared // tensor)
        if own % degree and degree % own:
            yield f"context {degree} neither divides {own} heads of keys and values nor is their multiple; {other}"


def why_no_experts(pipeline: Pipeline, facts: ModelFacts) -> Iterator[str]:
    """Yields why experts cannot be spread: all processes of a group exchange tokens, equally often and in the same order."""
    stages = pipeline.stages
    degrees = sorted({stage.expert for stage in stages})
    if degrees == [1]:
        return
    if facts.no_experts is not None:
        yield f"{facts.no_experts}; plan with expert=1"
    for degree in (degree for degree in degrees if facts.experts % degree):
        yield f"the expert degree {degree} does not divide {facts.experts}, what mixtures of experts have in common"
    if any(stage.sequence_parallel for stage in stages):
        yield "spread experts take the whole sequence of a tensor group; plan without sequence_parallel or with expert=1"
    for stage in (stage for stage in stages if stage.sharding == 0):
        if stage.expert not in (1, group := stage.axis("context") * stage.axis("tensor")):
            yield f"at sharding level 0 experts are spread over all of context x tensor; give expert {group}, or 1"
    if len(set(pipeline.microbatches)) > 1:
        yield "replicas with unlike numbers of micro-batches would wait for each other's tokens for ever; give all the same"
    if facts.branches:
        yield "the forward looks at values outside of its blocks, and processes that wait for tokens may call unlike blocks"
    if facts.listed is not None and any(stage.axis("tensor") > 1 for stage in stages):
        yield f"the experts of the list {facts.listed} are spread without tensor groups alone; plan with tensor=1 or expert=1"
    if facts.listed is not None and len(stages) > 1 and SCHEDULES[pipeline.schedule or ""].splits_backward:
        yield f"a schedule that splits the backward goes through routers of {facts.listed} twice; take {ONE_F_ONE_B}, say"
    if any(stage.offload for stage in stages):
        yield "spread experts in host memory were never compared with the plain model; plan without offload or with expert=1"


def why_no_tables(
    pipeline: Pipeline, facts: ModelFacts, optimizer: str | None, *, release: bool, gathers: bool, several: bool
) -> Iterator[str]:
    """Yields why replicas cannot divide embedding tables (`rlplace.runtime.strategy.tables`)."""
    stage, *others = pipeline.stages
    words = {path: word for one in pipeline.stages for path, word in one.tables.items()}
    if not words:
        return
    strange = "is no module torch.nn.Embedding or EmbeddingBag"
    for path in words:
        if facts.tables is not None and (reason := facts.tables.get(path, strange)) is not None:
            yield f"the table {path} cannot be divided: it {reason}; plan with tables=1"
    for what, found in (
        ("a pipeline", others or several),
        ("a tensor group", stage.axis("tensor") > 1),
        ("a context group", stage.axis("context") > 1),
        ("spread experts", stage.expert > 1),
        ("offload", stage.offload),
        ("--release-gradients", release),
        ("--couple gather", gathers),
    ):
        if found:
            yield f"divided tables with {what} were never compared with the plain model; plan with tables=1, or without"
    if len(set(pipeline.microbatches)) > 1:
        yield "replicas with unlike numbers of micro-batches would wait for each other's ids for ever; give all the same"
    if facts.skips or facts.branches:
        yield "the forward reads values, and processes that wait for ids may call unlike modules; plan with tables=1"
    if optimizer is not None and (whole := OPTIMIZERS[optimizer].whole) is not None:
        yield f"{whole}, and divided tables have parts; plan with tables=1, or take another optimizer"


def why_no_context(pipeline: Pipeline, stage: Stage, facts: ModelFacts) -> Iterator[str]:
    """Yields why processes cannot divide the positions of samples (`rlplace.runtime.strategy.context`)."""
    if facts.context.no_context is not None:
        yield f"no context parallelism: {facts.context.no_context}; plan with context=1"
    if facts.context.positions % (2 * stage.axis("context")):
        yield uneven(facts.context.positions, stage.axis("context"))
    yield from why_no_method(stage, facts.context)
    if len(pipeline.stages) > 1 and facts.context.no_stages is not None:
        yield f"no context parallelism in a pipeline: {facts.context.no_stages}; plan with context=1 or pipeline=1"
    if len({one.axis("context") for one in pipeline.stages}) > 1:
        yield "stages of unlike context degrees would exchange parts of positions for others; give all the same degree"
    if stage.sequence_parallel:
        yield "the axis context was not compared with sequence_parallel, which splits positions again; plan without one of them"
    conduct = facts.conduct or Conduct()
    if facts.batch_norm or facts.sync_norm or conduct.written:
        yield "statistics and buffers would be written by parts of the positions; plan with context=1"
