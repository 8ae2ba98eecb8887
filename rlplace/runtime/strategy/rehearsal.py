"""A rehearsal: one small training step of a model as a whole and in two parts, which shows what dividing a batch would change.

No rule about ops is complete, so the model itself is asked: a copy runs the example batch in one piece, then two parts of it
from the same state, in double precision. The loss of the batch is compared with the mean of the parts', gradients too, and so
are the buffers that the forwards wrote. Random numbers are alike for all samples, so that masks do not differ. Cross-entropies
have a third of their targets ignored for a while, which tells a mean over targets from a mean over samples.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from rlplace.errors import InputError
from rlplace.model.capture.fake import computed_values
from rlplace.model.capture.inputs import split_inputs
from rlplace.model.torch_adapter import pytree
from rlplace.runtime.base.conduct import MEAN, SUM, TARGETS, Conduct
from rlplace.runtime.base.counting import Targets, candidates
from rlplace.runtime.base.steps import loss_of, samples_of
from rlplace.runtime.strategy.strategy_model import keyword_inputs
from rlplace.runtime.strategy.watching import AlikeDraws, Watch
from rlplace.runtime.torch_adapter import NormBase

MOST_ELEMENTS, MOST_FLOPS = 1 << 25, 4e9
"""Parameters and buffers of a model that is rehearsed, and FLOPs of its step; a larger one would take seconds."""

_LOSS, _GRADIENT = 1e-6, 1e-5
"""Differences that are rounding in double precision, relative to the loss and to the largest gradient of a parameter."""

_SINGLE, _HALF = 30.0, 3e4
"""So much larger they may be in single and in half precision."""


@dataclass(eq=False)
class _Run:
    """One forward and backward.

    Attributes:
        loss: Its value.
        gradients: By parameter.
        state: Buffers and other tensors of modules afterwards, by name.
        outputs: By module the first tensor that it returned, in the order of first calls.
        counts: By way of counting what the run's samples count.
        watch: What happened on the way.
        rows: Samples.
        slack: How much coarser than double precision it computed.
        toggles: Parameters whose `requires_grad` the forward changed.
        unlike: See `AlikeDraws`.
    """

    loss: float
    gradients: dict[str, torch.Tensor]
    state: dict[str, torch.Tensor]
    outputs: dict[str, torch.Tensor]
    counts: dict[str, float]
    watch: Watch
    rows: int
    slack: float
    toggles: tuple[str, ...]
    unlike: str | None


def affordable(model: nn.Module, flops: float) -> str | None:
    """Explains why a model is too large to be rehearsed; None where it is not.

    Args:
        model: The model.
        flops: Of its step.
    """
    if flops > MOST_FLOPS:
        return f"its step takes more than {MOST_FLOPS / 1e9:g} GFLOP"
    if sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()) if not is_lazy(tensor)) > MOST_ELEMENTS:
        return f"it has more than {MOST_ELEMENTS >> 20} million parameters"
    return None


def rehearse(model: nn.Module, inputs: Any, loss: Callable[..., Any] | None = None, flops: float = 0.0) -> Conduct:
    """Runs a copy of a model and reports how it treats samples; the model is not changed.

    Args:
        model: With values, on any device, in the mode that it trains in.
        inputs: Arguments of a call; the batch is the first dimension of the first tensor.
        loss: See `rlplace.capture`.
        flops: Of a step, where that is known.
    """
    held = [*model.parameters(), *model.buffers()]
    if any(is_lazy(tensor) or tensor.is_meta for tensor in held):
        return Conduct(unseen="it has no values yet")
    if (reason := affordable(model, flops)) is not None:
        return Conduct(unseen=reason)
    if any(type(tensor) not in (nn.Parameter, torch.Tensor, nn.Buffer) for tensor in held):
        return Conduct(unseen="its parameters are of a kind of tensor of its own")
    with contextlib.suppress(InputError):
        inputs = keyword_inputs(model, inputs)
    if samples_of(inputs) < 2:
        return Conduct(unseen="its example inputs are one sample")
    reason = ""
    with torch.random.fork_rng(devices=[]):
        for double in (True, False):  # some models have dtypes of their own
            try:
                whole = _run(model, inputs, loss, double, thinned=False)
            except _ModelError as error:
                reason = f"a small step raised {error}"
                continue
            return _compared(model, inputs, loss, whole, double)
    return Conduct(unseen=reason)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:160]}"


def _compared(model: nn.Module, inputs: Any, loss: Callable[..., Any] | None, whole: _Run, double: bool) -> Conduct:
    """Runs two parts of a batch, and compares."""
    samples = whole.rows
    first = max(1, 3 * samples // 8)  # unlike sizes, which weights can be told apart by
    cuts = slice(0, first), slice(first, samples)
    batches = [inputs, *(rows_of(inputs, samples, rows) for rows in cuts)]
    common: dict[str, Any] = {
        "whole": whole.loss,
        "samples": samples,
        "toggles": whole.toggles,
        "hooked": whole.watch.hooked,
        "differentiates": whole.watch.differentiates,
        "sparse": tuple(name for name, gradient in whole.gradients.items() if gradient.layout != torch.strided),
        "incomparable": whole.unlike,
    }
    try:
        plain = [whole, *(_run(model, batch, loss, double, thinned=False) for batch in batches[1:])]
    except _ModelError as error:
        return Conduct(indivisible=str(error), **common)
    reduction = _reduction_of_targets(model, batches, loss, double, whole) or _reduction([plain])
    if reduction == MEAN and any(_counted(plain, way) for way in plain[0].counts if way != TARGETS):
        divided = [plain]  # by other parts, too: those above may count alike by chance
        for at in {1, samples - 1} - {first}:
            others = (rows_of(inputs, samples, rows) for rows in (slice(0, at), slice(at, samples)))
            divided.append([whole, *(_run(model, other, loss, double, thinned=False) for other in others)])
        reduction = _reduction(divided)
    if reduction == MEAN and (ragged := _ragged(inputs, samples)) is not None:  # a mask of ones hides what it counts
        with contextlib.suppress(_ModelError):  # the model may not take one with zeros
            masked = [ragged, *(rows_of(ragged, samples, rows) for rows in cuts)]
            reduction = _reduction([[_run(model, part, loss, double, thinned=False) for part in masked]])
    parts = plain[1:]
    counters, written = _written(model, whole, parts)
    buffers = {name for name, _ in model.named_buffers()}
    mixing = () if reduction else _mixing(whole, parts)
    return Conduct(
        reduction=reduction,
        parts=sum(part.loss * part.rows for part in parts) / samples,
        where=None if reduction else next(iter(mixing), ""),
        mixing=mixing,
        counters=counters,
        written=written,
        kept=tuple(name for name in (*written, *counters) if name not in buffers),
        **common,
    )


def _reduction(divided: Sequence[Sequence[_Run]]) -> str:
    """Returns how the loss of a batch comes from those of its parts, the plainest way that fits; "" where none does.

    Args:
        divided: The whole batch and its parts, for every way that it was divided.
    """
    ways = [MEAN, SUM, *(way for way in divided[0][0].counts if way != TARGETS)]
    return next((way for way in ways if all(_fits(runs, _counted(runs, way)) for runs in divided)), "")


def _reduction_of_targets(
    model: nn.Module, batches: Sequence[Any], loss: Callable[..., Any] | None, double: bool, whole: _Run
) -> str:
    """`TARGETS` where the loss is a mean over targets of cross-entropies, a third of which is ignored to see it; else ""."""
    if not whole.counts.get(TARGETS):
        return ""
    try:
        thinned = [_run(model, batch, loss, double, thinned=True) for batch in batches]
    except _NoNumberError:
        return ""
    return TARGETS if _fits(thinned, _counted(thinned, TARGETS)) else ""


def _ragged(inputs: Any, samples: int) -> Any:
    """Returns the inputs with zeros at the ends of masks that are all ones, as padding makes them; None where there is no such
    mask.
    """
    changed = False

    def cut(leaf: torch.Tensor) -> torch.Tensor:
        nonlocal changed
        if leaf.dim() < 2 or len(leaf) != samples or leaf.shape[1] < 2 or not bool((leaf == 1).all()):
            return leaf
        changed, made = True, leaf.clone()
        for row in range(samples):
            made[row, leaf.shape[1] - row % leaf.shape[1] :] = 0
        return made

    made = pytree.tree_map_only(torch.Tensor, cut, inputs)
    return made if changed else None


class _ModelError(Exception):
    """An error of the model's own code, in one line."""


class _NoNumberError(_ModelError):
    """A loss that is not finite."""


def _run(model: nn.Module, inputs: Any, loss: Callable[..., Any] | None, double: bool, thinned: bool) -> _Run:
    """Returns a forward and a backward of a fresh copy."""
    own = copy.deepcopy(model, computed_values(model))
    if double:
        own.double()
        inputs = pytree.tree_map_only(torch.Tensor, _doubled, inputs)
    inputs = pytree.tree_map_only(torch.Tensor, lambda leaf: leaf.detach().clone(), inputs)
    counts = candidates(inputs, samples_of(inputs))
    args, kwargs = split_inputs(inputs)
    outputs: dict[str, torch.Tensor] = {}

    def note(path: str) -> Any:
        def hook(module: nn.Module, given: Any, output: Any) -> None:
            leaf = next((leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)), None)
            if leaf is not None:
                outputs.setdefault(path, leaf.detach().clone())

        return hook

    for path, module in own.named_modules():
        module.register_forward_hook(note(path))
    watch, targets, draws = Watch(), Targets(thin=thinned), AlikeDraws()
    try:
        with torch.enable_grad(), watch.differentiating(), draws, watch, targets:
            value = loss_of(own(*args, **kwargs), loss).reshape(())
        if not math.isfinite(float(value.detach())):
            raise _NoNumberError("its loss is no finite number")
        value.backward()  # type: ignore[no-untyped-call]
    except _NoNumberError:
        raise
    except Exception as error:  # the model's own code runs
        raise _ModelError(_first_line(error)) from error
    names = {id(parameter): name for name, parameter in own.named_parameters()}
    counts[TARGETS] = float(targets.count)
    computed = [*own.parameters(), *outputs.values()]  # in half precision maybe under an autocast of the model's own
    half = any(one.is_floating_point() and one.element_size() < 4 for one in computed)
    return _Run(
        loss=float(value.detach()),
        gradients={name: p.grad.detach() for name, p in own.named_parameters() if p.grad is not None},
        state=_state(own),
        outputs=outputs,
        counts=counts,
        watch=watch,
        rows=samples_of(inputs),
        slack=_HALF if half else 1.0 if double else _SINGLE,
        toggles=tuple(names.get(one, "a parameter") for one in watch.toggles),
        unlike=draws.unlike,
    )


def _doubled(leaf: torch.Tensor) -> torch.Tensor:
    return leaf.double() if leaf.is_floating_point() else leaf


def rows_of(inputs: Any, samples: int, rows: slice) -> Any:
    """Returns the rows of every tensor with as many rows as there are samples, as runs cut a batch."""

    def taken(leaf: torch.Tensor) -> torch.Tensor:
        return leaf[rows] if leaf.dim() and len(leaf) == samples else leaf

    return pytree.tree_map_only(torch.Tensor, taken, inputs)


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns buffers, and tensors and numbers that modules keep as plain attributes."""
    found = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name.startswith("_") or name == "training":
                continue
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                found[f"{path}.{name}".lstrip(".")] = value.detach().clone()
            elif isinstance(value, (int, float)) and not isinstance(value, bool):
                found[f"{path}.{name}".lstrip(".")] = torch.tensor(float(value))
    return found


def _counted(runs: Sequence[_Run], way: str) -> list[float]:
    """What the loss of each part counts in that of the whole; empty where nothing is counted."""
    parts = runs[1:]
    counts = [1.0 if way == SUM else float(part.rows) if way == MEAN else part.counts.get(way, 0.0) for part in parts]
    total = 1.0 if way == SUM else sum(counts)
    return [count / total for count in counts] if total else []


def _fits(runs: Sequence[_Run], weights: Sequence[float]) -> bool:
    """Returns whether weighted parts have the loss and the gradients of the whole."""
    whole, *parts = runs
    if not weights:
        return False
    slack = whole.slack
    scale = max(*(abs(run.loss) for run in runs), 1e-12)
    summed = sum(weight * part.loss for weight, part in zip(weights, parts, strict=True))
    if abs(summed - whole.loss) > slack * _LOSS * scale:
        return False
    largest = max((float(g.to_dense().abs().max()) for g in whole.gradients.values() if g.numel()), default=0.0)
    terms = [(-1.0, whole), *zip(weights, parts, strict=True)]
    for name in {name for run in runs for name in run.gradients}:
        known = [factor * run.gradients[name].to_dense() for factor, run in terms if name in run.gradients]
        difference = torch.stack(known).sum(0)
        if difference.numel() and not float(difference.abs().max()) <= slack * _GRADIENT * (largest + 1e-12):
            return False
    return True


def _mixing(whole: _Run, parts: Sequence[_Run]) -> tuple[str, ...]:
    """Returns modules whose rows differ between the whole batch and its parts, in the order of their first calls; never the
    root.
    """
    found = []
    for path, output in whole.outputs.items():
        made = [part.outputs.get(path) for part in parts]
        if path and output.is_floating_point() and output.dim() and len(output) == whole.rows and None not in made:
            joined = torch.cat([rows for rows in made if rows is not None])
            if joined.shape != output.shape or not torch.allclose(joined, output, rtol=1e-5, atol=1e-7, equal_nan=True):
                found.append(path)
    return tuple(found)


def _written(model: nn.Module, whole: _Run, parts: Sequence[_Run]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of what forwards write alike whatever the samples are, and of what depends on them; without torch's norms."""
    alike, unlike = list[str](), list[str]()
    norms = {path for path, module in model.named_modules() if isinstance(module, NormBase)}
    start, runs = _state(model), [run.state for run in (whole, *parts)]
    for name in dict.fromkeys(name for state in (start, *runs) for name in state):
        before, values = start.get(name), [state.get(name) for state in runs]
        if name.rpartition(".")[0] in norms or all(_same(value, before) for value in values):
            continue
        (alike if all(_same(value, values[0]) for value in values) else unlike).append(name)
    return tuple(alike), tuple(unlike)


def _same(value: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if value is None or other is None:
        return value is other
    return value.shape == other.shape and torch.allclose(
        value.to(torch.complex128), other.to(torch.complex128), rtol=1e-6, atol=1e-9, equal_nan=True
    )
