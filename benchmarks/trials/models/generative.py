"""Models that generate, with buffers, two players or gradients of gradients."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.trials.parts import Made, perceptron


class _Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = perceptron(12, 32, 4), perceptron(4, 32, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.decoder(self.encoder(x)), x)


def autoencoder(batch: int = 8) -> Made:
    return _Autoencoder(), (torch.randn(batch, 12),)


class _Variational(_Autoencoder):
    """Noise is drawn inside, or an input."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = perceptron(12, 32, 8)

    def forward(self, x: torch.Tensor, noise: torch.Tensor | None = None) -> torch.Tensor:
        mean, spread = self.encoder(x).chunk(2, -1)
        z = mean + (spread / 2).exp() * (torch.randn_like(mean) if noise is None else noise)
        divergence = (mean.square() + spread.exp() - 1 - spread).sum(-1).mean() / 2
        return F.mse_loss(self.decoder(z), x) + 0.1 * divergence


def variational_noise_inside(batch: int = 8) -> Made:
    return _Variational(), {"x": torch.randn(batch, 12)}


def variational_noise_given(batch: int = 8) -> Made:
    return _Variational(), {"x": torch.randn(batch, 12), "noise": torch.randn(batch, 4)}


class _Codes(nn.Module):
    """A codebook in buffers, moved towards what chose it."""

    def __init__(self, count: int = 10, width: int = 4) -> None:
        super().__init__()
        self.register_buffer("book", torch.randn(count, width))
        self.register_buffer("used", torch.ones(count))
        self.register_buffer("total", self.book.clone())

    def forward(self, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        which = torch.cdist(z, self.book).argmin(1)
        chosen = F.one_hot(which, len(self.book)).to(z)
        if self.training:
            with torch.no_grad():
                self.used.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
                self.total.mul_(0.9).add_(chosen.T @ z, alpha=0.1)
                self.book.copy_(self.total / self.used.clamp(min=1e-3)[:, None])
        q = self.book[which]
        return z + (q - z).detach(), F.mse_loss(z, q.detach())


class _Quantized(_Autoencoder):
    def __init__(self) -> None:
        super().__init__()
        self.codes = _Codes()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, commitment = self.codes(self.encoder(x))
        return F.mse_loss(self.decoder(q), x) + 0.25 * commitment


def codebook_in_buffers(batch: int = 8) -> Made:
    return _Quantized(), {"x": torch.randn(batch, 12)}


class _Learned(_Autoencoder):
    def __init__(self) -> None:
        super().__init__()
        self.book = nn.Embedding(10, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.encoder(x)
        q = self.book(torch.cdist(z.detach(), self.book.weight.detach()).argmin(1))
        return F.mse_loss(self.decoder(z + (q - z).detach()), x) + F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach())


def codebook_learned(batch: int = 8) -> Made:
    return _Learned(), {"x": torch.randn(batch, 12)}


class _Players(nn.Module):
    """Both losses of a GAN in one step; the judge stands still while the maker learns."""

    def __init__(self) -> None:
        super().__init__()
        self.maker, self.judge = perceptron(6, 32, 12), perceptron(12, 32, 1, act=lambda: nn.LeakyReLU(0.2))

    def forward(self, z: torch.Tensor, x: torch.Tensor) -> dict[str, torch.Tensor]:
        fake = self.maker(z)
        judged = F.softplus(-self.judge(x)).mean() + F.softplus(self.judge(fake.detach())).mean()
        self.judge.requires_grad_(False)
        made = F.softplus(-self.judge(fake)).mean()
        self.judge.requires_grad_(True)
        return {"loss": judged + made}


def gan_toggled(batch: int = 8) -> Made:
    return _Players(), {"z": torch.randn(batch, 6), "x": torch.randn(batch, 12)}


class _Penalty(nn.Module):
    """The gradient at given points is held at one: a gradient of a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.judge = perceptron(12, 32, 1, act=nn.Tanh)

    def forward(self, x: torch.Tensor, fake: torch.Tensor, mix: torch.Tensor) -> dict[str, torch.Tensor]:
        between = (mix * x + (1 - mix) * fake).requires_grad_(True)
        (slope,) = torch.autograd.grad(self.judge(between).sum(), between, create_graph=True)
        gap = self.judge(fake).mean() - self.judge(x).mean()
        return {"loss": gap + 10 * (slope.norm(dim=-1) - 1).square().mean()}


def gradient_penalty(batch: int = 8) -> Made:
    return _Penalty(), {"x": torch.randn(batch, 12), "fake": torch.randn(batch, 12), "mix": torch.rand(batch, 1)}


class _Flow(nn.Module):
    """Couplings with their determinants under a distribution of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(perceptron(3, 16, 6, act=nn.Tanh) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(len(x), device=x.device)
        for net in self.nets:
            a, b = x.chunk(2, -1)
            shift, scale = net(a).chunk(2, -1)
            x, total = torch.cat([b * scale.tanh().exp() + shift, a], -1), total + scale.tanh().sum(-1)
        prior = torch.distributions.Normal(torch.zeros(6), torch.ones(6))
        return -(prior.log_prob(x).sum(-1) + total).mean()


def flow(batch: int = 8) -> Made:
    return _Flow(), {"x": torch.randn(batch, 6)}


class _Teacher(nn.Module):
    """A student and a teacher that follows it, a moving average in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.student = perceptron(12, 32, 6)
        for name, value in self.student.named_parameters():
            self.register_buffer(name.replace(".", "_"), value.detach().clone())

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            held = {name: getattr(self, name.replace(".", "_")) for name, _ in self.student.named_parameters()}
            for name, value in self.student.named_parameters():
                held[name].lerp_(value, 0.1)
            wanted = torch.func.functional_call(self.student, held, (other,)).softmax(-1)
        return -(wanted * self.student(x).log_softmax(-1)).sum(-1).mean()


def teacher_in_buffers(batch: int = 8) -> Made:
    return _Teacher(), {"x": torch.randn(batch, 12), "other": torch.randn(batch, 12)}


class _Hidden(_Autoencoder):
    """Half of the features of every sample are hidden, drawn anew in every step."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.rand_like(x) < 0.5
        return ((self.decoder(self.encoder(x.masked_fill(hidden, 0.0))) - x).square() * hidden).mean()


def masked_at_random(batch: int = 8) -> Made:
    return _Hidden(), {"x": torch.randn(batch, 12)}
