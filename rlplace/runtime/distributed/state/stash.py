"""Gradients between the step that made them and ``loss.backward()``, which hands them over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


class Stash:
    """Gradients of a step that wait for ``loss.backward()``, while those from before are kept aside.

    As a context it clears the gradients that engines add to, takes those that they made, and puts back what was there.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], *, copy: bool = False) -> None:
        """Starts empty.

        Args:
            parameters: What gets gradients, by name.
            copy: What runs the step writes into the memory of gradients of earlier ones.
        """
        self._parameters = parameters
        self._copy = copy
        self._before: dict[str, torch.Tensor | None] = {}
        self._gradients: dict[str, torch.Tensor] = {}

    def __enter__(self) -> Stash:
        for name, parameter in self._parameters.items():
            before = parameter.grad
            self._before[name] = before.clone() if self._copy and before is not None else before
            parameter.grad = None
        return self

    def __exit__(self, *_: object) -> None:
        self._gradients = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        for name, parameter in self._parameters.items():
            parameter.grad = self._before[name]
        self._before.clear()

    def keep(self) -> None:
        """Takes the gradients that wait into memory of their own."""
        self._gradients = {name: gradient.clone() for name, gradient in self._gradients.items()}

    def deliver(self, scale: torch.Tensor) -> None:
        """Adds the gradients, times `scale`, to those of the parameters that the training loop sees."""
        factor = float(scale)
        for name, gradient in self._gradients.items():
            if factor != 1.0:
                gradient.mul_(factor)
            parameter = self._parameters[name]
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.add_(gradient)
        self._gradients = {}


class Deliver(torch.autograd.Function):
    """The loss of a step that has run already; its backward hands over the gradients."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, loss: torch.Tensor, stash: Stash) -> torch.Tensor:
        """Returns the loss."""
        ctx.stash = stash
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Hands over the gradients, once."""
        if ctx.stash is None:
            raise RuntimeError("rlplace: backward through the loss of one step a second time")
        ctx.stash.deliver(grads[0])
        ctx.stash = None
        return None, None, None


def anchor(loss: torch.Tensor) -> torch.Tensor:
    """Something that requires a gradient, so that the loss has a backward on ranks without parameters too."""
    return torch.zeros((), device=loss.device, requires_grad=True)
