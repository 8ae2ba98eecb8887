"""Facts about a model that `why_not` reads: names and kinds, no tensors.

A model that is too large to be rehearsed is judged by what runs along samples in its captured ops. Samples meet where one op
runs along them twice, as the product of the embeddings of a contrastive loss does, or where an op needs sums over them before
it can continue, as batch normalisation does. A cross-entropy that is the loss itself is a mean over targets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from rlplace.errors import InputError
from rlplace.model.aten import base_name
from rlplace.model.capture.fake import any_dtype_grouped_mm, fake_copy, fake_inputs, new_fake_mode, replaced_forward, tensors_in
from rlplace.model.capture.inputs import split_inputs
from rlplace.model.graph.opgraph import FORWARD, OpGraph
from rlplace.model.torch_adapter import FakeTensor, pytree
from rlplace.plan.strategy import TARGETS
from rlplace.runtime.base.batches import Batch
from rlplace.runtime.base.steps import samples_of
from rlplace.runtime.strategy.blocks import block_names, has_batch_norm, has_sync_norm, observe, owner, tied_names, units
from rlplace.runtime.strategy.capture import UnitGraph, capture, strange_in
from rlplace.runtime.strategy.context_facts import context_facts
from rlplace.runtime.strategy.cut import StageGraph, cut
from rlplace.runtime.strategy.fact_records import Conduct, ContextFacts, ModelFacts, TensorFacts
from rlplace.runtime.strategy.gather import why_no_gather
from rlplace.runtime.strategy.lists import Lists, expert_lists
from rlplace.runtime.strategy.mixtures import common_experts, why_no_experts
from rlplace.runtime.strategy.model_layouts import find_layouts
from rlplace.runtime.strategy.recorded import why_unlike
from rlplace.runtime.strategy.rehearsal import rehearse, rows_of
from rlplace.runtime.strategy.strategy_model import keyword_inputs
from rlplace.runtime.strategy.tables import table_reasons
from rlplace.strategy.layouts.cut_moves import SAMPLE
from rlplace.strategy.layouts.forward_ops import ForwardOps

_PLAIN = (nn.Parameter, torch.Tensor, nn.Buffer, FakeTensor, UninitializedParameter, UninitializedBuffer)


def model_facts(
    model: nn.Module, tensor: TensorFacts | None = None, no_cut: str | None = None, lists: Lists | None = None
) -> ModelFacts:
    """Returns facts about the modules of a model, with those about its layouts, its cut and its lists; nothing is run."""
    backward = {path for path, m in model.named_modules() if m._backward_hooks or m._backward_pre_hooks}
    own = {path for path, m in model.named_modules() if m._forward_hooks or m._forward_pre_hooks or replaced_forward(m)}
    hooked = [path for path, _ in model.named_modules() if path in own | backward]
    inside = [path for path, _ in units(model)]
    experts = common_experts(model)
    return ModelFacts(
        blocks=_needed(model),
        batch_norm=has_batch_norm(model),
        sync_norm=has_sync_norm(model),
        no_cut=no_cut,
        tensor=tensor or TensorFacts(),
        hooked=tuple(path or "the model" for path in hooked),
        hooked_outside=tuple(path or "the model" for path in hooked if owner(path, inside) is None),
        backward_hooks=tuple(path or "the model" for path in hooked if path in backward),
        experts=experts,
        no_experts=why_no_experts(model, lists or {}),
        listed=next((path for path, _, _ in expert_lists(model)), None),
        tables=dict(table_reasons(model)),
        recurrent=next(
            (path for path, module in model.named_modules() if isinstance(module, (nn.RNNBase, nn.RNNCellBase))), None
        ),
        subclass=next(
            (f"{name} ({type(held).__name__})" for name, held in tensors_in(model).items() if type(held) not in _PLAIN), None
        ),
    )


def examine(model: nn.Module, inputs: Batch, flops: float = 0.0) -> ModelFacts:
    """Returns facts from a forward on fake tensors, with blocks in the order in which the forward calls them.

    Args:
        model: Real or meta module; it is not changed.
        inputs: Keyword inputs of one micro-batch. Only shapes and dtypes matter, but where there are values, the record of the
            forward must compute what the forward does (`why_unlike`).
        flops: Of a step, where that is known.
    """
    return _examined(model, inputs, flops)[0]


def _examined(model: nn.Module, inputs: Batch, flops: float) -> tuple[ModelFacts, UnitGraph | None]:
    """Returns facts, and the record of the forward where it can be cut; see `examine`."""
    found = dict(units(model))
    try:
        seen = observe(model, inputs, found)
    except Exception as error:  # the model's own code runs
        reason = f"its forward does not run on fake tensors ({type(error).__name__})"
        facts = model_facts(model, TensorFacts(no_tensor=reason), f"native: {reason}")
        return replace(facts, skips=True, branches=True), None
    layouts = find_layouts(found, seen.calls)
    tensor = TensorFacts(**{item.name: getattr(layouts, item.name) for item in fields(TensorFacts)})
    strange = {path: strange_in(call) for path, call in seen.calls.items()}
    handed = next((f"{path} is handed a {type(one).__name__}" for path, one in strange.items() if one is not None), None)
    try:
        captured = capture(model, inputs, seen=seen)
        called = dict.fromkeys(str(node.target) for node in captured.graph.nodes if node.op == "call_module")
        known = set(block_names(model))
        blocks = tuple(path for path in called if path in known)
        stages = cut(captured, [[block] for block in blocks])
        if (unlike := why_unlike(model, captured, inputs, flops)) is not None:
            raise InputError(unlike)
    except InputError as error:
        facts = model_facts(model, tensor, str(error), seen.lists)
        return replace(facts, handed=handed, skips=seen.skips, branches=seen.branches), None
    trained = (any(value.requires_grad for value in stage.taken) for stage in stages)
    untrained = tuple(block for block, flows in zip(blocks, trained, strict=True) if not flows)
    facts = model_facts(model, tensor, lists=seen.lists)
    facts = replace(facts, blocks=blocks, untrained=untrained, handed=handed, reused=seen.reused)
    facts = replace(facts, skips=seen.skips, branches=seen.branches)
    return replace(facts, no_samples=_no_samples(stages, inputs)), captured


def facts_of(
    module: nn.Module, inputs: Any, loss: Callable[..., Any] | None = None, graph: OpGraph | None = None
) -> ModelFacts:
    """Returns all facts, those of a rehearsal among them; without names for its inputs nothing is cut.

    Args:
        module: Real or meta module; it is not changed.
        inputs: Example inputs: keyword inputs, or a tuple.
        loss: See `rlplace.capture`.
        graph: Its captured step; a large model is not rehearsed, but judged by rules about its ops.
    """
    flops = 0.0 if graph is None else float(graph.op_flops.sum())
    try:
        facts, captured = _examined(module, keyword_inputs(module, inputs), flops)
    except InputError as error:
        facts, captured = model_facts(module, no_cut=str(error)), None
    if facts.batch_norm:
        facts = replace(facts, no_single=_no_single(module, inputs))
    conduct, no_gather = rehearse(module, inputs, loss, flops), None
    if conduct.unseen is not None and graph is not None:
        conduct = conduct_of_graph(graph, conduct.unseen)
    if conduct.couples and loss is None:
        no_gather = facts.no_cut or why_no_gather(module, keyword_inputs(module, inputs), conduct.mixing)
    facts = replace(facts, conduct=conduct, no_gather=no_gather)
    if loss is not None:
        return replace(facts, context=ContextFacts("its loss lies outside of the model"))
    return replace(facts, context=context_facts(module, inputs, conduct, captured))


def _no_samples(stages: Sequence[StageGraph], inputs: Batch) -> str | None:
    """Explains which value crosses between stages without the samples as its first dimension."""
    samples = {leaf.shape[0] for leaf in pytree.tree_leaves(dict(inputs)) if isinstance(leaf, torch.Tensor) and leaf.dim()}
    shapes = dict.fromkeys(tuple(value.shape) for stage in stages for value in stage.taken)
    strange = next((shape for shape in shapes if not shape or shape[0] not in samples), None)
    return None if strange is None else f"a value of shape {strange} crosses, which has not the samples first"


def _needed(model: nn.Module) -> tuple[str, ...]:
    """Returns blocks that a strategy has to name; one with tied parameters alone may be a name of them, as T5's `shared` is."""
    tied = {name for names in tied_names(model) for name in names}
    held = {path: model.get_submodule(path).named_parameters(path) for path in block_names(model)}
    return tuple(path for path, parameters in held.items() if any(name not in tied for name, _ in parameters))


_OVER_TARGETS = ("cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss_forward")
_ADDS_UP = ("add", "add_", "mul", "mul_", "div", "_to_copy", "to")
"""Ops from a cross-entropy to a loss that it is the main term of, such as that with the balance of experts."""


def _no_single(model: nn.Module, inputs: Any) -> str | None:
    """Explains why the forward takes no single sample, as BatchNorm of one value a channel does not; None where it runs."""
    mode = new_fake_mode()
    args, kwargs = split_inputs(rows_of(inputs, samples_of(inputs), slice(0, 1)))
    try:
        with any_dtype_grouped_mm(), mode:
            fake_copy(model, mode)(*fake_inputs(args, mode), **fake_inputs(kwargs, mode))
    except ValueError as error:
        return f"{error}"[:200] if "more than 1 value" in str(error) else None
    except Exception:  # the model's own code runs, on less than it was given
        return None
    return None


def conduct_of_graph(graph: OpGraph, unseen: str) -> Conduct:
    """Judges a captured step by rules about its ops; `unseen` is why the model was not rehearsed."""
    found = Conduct(unseen=unseen, sparse=tuple(one.name for one in graph.parameters if one.sparse))
    if graph.traced is None:
        return found
    ops = ForwardOps(graph, np.zeros(graph.num_ops, dtype=np.int32))
    searched = (op for op in np.flatnonzero(ops.searched).tolist() if "batch_norm" not in graph.op_target[op])
    meets = next((op for op in searched if _meets(ops, op)), None)
    if meets is not None:
        where = graph.op_module[meets]
        return replace(found, reduction="", where=where, mixing=(where,) if where else ())
    forward = np.flatnonzero(graph.op_phase == FORWARD).tolist()
    losses = [op for op in forward if base_name(graph.op_target[op]) in _OVER_TARGETS]
    waiting, seen = losses[:1], list[int]()
    while waiting:
        seen.append(waiting.pop())
        waiting += [op for op in ops.after.get(seen[-1], ()) if op not in seen]
    adds_up = all(base_name(graph.op_target[op]) in _ADDS_UP for op in seen[1:])
    return replace(found, reduction=TARGETS) if len(losses) == 1 and adds_up else found


def _meets(ops: ForwardOps, op: int) -> bool:
    """Returns whether samples meet in an op."""
    indices = ops.indices
    along = {name.partition(".")[0] for name in indices.dims.get(op, {}) if ops.runs(op, name) == SAMPLE}
    sums = indices.statistics.get(op, ())
    return len(along) > 1 or any(along and not any(name.partition(".")[0] in along for name in names) for names, _ in sums)
