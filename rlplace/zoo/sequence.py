"""Sequence models: an LSTM stack and PyTorch's own encoder-decoder transformer, as language models."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional


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
