"""Modes around the forward of a rehearsal: what it does beside computing, and random numbers that are alike for all samples."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from rlplace.model.capture.export import HOOKS, TOGGLES, loses
from rlplace.model.torch_adapter import TorchDispatchMode, pytree


class Watch(TorchFunctionMode):
    """Notes what a graph of a forward would lose.

    Attributes:
        toggles: Ids of parameters whose `requires_grad` is changed.
        hooked: A hook is registered on an activation.
        differentiates: Gradients are computed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.toggles = set[int]()
        self.hooked = self.differentiates = False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        changed = loses(function, args, kwargs)
        if changed == TOGGLES:
            self.toggles.add(id(args[0]))
        self.hooked = self.hooked or changed == HOOKS
        return function(*args, **(kwargs or {}))

    @contextlib.contextmanager
    def differentiating(self) -> Iterator[None]:
        """Inside, calls of `torch.autograd` are noted."""

        def noted(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                self.differentiates = True
                return original(*args, **kwargs)

            return call

        with (
            mock.patch.object(torch.autograd, "grad", noted(torch.autograd.grad)),
            mock.patch.object(torch.autograd, "backward", noted(torch.autograd.backward)),
        ):
            yield


class AlikeDraws(TorchDispatchMode):
    """Gives every random op the numbers of one row, for all rows, and all ops the same stream.

    So the numbers of a sample depend neither on the other samples of a pass nor on the ops that ran before.

    Attributes:
        count: Random ops so far.
        unlike: One whose results depend on values or on the number of samples; None without one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.unlike: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or not _draws(func, args, kwargs):
            return func(*args, **kwargs)
        self.count += 1
        torch.manual_seed(1)
        name, overload = func._schema.name.removeprefix("aten::"), func._overloadname
        own = {key: value for key, value in kwargs.items() if key != "generator"}
        first: Any = args[0] if args else None
        rest = args[1:]
        values = any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves((rest, own)))
        rows = isinstance(first, torch.Tensor) and not values
        if name == "bernoulli" and overload == "default" and isinstance(first, torch.Tensor):
            return (_row(first, torch.rand) < first).to(first)
        if name == "native_dropout":
            mask = _row(first, torch.rand) >= args[1]
            return first * mask / (1 - args[1]), mask
        if name == "normal" and (overload.startswith("Tensor") or values):
            mean, std = (*args, own.get("std", 1.0))[:2]
            shape = mean if isinstance(mean, torch.Tensor) else std
            return mean + std * _row(shape, torch.randn)
        if name.endswith("_") and rows:
            row = torch.empty_like(first[:1] if first.dim() else first)
            return first.copy_(func(row, *rest, **own).expand_as(first))
        if (
            rows and name != "multinomial" and name != "poisson"
        ):  # ``rand_like``, and what writes of the kind above become in graphs
            return func(first[:1] if first.dim() else first, *rest, **own).expand_as(first).clone()
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
