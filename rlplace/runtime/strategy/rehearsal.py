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
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from rlplace.errors import InputError
from rlplace.model.capture.export import TOGGLES, loses
from rlplace.model.capture.fake import computed_values
from rlplace.model.capture.inputs import split_inputs
from rlplace.model.torch_adapter import TorchDispatchMode, pytree
from rlplace.plan.strategy import MEAN, SUM, TARGETS
from rlplace.runtime.base.batches import Targets, candidates, counting_alone, map_rows
from rlplace.runtime.base.steps import loss_of, samples_of
from rlplace.runtime.strategy.fact_records import Conduct
from rlplace.runtime.strategy.strategy_model import keyword_inputs
from rlplace.runtime.torch_adapter import NormBase

MOST_ELEMENTS, MOST_FLOPS = 1 << 25, 4e9
"""Parameters and buffers of a model that is rehearsed, and FLOPs of its step; a larger one would take seconds."""

_LOSS, _GRADIENT = 1e-6, 1e-5
"""Differences that are rounding in double precision, relative to the loss and to the largest gradient of a parameter."""

_SINGLE, _HALF = 30.0, 3e4
"""Factors of these differences in single and in half precision."""


class _Rehearsed(NamedTuple):
    """One forward and backward."""

    loss: float
    gradients: dict[str, torch.Tensor]  # by parameter
    state: dict[str, torch.Tensor]  # buffers and other tensors of modules afterwards, by name
    outputs: dict[str, torch.Tensor]  # by module the first tensor that it returned, in the order of first calls
    counts: dict[str, float]  # by way of counting the number that the run's samples have
    rows: int  # samples
    slack: float  # ratio of its rounding to that of double precision
    toggles: tuple[str, ...]  # parameters whose `requires_grad` the forward changed
    differentiates: bool  # whether the forward computed gradients
    unlike: str | None  # see `AlikeDraws`


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
            run = partial(_run, model, loss, double)
            try:
                whole = run(inputs)
            except _ModelError as error:
                reason = f"a small step raised {error}"
                continue
            return _compared(model, inputs, whole, run)
    return Conduct(unseen=reason)


def _compared(model: nn.Module, inputs: Any, whole: _Rehearsed, run: Callable[..., _Rehearsed]) -> Conduct:
    """Runs two parts of a batch, and compares."""
    samples = whole.rows
    first = max(1, 3 * samples // 8)  # of unlike sizes, which distinguish weights

    def parts_of(batch: Any, at: int = first) -> list[Any]:
        return [rows_of(batch, samples, slice(0, at)), rows_of(batch, samples, slice(at, samples))]

    common: dict[str, Any] = {
        "whole": whole.loss,
        "samples": samples,
        "toggles": whole.toggles,
        "differentiates": whole.differentiates,
        "sparse": tuple(name for name, gradient in whole.gradients.items() if gradient.layout != torch.strided),
        "incomparable": whole.unlike,
    }
    try:
        parts = [run(part) for part in parts_of(inputs)]
    except _ModelError as error:
        return Conduct(indivisible=str(error), **common)
    plain, reduction = [whole, *parts], ""
    if whole.counts.get(TARGETS):  # a third of them is ignored, to see whether they are counted
        with contextlib.suppress(_NoNumberError):
            thinned = [run(batch, thinned=True) for batch in (inputs, *parts_of(inputs))]
            reduction = TARGETS if _fits(thinned, TARGETS) else ""
    reduction = reduction or _reduction([plain])
    if reduction == MEAN and any(_counted(plain, way) for way in whole.counts if way != TARGETS):
        divided = [plain]  # by other parts, too: those above may count alike by chance
        divided += [[whole, *map(run, parts_of(inputs, at))] for at in {1, samples - 1} - {first}]
        reduction = _reduction(divided)
    if reduction == MEAN and (ragged := _ragged(inputs, samples)) is not None:  # a mask of ones hides its count
        with contextlib.suppress(_ModelError):  # the model may not take one with zeros
            reduction = _reduction([[run(part) for part in (ragged, *parts_of(ragged))]])
    counters, written = _written(model, plain)
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


def _reduction(divided: Sequence[Sequence[_Rehearsed]]) -> str:
    """Returns how the loss of a batch comes from those of its parts, the plainest way that fits; "" where none does.

    Args:
        divided: The whole batch and its parts, for every way that it was divided.
    """
    ways = [MEAN, SUM, *(way for way in divided[0][0].counts if way != TARGETS)]
    return next((way for way in ways if all(_fits(runs, way) for runs in divided)), "")


def _ragged(inputs: Any, samples: int) -> Any:
    """Returns the inputs with zeros at the ends of masks of ones, as padding makes them; None where there is no such mask."""
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


def _run(model: nn.Module, loss: Callable[..., Any] | None, double: bool, inputs: Any, *, thinned: bool = False) -> _Rehearsed:
    """Runs a forward and a backward of a fresh copy."""
    own = copy.deepcopy(model, computed_values(model))
    for module in own.modules():
        if isinstance(module, NormBase) and module.running_mean is not None:
            module.eval()  # that its statistics are of a part is known, and would hide how the rest treats samples
    inputs = pytree.tree_map_only(torch.Tensor, lambda leaf: leaf.detach().clone(), inputs)
    if double:
        own.double()
        inputs = pytree.tree_map_only(torch.Tensor, lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, inputs)
    counts = candidates(inputs, samples_of(inputs))
    args, kwargs = split_inputs(inputs)
    outputs: dict[str, torch.Tensor] = {}

    def note(path: str, module: nn.Module, given: Any, output: Any) -> None:
        leaf = next((leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)), None)
        if leaf is not None:
            outputs.setdefault(path, leaf.detach().clone())

    for path, module in own.named_modules():
        module.register_forward_hook(partial(note, path))
    watch, targets, draws = Watch(), Targets(thin=thinned), AlikeDraws()
    try:
        with torch.enable_grad(), watch.differentiating(), draws, watch, targets:
            output = own(*args, **kwargs)
            with counting_alone(targets):
                value = loss_of(output, loss).reshape(())
        if not math.isfinite(float(value.detach())):
            raise _NoNumberError("its loss is no finite number")
        value.backward()  # type: ignore[no-untyped-call]
    except _NoNumberError:
        raise
    except Exception as error:  # the model's own code runs
        reason = (str(error).strip().splitlines() or [""])[0][:160]
        raise _ModelError(f"{type(error).__name__}: {reason}") from error
    names = {id(parameter): name for name, parameter in own.named_parameters()}
    counts[TARGETS] = float(targets.count)
    computed = [*own.parameters(), *outputs.values()]  # in half precision maybe under an autocast of the model's own
    half = any(one.is_floating_point() and one.element_size() < 4 for one in computed)
    return _Rehearsed(
        loss=float(value.detach()),
        gradients={name: p.grad.detach() for name, p in own.named_parameters() if p.grad is not None},
        state=_state(own),
        outputs=outputs,
        counts=counts,
        rows=samples_of(inputs),
        slack=_HALF if half else 1.0 if double else _SINGLE,
        toggles=tuple(names.get(one, "a parameter") for one in watch.toggles),
        differentiates=watch.differentiates,
        unlike=draws.unlike,
    )


def rows_of(inputs: Any, samples: int, rows: slice) -> Any:
    """Returns the rows of every tensor with as many rows as there are samples, as runs cut a batch."""
    return map_rows(inputs, samples, lambda leaf: leaf[rows])


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


def _counted(runs: Sequence[_Rehearsed], way: str) -> list[float]:
    """Returns the weight of each part's loss in that of the whole; nothing where no way counts."""
    parts = runs[1:]
    counts = [1.0 if way == SUM else float(part.rows) if way == MEAN else part.counts.get(way, 0.0) for part in parts]
    total = 1.0 if way == SUM else sum(counts)
    return [count / total for count in counts] if total else []


def _fits(runs: Sequence[_Rehearsed], way: str) -> bool:
    """Returns whether parts that are weighted in a way have the loss and the gradients of the whole."""
    whole, *parts = runs
    weights = _counted(runs, way)
    terms = [(-1.0, whole), *zip(weights, parts, strict=bool(weights))]
    scale = max(*(abs(run.loss) for run in runs), 1e-12)
    if not weights or abs(sum(factor * run.loss for factor, run in terms[1:]) - whole.loss) > whole.slack * _LOSS * scale:
        return False
    largest = max((float(g.to_dense().abs().max()) for g in whole.gradients.values() if g.numel()), default=0.0)
    for name in {name for run in runs for name in run.gradients}:
        known = [factor * run.gradients[name].to_dense() for factor, run in terms if name in run.gradients]
        difference = torch.stack(known).sum(0)
        if difference.numel() and not float(difference.abs().max()) <= whole.slack * _GRADIENT * (largest + 1e-12):
            return False
    return True


def _mixing(whole: _Rehearsed, parts: Sequence[_Rehearsed]) -> tuple[str, ...]:
    """Returns modules but the root whose rows differ between the batch and its parts, in the order of their first calls."""
    found = []
    for path, output in whole.outputs.items():
        made = [part.outputs.get(path) for part in parts]
        if path and output.is_floating_point() and output.dim() and len(output) == whole.rows and None not in made:
            joined = torch.cat([rows for rows in made if rows is not None])
            if joined.shape != output.shape or not torch.allclose(joined, output, rtol=1e-5, atol=1e-7, equal_nan=True):
                found.append(path)
    return tuple(found)


def _written(model: nn.Module, divided: Sequence[_Rehearsed]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns names of the state that forwards write, alike for all samples and by the samples; without torch's norms."""
    alike, unlike = list[str](), list[str]()
    norms = {path for path, module in model.named_modules() if isinstance(module, NormBase)}
    start, runs = _state(model), [run.state for run in divided]
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


class Watch(TorchFunctionMode):
    """The acts of a forward that a graph of it would lose."""

    def __init__(self) -> None:
        super().__init__()
        self.toggles = set[int]()  # ids of parameters whose `requires_grad` is changed
        self.differentiates = False  # gradients are computed

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if loses(function, args, kwargs) == TOGGLES:
            self.toggles.add(id(args[0]))
        return function(*args, **(kwargs or {}))

    @contextlib.contextmanager
    def differentiating(self) -> Iterator[None]:
        """Notes calls of `torch.autograd` inside."""

        def noted(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self.differentiates = True
            return original(*args, **kwargs)

        with contextlib.ExitStack() as inside:
            for name in ("grad", "backward"):
                inside.enter_context(mock.patch.object(torch.autograd, name, partial(noted, getattr(torch.autograd, name))))
            yield


class AlikeDraws(TorchDispatchMode):
    """Random ops that draw the numbers of one row, for all rows, from one stream.

    So the numbers of a sample depend neither on the other samples of a pass nor on the ops that ran before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0  # random ops so far
        self.unlike: str | None = None  # an op whose results depend on values or on the number of samples; None without one

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or not _draws(func, args, kwargs):
            return func(*args, **kwargs)
        self.count += 1
        torch.manual_seed(1)
        name, overload = func._schema.name.removeprefix("aten::"), func._overloadname
        own = {key: None if key == "generator" else value for key, value in kwargs.items()}  # the stream that is seeded above
        first: Any = args[0] if args else None
        rest = args[1:]
        values = any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves((rest, own)))
        if name == "bernoulli" and overload == "default" and isinstance(first, torch.Tensor):
            return (_row(first, torch.rand) < first).to(first)
        if name == "native_dropout":
            mask = _row(first, torch.rand) >= args[1]
            return first * mask / (1 - args[1]), mask
        if name == "normal" and (overload.startswith("Tensor") or values):
            mean, std = (*args, own.get("std", 1.0))[:2]
            return mean + std * _row(mean if isinstance(mean, torch.Tensor) else std, torch.randn)
        if isinstance(first, torch.Tensor) and not values:
            row = first[:1] if first.dim() else first
            if name.endswith("_"):
                return first.copy_(func(torch.empty_like(row), *rest, **own).expand_as(first))
            if name not in ("multinomial", "poisson"):  # ``rand_like``, and what writes of the kind above become in graphs
                return func(row, *rest, **own).expand_as(first).clone()
        sizes = next((at for at, value in enumerate(args) if isinstance(value, (list, tuple))), None)
        if sizes is not None and name in ("rand", "randn", "randint", "normal"):
            shape = list(args[sizes])
            drawn = func(*args[:sizes], [1, *shape[1:]] if shape else [], *args[sizes + 1 :], **own)
            return drawn.expand(shape).clone()
        self.unlike = name
        return func(*args, **kwargs)


def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Returns whether a call draws: dropout of probability 0 does not."""
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | dict(kwargs)
    named = {argument.name: argument.default_value for argument in func._schema.arguments} | given
    return not (named.get("train") is False or 0.0 in [named.get(name) for name in ("dropout_p", "p", "dropout")])


def _row(like: torch.Tensor, draw: Callable[..., torch.Tensor]) -> torch.Tensor:
    shape = (1, *like.shape[1:]) if like.dim() else ()
    return draw(shape, dtype=like.dtype if like.is_floating_point() else None, device=like.device).expand(like.shape)
