"""Hooks of parameters under engines that compute a gradient in parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from rlplace.runtime.state.whole import own_part, whole_tensor


class ParameterHooks:
    """Hooks of parameters, which run once a step on the gradient of the whole batch, whatever parts it was computed in.

    Args:
        model: Its parameters lose their hooks, which torch would call with gradients of parts.
    """

    def __init__(self, model: nn.Module) -> None:
        self._hooks: dict[str, list[Any]] = {}
        self._after: dict[str, list[Any]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            for hooks, found in ((self._hooks, parameter._backward_hooks), (self._after, _after_hooks(parameter))):
                if found:
                    hooks[name] = [*found.values()]
        for _, parameter in model.named_parameters():
            for found in (parameter._backward_hooks, _after_hooks(parameter)):
                if found:
                    found.clear()

    def run(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Calls those of gradients with whole ones; every process that has a part of a parameter does.

        Args:
            parameters: What this process trains, by name.
        """
        for name, hooks in self._hooks.items():
            parameter = parameters.get(name)
            if parameter is None or parameter.grad is None:
                continue
            gradient = whole_tensor(parameter.grad)
            for hook in hooks:
                changed = hook(gradient)
                gradient = gradient if changed is None else changed
            parameter.grad = own_part(gradient, parameter) if isinstance(parameter, DTensor) else gradient

    def run_after(self, name: str, parameter: nn.Parameter) -> None:
        """Calls those that run when a gradient has been accumulated, with the parameter as this process holds it."""
        for hook in self._after.get(name, ()):
            hook(parameter)


def _after_hooks(parameter: nn.Parameter) -> dict[Any, Any] | None:
    return getattr(parameter, "_post_accumulate_grad_hooks", None)
