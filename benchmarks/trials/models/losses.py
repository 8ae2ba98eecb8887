"""Losses that weigh, rank, or couple samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.trials.parts import Feed, Lm, Made, perceptron, repeated, text


class _Towers(nn.Module):
    """Two encoders and a learned temperature: every other sample of the batch is a negative."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = perceptron(16, 64, 32), perceptron(12, 64, 32)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, image: torch.Tensor, text: torch.Tensor) -> dict[str, torch.Tensor]:
        a, b = F.normalize(self.image(image), dim=-1), F.normalize(self.text(text), dim=-1)
        logits, own = self.scale.exp() * a @ b.T, torch.arange(len(a), device=a.device)
        return {"loss": (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2}


def clip_like(batch: int = 8) -> Made:
    return _Towers(), {"image": torch.randn(batch, 16), "text": torch.randn(batch, 12)}


class _Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron(16, 64, 32)

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        z = F.normalize(self.net(torch.cat([first, second])), dim=-1)
        n = len(first)
        scores = (z @ z.T / 0.5).masked_fill(torch.eye(2 * n, dtype=torch.bool, device=z.device), -1e9)
        return F.cross_entropy(scores, torch.arange(2 * n, device=z.device).roll(n))


def simclr(batch: int = 8) -> Made:
    return _Views(), {"first": torch.randn(batch, 16), "second": torch.randn(batch, 16)}


class _Triplets(nn.Module):
    """The hardest positive and negative of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron(16, 64, 8)

    def forward(self, x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        z = self.net(x)
        far = (z[:, None] - z[None]).square().sum(-1)
        same = label[:, None] == label[None]
        return F.relu(far.masked_fill(~same, 0.0).amax(1) - far.masked_fill(same, 1e9).amin(1) + 1.0).mean()


def hardest_triplets(batch: int = 8) -> Made:
    return _Triplets(), {"x": torch.randn(batch, 16), "label": torch.arange(batch) % 2}


class _Variance(nn.Module):
    """VICReg: spread and covariance over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron(16, 64, 8)

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        a, b = self.net(first), self.net(second)
        covariance = (a - a.mean(0)).T @ (a - a.mean(0)) / (len(a) - 1)
        return F.mse_loss(a, b) + F.relu(1 - a.std(0)).mean() + (covariance - covariance.diag().diag()).square().mean()


def variance_over_the_batch(batch: int = 8) -> Made:
    return _Variance(), {"first": torch.randn(batch, 16), "second": torch.randn(batch, 16)}


class _Policy(nn.Module):
    """A policy gradient with advantages normalized over the batch, and a value."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.actor, self.critic = perceptron(10, 32, 32), nn.Linear(32, 4), nn.Linear(32, 1)

    def forward(self, state: torch.Tensor, action: torch.Tensor, reward: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.body(state).relu()
        policy = torch.distributions.Categorical(logits=self.actor(h))
        value = self.critic(h)[:, 0]
        advantage = (reward - value).detach()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
        gain = (policy.log_prob(action) * advantage).mean() + 0.01 * policy.entropy().mean()
        return {"loss": F.mse_loss(value, reward) - gain}


def normalized_advantage(batch: int = 8) -> Made:
    return _Policy(), {"state": torch.randn(batch, 10), "action": torch.randint(0, 4, (batch,)), "reward": torch.randn(batch)}


def ignored_targets(batch: int = 8) -> Made:
    inputs = text(batch)
    for sample, keep in enumerate(torch.randint(1, 12, (batch,)).tolist()):
        inputs["labels"][sample, keep:] = -100
    return repeated(Feed), inputs


class _Masked(nn.Module):
    """A mean over valid positions, by a mask that is an input."""

    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron(6, 32, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": ((self.net(x)[..., 0] - y).square() * mask).sum() / mask.sum()}


def masked_mean(batch: int = 8) -> Made:
    mask = (torch.arange(10) < torch.randint(1, 11, (batch, 1))).float()
    return _Masked(), {"x": torch.randn(batch, 10, 6), "y": torch.randn(batch, 10), "mask": mask}


class _Classes(nn.Module):
    """A classifier whose loss is given by name."""

    def __init__(self, loss: str) -> None:
        super().__init__()
        self.net, self.kind = perceptron(12, 32, 5), loss
        self.register_buffer("weights", torch.tensor([0.2, 1.0, 3.0, 0.5, 2.0]))

    def forward(self, x: torch.Tensor, label: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.net(x)
        each = F.cross_entropy(logits, label, reduction="none")
        losses = {
            "weighted": lambda: F.cross_entropy(logits, label, weight=self.weights),
            "focal": lambda: ((1 - (-each).exp()) ** 2 * each).mean(),
            "smooth": lambda: F.cross_entropy(logits, label, label_smoothing=0.1),
            "sum": lambda: F.cross_entropy(logits, label, reduction="sum") / 10,
            "hardest": lambda: each.topk(len(each) // 2).values.mean(),
            "root": lambda: (each.square().mean() + 1e-6).sqrt(),
        }
        return {"loss": losses[self.kind]()}


def _classes(loss: str, batch: int) -> Made:
    return _Classes(loss), {"x": torch.randn(batch, 12), "label": torch.randint(0, 5, (batch,))}


def weighted_classes(batch: int = 8) -> Made:
    return _classes("weighted", batch)


def focal(batch: int = 8) -> Made:
    return _classes("focal", batch)


def smoothed_labels(batch: int = 8) -> Made:
    return _classes("smooth", batch)


def sum_over_samples(batch: int = 8) -> Made:
    return _classes("sum", batch)


def hardest_half_of_the_batch(batch: int = 8) -> Made:
    return _classes("hardest", batch)


def root_of_the_mean(batch: int = 8) -> Made:
    return _classes("root", batch)


class _Dice(nn.Module):
    """Overlap of masks over all pixels of the batch, or of each sample."""

    def __init__(self, dims: tuple[int, ...]) -> None:
        super().__init__()
        self.net, self.dims = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1)), dims

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        p = self.net(x).sigmoid()
        overlap = (2 * (p * mask).sum(self.dims) + 1) / (p.sum(self.dims) + mask.sum(self.dims) + 1)
        return {"loss": (1 - overlap).mean()}


def dice_of_the_batch(batch: int = 8) -> Made:
    return _Dice((0, 2, 3)), {"x": torch.randn(batch, 1, 8, 8), "mask": torch.rand(batch, 1, 8, 8).round()}


def dice_of_samples(batch: int = 8) -> Made:
    return _Dice((1, 2, 3)), {"x": torch.randn(batch, 1, 8, 8), "mask": torch.rand(batch, 1, 8, 8).round()}


class _Ranks(nn.Module):
    """Sorted within a list of each sample (ListMLE), or pairs of the whole batch (RankNet)."""

    def __init__(self, pairs: bool) -> None:
        super().__init__()
        self.net, self.pairs = perceptron(5, 16, 1), pairs

    def forward(self, items: torch.Tensor, grade: torch.Tensor) -> torch.Tensor:
        score = self.net(items)[..., 0]
        if self.pairs:
            flat, g = score.flatten(), grade.flatten()
            return F.softplus(flat[None] - flat[:, None])[g[:, None] > g[None]].mean()
        ordered = score.gather(1, grade.argsort(1, descending=True))
        return (ordered.flip(1).logcumsumexp(1).flip(1) - ordered).mean()


def list_ranking(batch: int = 8) -> Made:
    return _Ranks(False), {"items": torch.randn(batch, 6, 5), "grade": torch.rand(batch, 6)}


def pairs_of_the_batch(batch: int = 8) -> Made:
    return _Ranks(True), {"items": torch.randn(batch, 3, 5), "grade": torch.rand(batch, 3)}


class _Logits(Lm):
    def forward(self, tokens: torch.Tensor) -> Any:
        logits = self.logits(tokens)
        return logits, logits.square().mean()


def loss_outside(batch: int = 8) -> tuple[nn.Module, Any, Any]:
    return _Logits([Feed(), Feed()]), {"tokens": text(batch)["tokens"]}, lambda out: out[0].logsumexp(-1).mean() + 0.1 * out[1]


class _Distilled(nn.Module):
    """A frozen teacher inside, and a divergence averaged over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.student = perceptron(12, 32, 5).eval().requires_grad_(False), perceptron(12, 8, 5)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            wanted = (self.teacher(x) / 2).softmax(-1)
        return {"loss": F.kl_div((self.student(x) / 2).log_softmax(-1), wanted, reduction="batchmean") * 4}


def distilled(batch: int = 8) -> Made:
    return _Distilled(), {"x": torch.randn(batch, 12)}
