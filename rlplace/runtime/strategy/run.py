"""Preparation of a process for its part of a model under a strategy."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from rlplace.errors import InputError
from rlplace.model.capture.caches import turn_off_caches
from rlplace.model.capture.fake import meta_copy
from rlplace.model.capture.inputs import are_items, resize_batch
from rlplace.plan.schedule import SCHEDULES
from rlplace.plan.strategy import HEADS, Pipeline, Stage, Strategy
from rlplace.runtime.base.batches import Batch, cast, repeated
from rlplace.runtime.base.model import Batching
from rlplace.runtime.base.steps import Loss
from rlplace.runtime.state.values import Values, deferred_values, move, saved_values
from rlplace.runtime.state.whole import ParameterHooks
from rlplace.runtime.strategy.ahead import LookupsAhead
from rlplace.runtime.strategy.attention import Part, attends
from rlplace.runtime.strategy.blocks import observe, tied_names, units
from rlplace.runtime.strategy.buffers import Accumulation, StepBuffers
from rlplace.runtime.strategy.capture import UnitGraph, capture, uncalled
from rlplace.runtime.strategy.context import Context
from rlplace.runtime.strategy.context_facts import Attending, observe_attention
from rlplace.runtime.strategy.cut import Divided, StageGraph, cut, same_held, stage_module
from rlplace.runtime.strategy.facts import model_facts
from rlplace.runtime.strategy.gather import GatheredForward
from rlplace.runtime.strategy.mesh import MeshPlace, check_same, find_place
from rlplace.runtime.strategy.model_layouts import ModelLayouts, find_layouts, lay_out, stay_parts
from rlplace.runtime.strategy.pipeline import PipelineRun, Recorded, StageModule
from rlplace.runtime.strategy.reach import Reached, reduce_unlike
from rlplace.runtime.strategy.statistics import join_statistics
from rlplace.runtime.strategy.strategy_model import StrategyModel
from rlplace.runtime.strategy.why_not import minor_version, why_not
from rlplace.runtime.strategy.why_not_divided import why_no_method
from rlplace.runtime.strategy.wrap import part_ties, wrap_stage


def prepare(
    model: nn.Module,
    strategy: Strategy,
    example_inputs: Batch,
    device_type: str = "cpu",
    *,
    batching: Batching | None = None,
    loss: Loss | None = None,
    seed: int = 0,
    mixed_precision: MixedPrecisionPolicy | None = None,
    weights: str | Path | None = None,
) -> StrategyModel:
    """Makes this process run its part of a model as a strategy says.

    Every process of the job calls it with the same model, values included, after `torch.distributed.init_process_group`.

    Args:
        model: Its modules are changed in place, and keep their names; what only other processes run loses its values.
        strategy: Stages on meshes; its lowest device number is the first process.
        example_inputs: Keyword inputs of one micro-batch of a replica; only shapes and dtypes matter.
        device_type: ``"cpu"`` or an accelerator's, such as ``"cuda"``.
        batching: How a batch becomes micro-batches. Default: every process is handed the whole batch.
        loss: See `rlplace.distribute`.
        seed: Of what the model draws.
        mixed_precision: See `rlplace.distribute`.
        weights: See `rlplace.distribute`.

    Raises:
        InputError: It cannot be run, with the reason (`why_not`).
    """
    turn_off_caches(model)
    named = [block for stage in strategy.stages for block in stage.blocks]
    found = dict(units(model, named))
    laid_out = any(stage.axis("tensor") > 1 for stage in strategy.stages)
    wrapped = laid_out or len(strategy.stages) > 1 or strategy.stages[0].sharding or mixed_precision is not None
    seen = None
    if laid_out or any(stage.data_degree * stage.axis("context") > 1 for stage in strategy.stages):
        with contextlib.nullcontext() if wrapped else contextlib.suppress(Exception):  # replicas run all the same
            seen = observe(model, example_inputs, found)
    layouts = find_layouts(found, seen.calls) if laid_out and seen is not None else None
    # Which blocks the forward calls is for the cut to say.
    facts = model_facts(model, layouts, lists=None if seen is None else seen.lists)
    if seen is not None:
        facts = replace(facts, skips=seen.skips, branches=seen.branches)
    unlike = seen is not None and seen.varies
    if (reason := why_not(strategy, replace(facts, blocks=()), torch.__version__)) is not None:
        raise InputError(f"native: {reason}")
    if mixed_precision is not None and mixed_precision.output_dtype is not None and len(strategy.stages) > 1:
        raise InputError("native: output_dtype would cast what stages of a pipeline send; leave it out")
    if loss is not None and any(stage.axis("context") > 1 for stage in strategy.stages):
        raise InputError("native: a loss outside of the model is not computed by parts of the positions; plan with context=1")
    if mixed_precision is not None and (facts.batch_norm or facts.sync_norm):
        raise InputError("native: mixed_precision casts no running statistics, which norms keep here; use torch.autocast")
    if batching is not None and batching.share == "replica" and len(strategy.pipelines) > 1:
        raise InputError(
            "native: unlike pipelines take unlike shares of a batch, so every process gets all of it; share='global'"
        )
    saved = {} if weights is None else saved_values(weights, model)
    values = {**deferred_values(model, saved), **saved}
    place = find_place(strategy, device_type)
    check_same(model, weights)
    pipeline = place.pipeline
    if place.number:  # whose micro-batches may have another size
        example_inputs = resize_batch(example_inputs, strategy.pipelines[0].microbatch[0], pipeline.microbatch[0])
    hooks, meta = ParameterHooks(model), meta_copy(model)
    make = partial(
        StrategyModel, meta, strategy, place, names=tuple(example_inputs), loss=loss, seed=seed, hooks=hooks,
        batching=replace(batching or Batching("global", (), strategy.reduction), items=are_items(dict(example_inputs))),
    )  # fmt: skip
    attending = observe_attention(model, example_inputs, named) if place.context > 1 else None
    if len(pipeline.stages) > 1:
        how: dict[str, Any] = {"values": values, "unlike": unlike, "attending": attending}
        return make(**_pipelined(model, meta, strategy, place, example_inputs, layouts, facts.blocks, mixed_precision, **how))
    stage = pipeline.stages[0]
    join_statistics(model, place, everywhere=strategy.statistics == "batch")
    captured = capture(model, example_inputs, named) if stage.sequence_parallel else None
    move(model, place.device)
    if layouts is not None:
        lay_out(place, stage, layouts, found, captured)
    if strategy.couple == "gather" and loss is None and place.data_degree > 1:
        forward = GatheredForward(model, meta, place, strategy.mixing, named)
        forward.record(example_inputs)
        vars(model)["forward"] = forward
    if attending is not None:
        _divide(found, attending, stage, place).divide(model)
    unreached = seen is None or (seen.unreached and not seen.reentrant)
    how = {"mixed_precision": mixed_precision, "unreached": unreached}
    how["outside"] = () if seen is None else seen.outside
    root = wrap_stage(model, found, stage, place, values, pipelined=False, **how)
    if place.tables is not None:
        LookupsAhead(model, meta, {path: vars(model.get_submodule(path))["forward"] for path in stage.tables}, example_inputs)
    reached = reduce_unlike(root, place, stage.expert, in_order=facts.branches) if unlike else None
    buffers = StepBuffers([model], by_replica=strategy.buffers == "replica")
    runner = Accumulation(root, place.device, every_pass=stage.sharding > 1, buffers=buffers, in_order=facts.branches)
    return make({0: model}, runner, roots=[model], reached=[reached] if reached else [])


def _divide(blocks: Mapping[str, nn.Module], attending: Attending, stage: Stage, place: MeshPlace) -> Context:
    """Makes blocks of a stage run on the part of the positions of this process.

    Raises:
        InputError: Their attention cannot run by the method of the stage.
    """
    if (reason := next(why_no_method(stage, attending.facts), None)) is not None:
        raise InputError(f"native: {reason}")
    part, method = Part(place.column % place.context, place.context), stage.context_method
    return Context(blocks, attending.units, part, attends(method, part, place.context_ranks), whole_masks=method == HEADS)


def _pipelined(
    model: nn.Module,
    meta: nn.Module,
    strategy: Strategy,
    place: MeshPlace,
    inputs: Batch,
    layouts: ModelLayouts | None,
    blocks: Collection[str],
    mixed_precision: MixedPrecisionPolicy | None,
    *,
    values: Values,
    unlike: bool,
    attending: Attending | None,
) -> dict[str, Any]:
    """Returns the arguments of `StrategyModel` for the stages of this process."""
    pipeline, statistics = place.pipeline, strategy.statistics
    if (joined := pipeline.data_degree // place.data_degree) > 1:
        inputs = repeated(inputs, joined, pipeline.microbatch[0])
    dtype = None if mixed_precision is None else mixed_precision.param_dtype
    divided, contexts = None if attending is None else Divided(attending.units, place.context), dict[int, Context]()
    captured, across, stages = _cut(model, inputs, pipeline, dtype, layouts, divided)
    bodies = {number: stage_module(captured, stages[number], place.device) for number in place.stages}
    for path in uncalled(captured, blocks) if 0 in bodies else ():  # no step trains them; they are kept for checkpoints
        bodies[0].add_submodule(path, captured.units[path])
    for body in bodies.values():
        move(body, place.device)
    part_ties(tied_names(meta), stages, bodies)
    held = {id(module) for body in bodies.values() for module in body.modules()}
    for module in captured.units.values():
        if id(module) not in held:
            module.to("meta")
    roots, reached = {number: StageModule(body) for number, body in bodies.items()}, list[Reached]()
    for number, root in roots.items():
        root.training = model.training
        join_statistics(root, place, everywhere=statistics == "batch")
        own = {id(module) for module in root.modules()}
        inside = {path: module for path, module in captured.units.items() if id(module) in own}
        if layouts is not None:
            lay_out(place, pipeline.stages[number], layouts, inside, captured, across=across)
        if attending is not None:
            contexts[number] = _divide(inside, attending, pipeline.stages[number], place)
            contexts[number].divide(bodies[number], stages[number].positions)
        own_values = {f"body.{name}": value for name, value in values.items()}
        wrap_stage(root, inside, pipeline.stages[number], place, own_values, pipelined=True, mixed_precision=mixed_precision)
        splits = SCHEDULES[pipeline.schedule or ""].splits_backward  # no hook sees what it reaches
        found = reduce_unlike(root, place, pipeline.stages[number].expert, in_order=False) if unlike and not splits else None
        reached += [] if found is None else [found]

    def record(inputs: Batch) -> Recorded:
        again, _, recut = _cut(meta, inputs, pipeline, dtype, layouts, divided)
        same_held(again, captured, place.device)
        made = {number: stage_module(again, recut[number], place.device) for number in place.stages}
        for number, context in contexts.items():
            context.divide(made[number], recut[number].positions)
        return Recorded(again, recut, made)

    first = inputs, Recorded(captured, stages, bodies)
    runner = PipelineRun(pipeline, place, roots, record, first, dtype, by_replica=strategy.buffers == "replica")
    return {"bodies": bodies, "runner": runner, "roots": list(roots.values()), "reached": reached}


def _cut(
    model: nn.Module,
    inputs: Batch,
    pipeline: Pipeline,
    dtype: torch.dtype | None,
    layouts: ModelLayouts | None,
    divided: Divided | None,
) -> tuple[UnitGraph, bool, list[StageGraph]]:
    """Records a forward whose parameters have the dtype that passes compute in, so that it shows what stages send.

    Without gradients they send values of whole sequences, as evaluation does.
    """
    named = [stage.blocks for stage in pipeline.stages]
    kept = [(p, p.data) for p in model.parameters() if dtype is not None and p.is_floating_point()]
    try:
        for parameter, value in kept:
            parameter.data = value.to(dtype)
        captured = capture(model, cast(inputs, dtype), [*chain(*named)])
    finally:
        for parameter, value in kept:
            parameter.data = value
    across = layouts is not None and stay_parts(captured, pipeline, layouts)
    stages = cut(captured, named, divided if torch.is_grad_enabled() else None)
    if minor_version(torch.__version__) < (2, 13) and any(not value.requires_grad for stage in stages for value in stage.taken):
        raise InputError("native: a value without a gradient crosses from stage to stage, which needs torch 2.13; upgrade it")
    return captured, across, stages
