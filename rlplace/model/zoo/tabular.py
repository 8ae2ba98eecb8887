"""Dense models: a perceptron, a recommender with embedding tables, and a small mixture of experts."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional


def stack(sizes: list[int]) -> nn.Sequential:
    """Linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for source, target in pairwise(sizes):
        layers += [nn.Linear(source, target), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Perceptron(nn.Module):
    """Linear layers with ReLU and a mean squared error."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = stack([width] * (layers + 1))

    def forward(self, features: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": functional.mse_loss(self.layers(features), target)}


class Recommender(nn.Module):
    """DLRM: one embedding table per categorical feature, a bottom perceptron, pairwise products, a top perceptron."""

    def __init__(self, tables: int, rows: int, width: int, dense: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.bottom = stack([dense, *[hidden] * (layers - 1), width])
        pairs = (tables + 1) * tables // 2
        self.top = stack([pairs + width, *[hidden] * (layers - 1), 1])
        self.register_buffer("pairs", torch.tril_indices(tables + 1, tables + 1, -1), persistent=False)

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        bottom = self.bottom(dense)
        columns = [table(sparse[:, index]) for index, table in enumerate(self.tables)]
        features = torch.stack([bottom, *columns], dim=1)
        products = torch.bmm(features, features.transpose(1, 2))
        assert isinstance(self.pairs, torch.Tensor)
        interactions = products[:, self.pairs[0], self.pairs[1]]
        logits = self.top(torch.cat([bottom, interactions], dim=1)).squeeze(1)
        return {"loss": functional.binary_cross_entropy_with_logits(logits, labels), "logits": logits}


class SoftMixture(nn.Module):
    """A mixture of experts in which every expert sees every sample and a gate weighs their answers: parallel branches."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(stack([width, 4 * width, width]) for _ in range(experts))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weights = self.gate(hidden).softmax(dim=-1)
        total = hidden
        for index, expert in enumerate(self.experts):
            total = total + weights[:, index : index + 1] * expert(hidden)
        return total


class MixtureModel(nn.Module):
    """Layers of `SoftMixture` and a classifier."""

    def __init__(self, width: int, experts: int, layers: int, classes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SoftMixture(width, experts) for _ in range(layers))
        self.head = nn.Linear(width, classes)

    def forward(self, features: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            features = layer(features)
        logits = self.head(features)
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


def build_mlp(*, batch: int, seq: int, layers: int = 8, width: int = 1024) -> tuple[nn.Module, dict[str, Any]]:
    """Perceptron."""
    return Perceptron(width, layers), {"features": random_floats(batch, width), "target": random_floats(batch, width)}


def build_dlrm(
    *, batch: int, seq: int, tables: int = 26, rows: int = 100_000, width: int = 64, dense: int = 13, hidden: int = 512,
    layers: int = 3, bag: int = 4,
) -> tuple[nn.Module, dict[str, Any]]:  # fmt: skip
    """Recommender; `bag` categories are summed per feature."""
    inputs = {
        "dense": random_floats(batch, dense),
        "sparse": random_tokens(rows, batch, tables, bag),
        "labels": random_floats(batch).round(),
    }
    return Recommender(tables, rows, width, dense, hidden, layers), inputs


def build_moe_toy(
    *, batch: int, seq: int, layers: int = 4, experts: int = 8, width: int = 512, classes: int = 10
) -> tuple[nn.Module, dict[str, Any]]:
    """Soft mixture of experts."""
    inputs = {"features": random_floats(batch, width), "labels": random_tokens(classes, batch)}
    return MixtureModel(width, experts, layers, classes), inputs


def random_floats(*shape: int) -> torch.Tensor:
    """Seeded numbers in 0..1 on the CPU, also inside a device context."""
    return torch.rand(shape, generator=torch.Generator("cpu").manual_seed(0), device="cpu")


class LstmLanguageModel(nn.Module):
    """Embedding, a stack of `nn.LSTM` layers with residual connections, and a vocabulary head."""

    def __init__(self, vocab: int, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(layers))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = hidden + self.dropout(layer(hidden)[0])
        logits = self.head(hidden)
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Seq2SeqTransformer(nn.Module):
    """`nn.Transformer` between two embeddings and a vocabulary head."""

    def __init__(self, vocab: int, width: int, heads: int, layers: int, feedforward: int, dropout: float, length: int) -> None:
        super().__init__()
        self.source = nn.Embedding(vocab, width)
        self.target = nn.Embedding(vocab, width)
        self.position = nn.Embedding(length, width)
        self.transformer = nn.Transformer(width, heads, layers, layers, feedforward, dropout, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, source: torch.Tensor, target: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        length = target.shape[1]
        position = self.position(torch.arange(length, device=target.device))
        mask = torch.full((length, length), float("-inf"), dtype=position.dtype, device=target.device).triu(1)
        hidden = self.transformer(
            self.source(source) + position, self.target(target) + position, tgt_mask=mask, tgt_is_causal=True
        )
        logits = self.head(hidden)
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def build_lstm(
    *, batch: int, seq: int, layers: int = 4, width: int = 1024, vocab: int = 32000, dropout: float = 0.1
) -> tuple[nn.Module, dict[str, Any]]:
    """LSTM language model."""
    return LstmLanguageModel(vocab, width, layers, dropout), {
        "tokens": random_tokens(vocab, batch, seq),
        "labels": random_tokens(vocab, batch, seq),
    }


def build_transformer(
    *, batch: int, seq: int, layers: int = 6, width: int = 512, heads: int = 8, feedforward: int = 2048, vocab: int = 32000,
    dropout: float = 0.1,
) -> tuple[nn.Module, dict[str, Any]]:  # fmt: skip
    """Translation model around `nn.Transformer`."""
    model = Seq2SeqTransformer(vocab, width, heads, layers, feedforward, dropout, seq)
    return model, {name: random_tokens(vocab, batch, seq) for name in ("source", "target", "labels")}


def random_tokens(vocab: int, *shape: int) -> torch.Tensor:
    """Seeded token numbers on the CPU, also inside a device context."""
    return torch.randint(0, vocab, shape, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
