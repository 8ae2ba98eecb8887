"""Hooks on modules, activations and parameters; weights that are computed from others."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

from benchmarks.trials.parts import WIDTH, Feed, Made, perceptron, repeated, text


class _Body(nn.Module):
    """Layers in a list and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return {"loss": self.head(x).square().mean()}


def _body(batch: int) -> tuple[_Body, Any]:
    return _Body(), {"x": torch.randn(batch, 16)}


def forward_hook_scales(batch: int = 8) -> Made:
    model, inputs = _body(batch)
    model.layers[1].register_forward_hook(lambda module, given, output: 3 * output)
    return model, inputs


def forward_pre_hook(batch: int = 8) -> Made:
    model, inputs = _body(batch)
    model.layers[2].register_forward_pre_hook(lambda module, given: (given[0] + 1,))
    return model, inputs


def hook_of_the_whole_model(batch: int = 8) -> Made:
    model, inputs = _body(batch)
    model.register_forward_hook(lambda module, given, output: {"loss": 2 * output["loss"]})
    return model, inputs


def backward_hook_of_a_module(batch: int = 8) -> Made:
    model, inputs = _body(batch)
    model.layers[1].register_full_backward_hook(lambda module, inside, outside: (inside[0] / 2,))
    return model, inputs


def hook_of_a_parameter(batch: int = 8) -> Made:
    """Returns gradients of one weight are masked, as for embeddings that stay."""
    model, inputs = _body(batch)
    model.layers[1].weight.register_hook(lambda gradient: gradient * (torch.arange(16) > 3)[:, None])
    return model, inputs


def clipped_by_a_hook(batch: int = 8) -> Made:
    """Returns a hook that is not linear: a gradient of a part of the batch clipped is not a part of the clipped one."""
    model, inputs = _body(batch)
    model.layers[0].weight.register_hook(lambda gradient: gradient.clamp(-1e-4, 1e-4))
    return model, inputs


class _Reversed(_Body):
    """The gradient of an activation is reversed, as for domain adaptation."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = torch.tanh(self.layers[1](torch.tanh(self.layers[0](x))))
        if x.requires_grad:
            x.register_hook(lambda gradient: -2 * gradient)
        return {"loss": self.head(self.layers[2](x)).square().mean()}


def hook_of_an_activation(batch: int = 8) -> Made:
    return _Reversed(), {"x": torch.randn(batch, 16)}


class _Collects(_Body):
    """A hook keeps activations, and the loss takes them from there."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []
        self.layers[1].register_forward_hook(lambda module, given, output: self.seen.append(output))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.seen.clear()
        loss = super().forward(x)["loss"]
        return {"loss": loss + 0.1 * self.seen[0].abs().mean()}


def hook_that_collects(batch: int = 8) -> Made:
    return _Collects(), {"x": torch.randn(batch, 16)}


def weight_norm(batch: int = 8) -> Made:
    return repeated(lambda: Feed(lambda a, b: parametrizations.weight_norm(nn.Linear(a, b)))), text(batch)


def old_weight_norm(batch: int = 8) -> Made:
    return repeated(lambda: Feed(lambda a, b: nn.utils.weight_norm(nn.Linear(a, b)))), text(batch)


def spectral_norm(batch: int = 8) -> Made:
    return repeated(lambda: Feed(lambda a, b: parametrizations.spectral_norm(nn.Linear(a, b)))), text(batch)


def old_spectral_norm(batch: int = 8) -> Made:
    return repeated(lambda: Feed(lambda a, b: nn.utils.spectral_norm(nn.Linear(a, b)))), text(batch)


def orthogonal(batch: int = 8) -> Made:
    return repeated(lambda: nn.Sequential(parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)), nn.Tanh()), 2), text(batch)


def pruned(batch: int = 8) -> Made:
    model = repeated(Feed)
    for block in model.blocks:
        prune.l1_unstructured(block.up, "weight", 0.5)
    return model, text(batch)


class _Positive(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.softplus(x)


def positive_weights(batch: int = 8) -> Made:
    model = perceptron(8, 16, 1)
    for layer in model[::2]:
        nn.utils.parametrize.register_parametrization(layer, "weight", _Positive())
    return model, (torch.randn(batch, 8),), lambda output: output.square().mean()  # type: ignore[return-value]
