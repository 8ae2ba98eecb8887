"""Transformers as people write them."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.trials.parts import VOCABULARY, WIDTH, Attention, Feed, Lm, Made, repeated, text


def pre_norm(batch: int = 8) -> Made:
    return repeated(lambda: nn.Sequential(Attention(), Feed())), text(batch)


def tied_embeddings(batch: int = 8) -> Made:
    return repeated(lambda: nn.Sequential(Attention(), Feed()), tie=True), text(batch)


class _PostNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, WIDTH))
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x + self.attention(x, x, x, need_weights=False)[0])
        return self.second(x + self.feed(x))


def post_norm(batch: int = 8) -> Made:
    return repeated(_PostNorm), text(batch)


class _Grouped(nn.Module):
    """Rotary positions, fewer heads of keys than of queries, gated feed-forward."""

    def __init__(self, heads: int = 4, groups: int = 2) -> None:
        super().__init__()
        self.heads, self.groups, size = heads, groups, WIDTH // heads
        self.q, self.kv = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 2 * groups * size, bias=False)
        self.o, self.norm, self.norm2 = nn.Linear(WIDTH, WIDTH, bias=False), nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.gate, self.up, self.down = (nn.Linear(a, b, bias=False) for a, b in ((WIDTH, 48), (WIDTH, 48), (48, WIDTH)))
        self.register_buffer("rates", 100.0 ** (-torch.arange(0, size, 2) / size), persistent=False)

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        angle = torch.outer(torch.arange(x.shape[1], device=x.device), self.rates)[None, :, None]
        a, b = x.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        q, kv = self.q(h).unflatten(-1, (self.heads, -1)), self.kv(h).unflatten(-1, (2, self.groups, -1))
        k = self._rotate(kv[:, :, 0]).repeat_interleave(self.heads // self.groups, 2)
        v = kv[:, :, 1].repeat_interleave(self.heads // self.groups, 2)
        y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (self._rotate(q), k, v)), is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def rope_grouped_queries(batch: int = 8) -> Made:
    return repeated(_Grouped), text(batch)


class _Alibi(Attention):
    """Scores fall with distance; the mask is built on the first call and kept in an attribute."""

    bias: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = x.shape[1]
        if self.bias is None or self.bias.shape[-1] != n:
            distance = torch.arange(n)[None] - torch.arange(n)[:, None]
            slopes = 2.0 ** -torch.arange(1, self.heads + 1)
            self.bias = (distance[None] * slopes[:, None, None]).masked_fill(distance > 0, -math.inf)
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + self.bias
        return x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def alibi_with_kept_mask(batch: int = 8) -> Made:
    return repeated(_Alibi), text(batch)


def one_block_called_thrice(batch: int = 8) -> Made:
    block = nn.Sequential(Attention(), Feed())
    return Lm([block, block, block]), text(batch)


class _Lora(nn.Module):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.base, self.a = nn.Linear(inside, outside), nn.Parameter(torch.randn(4, inside) / 8)
        self.b = nn.Parameter(torch.zeros(outside, 4))
        self.base.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + 2.0 * (x @ self.a.T @ self.b.T)


def lora(batch: int = 8) -> Made:
    model = repeated(lambda: Feed(_Lora))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith((".a", ".b")))
    return model, text(batch)


class _Padded(nn.Module):
    """nn.TransformerEncoder with a padding mask and a learned class token."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.token = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.first, self.position = nn.Parameter(torch.randn(1, 1, WIDTH)), nn.Parameter(torch.randn(1, 13, WIDTH))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, tokens: torch.Tensor, label: torch.Tensor) -> dict[str, torch.Tensor]:
        x = torch.cat([self.first.expand(len(tokens), -1, -1), self.token(tokens)], 1) + self.position
        pad = F.pad(tokens == 0, (1, 0))
        return {"loss": F.cross_entropy(self.head(self.encoder(x, src_key_padding_mask=pad)[:, 0]), label)}


def encoder_with_padding(batch: int = 8) -> Made:
    tokens = torch.randint(1, VOCABULARY, (batch, 12))
    tokens[torch.arange(12) >= torch.randint(4, 13, (batch, 1))] = 0
    return _Padded(), {"tokens": tokens, "label": torch.randint(0, 5, (batch,))}


class _EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.body = nn.Transformer(WIDTH, 4, 2, 2, 64, dropout=0.0, batch_first=True)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1] - 1)
        y = self.body(self.token(source), self.token(target[:, :-1]), tgt_mask=mask, tgt_is_causal=True)
        return {"loss": F.cross_entropy(self.head(y).flatten(0, 1), target[:, 1:].flatten())}


def encoder_decoder(batch: int = 8) -> Made:
    return _EncoderDecoder(), {name: torch.randint(0, VOCABULARY, (batch, n)) for name, n in (("source", 12), ("target", 9))}


class _Latents(nn.Module):
    """Learned queries that attend to the input, then to themselves; the loss is outside."""

    def __init__(self) -> None:
        super().__init__()
        self.latents, self.read = nn.Parameter(torch.randn(4, WIDTH)), nn.Linear(6, WIDTH)
        self.cross = nn.ModuleList(nn.MultiheadAttention(WIDTH, 2, batch_first=True) for _ in range(2))
        self.own = nn.ModuleList(Feed() for _ in range(2))
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, z = self.read(x), self.latents.expand(len(x), -1, -1)
        for cross, own in zip(self.cross, self.own, strict=True):
            z = own(z + cross(z, h, h)[0])
        return self.out(z.mean(1))


def cross_attention_latents(batch: int = 8) -> tuple[nn.Module, object, object]:
    return _Latents(), (torch.randn(batch, 20, 6),), lambda output: (output - 1).square().mean()


class _Exits(Lm):
    """A loss at every block, through the same head."""

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x, losses = self.token(tokens), []
        for block in self.blocks:
            x = block(x)
            losses.append(F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten()))
        return {"loss": sum(losses[1:], losses[0]) / len(losses)}


def loss_at_every_block(batch: int = 8) -> Made:
    return _Exits([nn.Sequential(Attention(), Feed()) for _ in range(3)]), text(batch)
