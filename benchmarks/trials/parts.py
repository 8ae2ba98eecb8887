"""Parts of several models of the collection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Inputs = dict[str, torch.Tensor]
Made = tuple[nn.Module, Any]
WIDTH, VOCABULARY = 32, 50


def text(batch: int, length: int = 12) -> Inputs:
    """Returns tokens and labels."""
    return {name: torch.randint(0, VOCABULARY, (batch, length)) for name in ("tokens", "labels")}


def images(batch: int, size: int = 16, classes: int = 10) -> Inputs:
    """Images and labels."""
    return {"x": torch.randn(batch, 3, size, size), "labels": torch.randint(0, classes, (batch,))}


def perceptron(*widths: int, act: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    """Products with an activation between them."""
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), act()]
    return nn.Sequential(*layers[:-1])


class Feed(nn.Module):
    """A residual feed-forward block; `linear` makes its products."""

    def __init__(self, linear: Callable[[int, int], nn.Module] = nn.Linear, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), linear(width, 2 * width), linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Attention(nn.Module):
    """A causal attention block with its norm before."""

    def __init__(self, heads: int = 4, width: int = WIDTH) -> None:
        super().__init__()
        self.heads, self.norm, self.qkv = heads, nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Lm(nn.Module):
    """Tokens, blocks and a head with cross entropy."""

    def __init__(self, blocks: Sequence[nn.Module], tie: bool = False) -> None:
        super().__init__()
        self.token, self.blocks, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList(blocks), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tie:
            self.head.weight = self.token.weight

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": F.cross_entropy(self.logits(tokens).flatten(0, 1), labels.flatten())}


def repeated(make: Callable[[], nn.Module], count: int = 3, tie: bool = False) -> Lm:
    """Returns a language model of like blocks."""
    return Lm([make() for _ in range(count)], tie)
