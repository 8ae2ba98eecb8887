"""Facts about a model's attention, and the check that its forward runs on parts of the positions.

The forward runs on whole sequences, which shows keys and values of every attention. Then it runs on each of two parts with
these in place of gathered ones. A model that is small enough and has values does so in double precision: its own keys and
values must be those of the whole, and the loss of the parts must make up that of the whole. Of others shapes are checked, that
no block makes positions of its own or mixes them, and that all cross-entropies have a target a position.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from math import gcd
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from rlplace.errors import InputError
from rlplace.model.capture.caches import caches_off
from rlplace.model.capture.export import quiet_logs
from rlplace.model.capture.fake import any_dtype_grouped_mm, computed_values, fake_copy, fake_inputs, new_fake_mode
from rlplace.model.capture.masks import masks_of_runs
from rlplace.model.torch_adapter import DataDependentOutputException, DynamicOutputShapeException, FakeTensor, pytree
from rlplace.plan.strategy import MEAN, SUM, TARGETS
from rlplace.runtime.base.batches import Batch, Targets
from rlplace.runtime.base.steps import loss_of
from rlplace.runtime.strategy.attention import NO_RING, Part, attend_gathered, attention
from rlplace.runtime.strategy.blocks import units, with_values
from rlplace.runtime.strategy.capture import UnitGraph
from rlplace.runtime.strategy.context import Context, Replaced
from rlplace.runtime.strategy.cut import WholeRecord
from rlplace.runtime.strategy.fact_records import Conduct, ContextFacts
from rlplace.runtime.strategy.strategy_model import keyword_inputs
from rlplace.runtime.strategy.why_not_divided import uneven

_ALIKE = 1e-6
"""Difference that is rounding in double precision, relative to the largest value."""

_SINGLE = 30.0
"""Factor of it in single precision."""

_MAKERS = ("arange", "linspace", "narrow", "__getitem__")
"""Functions that make positions, or take them from a table of all."""

_MIXERS = ("conv1d", "cumsum", "cumprod", "logcumsumexp", "flip", "roll", "lstm", "gru")
"""Functions that mix neighbours, along whichever dimension."""

_SUMS = ("mean", "sum", "amax", "max", "var", "norm", "adaptive_avg_pool1d", "select")
"""Functions that leave the positions away where they work along them."""


class Attending(NamedTuple):
    """The attention of a model."""

    units: dict[str, int]  # paths of the blocks with attention, with the position of the activation among their flat arguments
    blocks: dict[str, nn.Module]  # all blocks
    whole: list[torch.Tensor]  # keys and values of every attention in turn
    facts: ContextFacts


def attending_units(model: nn.Module, inputs: Batch, found: dict[str, nn.Module]) -> Attending:
    """Runs a forward and observes its attention; `found` are its blocks by path.

    Raises:
        InputError: There is none, or not over the positions (dimension 1) of an activation.
    """
    whole, running, lengths = list[torch.Tensor](), list[str](), list[int]()
    calls: dict[str, list[Any]] = {}
    heads: list[tuple[int, int]] = []
    no_ring = list[str]()
    seen: dict[str, None] = {}

    def enter(path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        running.append(path)
        calls.setdefault(path, pytree.tree_leaves((args, kwargs)))

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *options: Any, **how: Any) -> Any:
        if not running:
            raise InputError("attention outside of all blocks; name a larger module as block, or plan with context=1")
        seen[path := running[-1]] = None
        lengths.extend((query.shape[-2], key.shape[-2]))
        if any(_apart(key, calls[path][place]) for place in _activations(calls[path], lengths[0])[:1]):
            raise InputError(f"its attention is over several sequences: {path} attends to another than its own")
        whole.extend((key.detach(), value.detach()))
        heads.append((query.shape[1], key.shape[1]) if query.dim() == 4 else (1, 1))
        given = dict(zip(("attn_mask", "dropout_p"), options, strict=False)) | how
        if given.get("attn_mask") is not None or given.get("dropout_p"):
            no_ring.append(NO_RING)
        return attention(query, key, value, *options, **how)

    hooks = [unit.register_forward_pre_hook(partial(enter, path), with_kwargs=True) for path, unit in found.items()]
    hooks += [unit.register_forward_hook(lambda *_: running.pop() and None) for unit in found.values()]
    try:
        with Replaced({attention: attend}):
            model(**inputs)
    finally:
        for hook in hooks:
            hook.remove()
    if not seen:
        raise InputError(
            "its blocks call no torch.nn.functional.scaled_dot_product_attention; a model of transformers does with "
            "attn_implementation='sdpa', where it has that"
        )
    if len(set(lengths)) > 1:
        raise InputError(
            f"its attention is over several sequences, of {' and '.join(map(str, sorted(set(lengths))))} positions"
        )
    made = {}
    for path in seen:
        if not (places := _activations(calls[path], lengths[0])):
            raise InputError(f"{path} takes no activation of samples x positions x width")
        made[path] = places[0]
    common = gcd(*(own for own, _ in heads))
    shared = tuple(sorted({keys for _, keys in heads}))
    return Attending(made, found, whole, ContextFacts(None, lengths[0], common, shared, next(iter(no_ring), None)))


def _activations(leaves: Sequence[Any], length: int) -> list[int]:
    """Returns which arguments of a block are samples x positions x width, for so many positions."""
    tensors = ((n, leaf) for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point())
    return [n for n, leaf in tensors if leaf.dim() == 3 and leaf.shape[1] == length]


def _apart(key: torch.Tensor, activation: torch.Tensor) -> bool:
    """Returns whether a key comes from another sequence than an activation: no op of it lies before both."""
    own = activation.grad_fn
    if own is None or key.grad_fn is None or own in (before := _history(key, own)):
        return False
    return before.isdisjoint(_history(activation, None))


def _history(value: torch.Tensor, end: Any) -> set[Any]:
    """Returns the ops that a value comes from, as far back as `end`."""
    nodes, found = [value.grad_fn], set[Any]()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in found and not hasattr(node, "variable"):  # of a parameter
            found.add(node)
            nodes.extend(before for before, _ in node.next_functions if node is not end)
    return found


def observe_attention(model: nn.Module, inputs: Batch, blocks: Collection[str] = ()) -> Attending:
    """Runs a forward on fake tensors, or with values where it reads some, and observes its attention; see `attending_units`."""
    mode = new_fake_mode()
    with any_dtype_grouped_mm(), caches_off(model), masks_of_runs(model, (), inputs), torch.enable_grad():
        try:
            with mode:
                own = fake_copy(model, mode)
                return attending_units(own, fake_inputs(dict(inputs), mode), dict(units(own, blocks)))
        except (DataDependentOutputException, DynamicOutputShapeException):
            seen = with_values(model, inputs, lambda plain: attending_units(model, plain, dict(units(model, blocks))))
    if not seen:
        raise InputError("native: the forward looks at values, and where it attends was not seen; plan with context=1")
    return seen[0]


def context_facts(model: nn.Module, inputs: Any, conduct: Conduct, captured: UnitGraph | None = None) -> ContextFacts:
    """Returns whether and how a model can run on parts of the positions.

    Args:
        model: Real or meta module; it is not changed.
        inputs: Example inputs of a micro-batch: keyword inputs, or a tuple.
        conduct: How its loss comes from those of parts. A model that was rehearsed is run with its values, another on fake
            tensors.
        captured: Its record, which stages run; None: it cannot be cut.
    """
    if conduct.reduction not in (MEAN, SUM, TARGETS):
        return ContextFacts("its loss is no mean over positions or targets")
    try:
        given: Any = keyword_inputs(model, inputs)
    except InputError as error:
        return ContextFacts(str(error))
    facts = _facts(model, given, conduct, (True, False) if conduct.unseen is None else (False,))
    if captured is None or facts.no_context is not None:
        return facts
    return replace(facts, no_stages=_facts(WholeRecord(captured), given, conduct, (False,)).no_context)


def _facts(model: nn.Module, inputs: Batch, conduct: Conduct, precisions: Sequence[bool]) -> ContextFacts:
    """Returns facts from runs of a copy in double precision or not; some models have dtypes of their own."""
    mode, reason = None if conduct.unseen is None else new_fake_mode(), ""
    for double in precisions:
        try:
            if mode is not None:
                own, given = fake_copy(model, mode), fake_inputs(inputs, mode)
            else:
                own = copy.deepcopy(model, computed_values(model)).eval()
                own = own.double() if double else own
                given = pytree.tree_map_only(torch.Tensor, partial(_cast, double=double), inputs)
            alike = _ALIKE * (1.0 if double else _SINGLE)
            with (
                any_dtype_grouped_mm(),
                caches_off(own),
                masks_of_runs(model, (), inputs),
                torch.enable_grad(),
                torch.random.fork_rng([]),
                quiet_logs(),
                mode or nullcontext(),
            ):
                return _checked(own, given, conduct.reduction, alike)
        except InputError as error:
            return ContextFacts(str(error).removeprefix("native: "))
        except Exception as error:  # the model's own code runs on parts
            line = (str(error).strip().splitlines() or [""])[0][:160]
            reason = f"its forward does not run on a part of the positions ({type(error).__name__}: {line})"
    return ContextFacts(reason)


def _cast(leaf: torch.Tensor, double: bool) -> torch.Tensor:
    return leaf.double() if double and leaf.is_floating_point() else leaf


def _checked(model: nn.Module, inputs: Batch, reduction: str, alike: float) -> ContextFacts:
    found = attending_units(model, inputs, model.units() if isinstance(model, WholeRecord) else dict(units(model)))
    if found.facts.positions % 4:
        raise InputError(uneven(found.facts.positions, 2))
    whole, _ = _loss(model, inputs, reduction)
    numbers = range(1 if isinstance(whole, FakeTensor) else 2)
    losses = [_part_loss(model, inputs, reduction, found, Part(number, 2), alike) for number in numbers]
    if not isinstance(whole, FakeTensor):
        parts = sum(value * count for value, count in losses) / (1 if reduction == SUM else sum(count for _, count in losses))
        if not abs(float(parts) - float(whole)) <= alike * max(abs(float(whole)), 1e-3):
            raise InputError(f"the loss of two parts of the positions is {float(parts):.6g}, of all {float(whole):.6g}")
    return found.facts


def _loss(model: nn.Module, inputs: Batch, reduction: str) -> tuple[torch.Tensor, float]:
    with Targets() as targets:
        value = loss_of(model(**inputs), None).detach()
    return value, float(targets.count) if reduction == TARGETS and not isinstance(value, FakeTensor) else 1.0


def _part_loss(
    model: nn.Module, inputs: Batch, reduction: str, found: Attending, part: Part, alike: float
) -> tuple[torch.Tensor, float]:
    """Returns the loss of a part and its weight."""
    values, before = iter(found.whole), {path: dict(vars(module)) for path, module in model.named_modules()}

    def gather(value: torch.Tensor) -> torch.Tensor:
        whole = next(values)
        wanted = part.of(whole, -2)
        if value.shape != wanted.shape:
            raise InputError(f"{context.unit}: keys and values of a part have other shapes than a part of those of the whole")
        if not isinstance(value, FakeTensor) and (value.detach() - wanted).abs().max() > alike * wanted.abs().max():
            raise InputError(f"{context.unit}: keys and values of a part are no part of those of the whole, so positions mix")
        return whole

    attend, mixes = partial(attend_gathered, part=part, gather=gather), _Mixes(found.facts.positions // part.degree)
    context = Context(found.blocks, found.units, part, attend)
    context.divide(model)
    if isinstance(found.whole[0], FakeTensor):
        context.watch = mixes
    try:
        value, count = _loss(model, inputs, reduction)
        if mixes.found is not None:
            raise InputError(f"{context.unit} and others call {mixes.found}, which makes positions anew or mixes them")
        if isinstance(value, FakeTensor) and not (context.by_positions and all(context.by_positions)):
            raise InputError("its loss is no cross-entropy with a target a position, and it is too large to be run for others")
        return value, count
    finally:
        for path, module in model.named_modules():
            vars(module).clear()
            vars(module).update(before[path])


class _Mixes(TorchFunctionMode):
    """The first function that makes values of so many positions, mixes them, or takes sums over them."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self._length = length
        self.found: str | None = None

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made, name = function(*args, **(kwargs or {})), str(getattr(function, "__name__", ""))
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if isinstance(made, torch.Tensor):
            before, after = any(self._length in leaf.shape for leaf in given), self._length in made.shape
            mixes = before and made.requires_grad and (name in _MIXERS or (name in _SUMS and not after))
            if mixes or (after and not before and name in _MAKERS):
                self.found = self.found or name
        return made
