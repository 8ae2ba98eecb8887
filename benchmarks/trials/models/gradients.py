"""Models that change autograd, or whose forward keeps something for the next one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.trials.parts import WIDTH, Attention, Feed, Made, perceptron, repeated, text


class _Sign(torch.autograd.Function):
    """Sign with a straight-through gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * (ctx.saved_tensors[0].abs() < 1)


class _Binary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(_Sign.apply(self.a(x)))


def autograd_function(batch: int = 8) -> Made:
    return repeated(_Binary), text(batch)


class _Again(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inside, self.reentrant = nn.Sequential(Attention(), Feed()), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inside, x, use_reentrant=self.reentrant)


def checkpointed(batch: int = 8) -> Made:
    return repeated(lambda: _Again(False)), text(batch)


def checkpointed_reentrant(batch: int = 8) -> Made:
    return repeated(lambda: _Again(True)), text(batch)


class _Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = Feed()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.inside(x).float()


def autocast_inside(batch: int = 8) -> Made:
    return repeated(_Half), text(batch)


autocast_inside.tolerance = 300.0  # type: ignore[attr-defined]


class _Detached(nn.Module):
    """One branch is detached, another computed without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.head = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = self.c(x).sigmoid()
        return self.head(self.a(x).tanh() * scale + self.b(self.a(x).detach())).square().mean()


def detached(batch: int = 8) -> Made:
    return _Detached(), {"x": torch.randn(batch, 8)}


def dropout(batch: int = 8) -> Made:
    return repeated(lambda: nn.Sequential(Feed(), nn.Dropout(0.2))), text(batch)


class _Counts(nn.Module):
    """A counter in a buffer warms the loss up."""

    steps: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron(8, 16, 1)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return self.net(x).square().mean() * (self.steps / 10)


def counter_in_a_buffer(batch: int = 8) -> Made:
    return _Counts(), {"x": torch.randn(batch, 8)}


class _Standard(nn.Module):
    """Inputs are standardized by a running mean of one's own."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron(8, 16, 1)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0).detach()
        return self.net(x - self.mean).square().mean()


def running_mean_of_its_own(batch: int = 8) -> Made:
    return _Standard(), {"x": torch.randn(batch, 8)}


class _Remembers(nn.Module):
    """The state of the last step is the start of the next, detached: truncated backpropagation."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.state = nn.GRUCell(4, 8), nn.Linear(8, 1), None

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = torch.zeros(len(x), 8) if self.state is None else self.state
        h = self.body(x, h)
        self.state = h.detach()
        return F.mse_loss(self.head(h)[:, 0], y)


def state_from_the_last_step(batch: int = 8) -> Made:
    return _Remembers(), {"x": torch.randn(batch, 4), "y": torch.randn(batch)}


class _Physics(nn.Module):
    """A residual of a differential equation: derivatives by the input, and a boundary."""

    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron(2, 16, 16, 1, act=nn.Tanh)

    def forward(self, at: torch.Tensor) -> torch.Tensor:
        at = at.clone().requires_grad_(True)
        u = self.net(at)
        (du,) = torch.autograd.grad(u.sum(), at, create_graph=True)
        (ddu,) = torch.autograd.grad(du[:, 0].sum(), at, create_graph=True)
        return (du[:, 1] - 0.1 * ddu[:, 0]).square().mean() + self.net(at * torch.tensor([0.0, 1.0])).square().mean()


def differential_equation(batch: int = 8) -> Made:
    return _Physics(), {"at": torch.rand(batch, 2)}


class _PerSample(nn.Module):
    """torch.func inside of a forward: the norm of the gradient of every sample."""

    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron(6, 12, 1, act=nn.Tanh)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        slope = torch.func.vmap(torch.func.grad(lambda one: self.net(one).sum()))(x)
        return self.net(x).square().mean() + slope.square().sum(-1).mean()


def gradients_by_torch_func(batch: int = 8) -> Made:
    return _PerSample(), {"x": torch.randn(batch, 6)}
