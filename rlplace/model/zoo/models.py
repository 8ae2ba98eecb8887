"""The models of the zoo: a perceptron, a recommender, a mixture of experts, an LSTM, a transformer, and convolutional models.

A builder takes the batch, the sequence length and the model's own options, and returns a module, whose output is a dict with
the key ``loss``, and its keyword inputs.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional


def stack(sizes: list[int]) -> nn.Sequential:
    """Stacks linear layers with ReLU between them."""
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


KAGGLE = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10, 5652, 2173, 4,
    7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
"""Categories of the 26 features of the Criteo Kaggle data set, as facebookresearch/dlrm counts them."""


class Recommender(nn.Module):
    """DLRM: one embedding table per categorical feature, a bottom perceptron, pairwise products, a top perceptron."""

    def __init__(self, rows: Sequence[int], width: int, dense: int, hidden: int, layers: int, sparse: bool) -> None:
        super().__init__()
        tables = len(rows)
        self.tables = nn.ModuleList(nn.EmbeddingBag(own, width, mode="sum", sparse=sparse) for own in rows)
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
    """Builds a perceptron."""
    return Perceptron(width, layers), {"features": random_floats(batch, width), "target": random_floats(batch, width)}


def build_dlrm(
    *, batch: int, seq: int, tables: int = 26, rows: int = 100_000, width: int = 64, dense: int = 13, hidden: int = 512,
    layers: int = 3, bag: int = 4, kaggle: bool = False, most: int = 1 << 24, sparse: bool = False,
) -> tuple[nn.Module, dict[str, Any]]:  # fmt: skip
    """Builds a recommender; `bag` categories are summed per feature.

    With `kaggle` it has the 26 tables of Criteo's data set of that name, with `most` rows at most, in place of `tables` alike;
    with `sparse` gradients of tables are.
    """
    sizes = [min(own, most) for own in (KAGGLE if kaggle else [rows] * tables)]
    ids = random_tokens(max(sizes), batch, len(sizes), bag)
    inputs = {
        "dense": random_floats(batch, dense),
        "sparse": ids % torch.tensor(sizes, device="cpu")[:, None],
        "labels": random_floats(batch).round(),
    }
    return Recommender(sizes, width, dense, hidden, layers, sparse), inputs


def build_moe_toy(
    *, batch: int, seq: int, layers: int = 4, experts: int = 8, width: int = 512, classes: int = 10
) -> tuple[nn.Module, dict[str, Any]]:
    """Builds a soft mixture of experts."""
    inputs = {"features": random_floats(batch, width), "labels": random_tokens(classes, batch)}
    return MixtureModel(width, experts, layers, classes), inputs


def random_floats(*shape: int) -> torch.Tensor:
    """Draws seeded numbers in 0..1 on the CPU, also inside a device context."""
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
    """Builds an LSTM language model."""
    return LstmLanguageModel(vocab, width, layers, dropout), {
        "tokens": random_tokens(vocab, batch, seq),
        "labels": random_tokens(vocab, batch, seq),
    }


def build_transformer(
    *, batch: int, seq: int, layers: int = 6, width: int = 512, heads: int = 8, feedforward: int = 2048, vocab: int = 32000,
    dropout: float = 0.1,
) -> tuple[nn.Module, dict[str, Any]]:  # fmt: skip
    """Builds a translation model around `nn.Transformer`."""
    model = Seq2SeqTransformer(vocab, width, heads, layers, feedforward, dropout, seq)
    return model, {name: random_tokens(vocab, batch, seq) for name in ("source", "target", "labels")}


def random_tokens(vocab: int, *shape: int) -> torch.Tensor:
    """Draws seeded token numbers on the CPU, also inside a device context."""
    return torch.randint(0, vocab, shape, generator=torch.Generator("cpu").manual_seed(0), device="cpu")


class ConvUnit(nn.Sequential):
    """Convolution, batch normalisation, ReLU in place."""

    def __init__(self, source: int, target: int, kernel: int, stride: int = 1) -> None:
        convolution = nn.Conv2d(source, target, kernel, stride, kernel // 2, bias=False)
        super().__init__(convolution, nn.BatchNorm2d(target), nn.ReLU(inplace=True))


class InceptionBlock(nn.Module):
    """Parallel branches of 0, 1, 2, ... 3x3 convolutions after a 1x1 one, and a pooled branch, concatenated."""

    def __init__(self, source: int, width: int, branches: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(ConvUnit(source, width, 1), *(ConvUnit(width, width, 3) for _ in range(depth)))
            for depth in range(branches - 1)
        )
        self.pooled = nn.Sequential(nn.AvgPool2d(3, 1, 1), ConvUnit(source, width, 1))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return torch.cat([*(branch(image) for branch in self.branches), self.pooled(image)], dim=1)


class Inception(nn.Module):
    """A stem, blocks that are pooled after every third, and a classifier."""

    def __init__(self, blocks: int, width: int, branches: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(ConvUnit(3, width, 7, 2), nn.MaxPool2d(3, 2, 1), ConvUnit(width, width * branches, 3))
        self.blocks = nn.ModuleList(InceptionBlock(width * branches, width, branches) for _ in range(blocks))
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.head = nn.Linear(width * branches, classes)

    def forward(self, image: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.stem(image)
        for index, block in enumerate(self.blocks):
            hidden = block(hidden)
            if index % 3 == 2:
                hidden = self.pool(hidden)
        logits = self.head(hidden.mean(dim=(2, 3)))
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


class SeparableUnit(nn.Sequential):
    """Depthwise and pointwise convolution, batch normalisation, ReLU."""

    def __init__(self, width: int, kernel: int) -> None:
        depthwise = nn.Conv2d(width, width, kernel, padding=kernel // 2, groups=width, bias=False)
        super().__init__(depthwise, nn.Conv2d(width, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())


class RandomCell(nn.Module):
    """A random acyclic cell: every node adds two operations on earlier nodes; unread nodes are concatenated."""

    def __init__(self, width: int, nodes: int, generator: random.Random) -> None:
        super().__init__()
        self.inputs: list[tuple[int, int]] = []
        self.operations = nn.ModuleList()
        for node in range(2, 2 + nodes):
            self.inputs.append((generator.randrange(node), generator.randrange(node)))
            self.operations.extend(_operation(width, generator) for _ in range(2))
        read = {source for pair in self.inputs for source in pair}
        self.outputs = [node for node in range(2, 2 + nodes) if node not in read]
        self.merge = ConvUnit(width * len(self.outputs), width, 1)

    def forward(self, before: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        states = [before, last]
        for index, (left, right) in enumerate(self.inputs):
            states.append(self.operations[2 * index](states[left]) + self.operations[2 * index + 1](states[right]))
        return self.merge(torch.cat([states[node] for node in self.outputs], dim=1))  # type: ignore[no-any-return]


def _operation(width: int, generator: random.Random) -> nn.Module:
    kind = generator.choice(("separable3", "separable5", "average", "maximum", "identity"))
    if kind == "average":
        return nn.AvgPool2d(3, 1, 1)
    if kind == "maximum":
        return nn.MaxPool2d(3, 1, 1)
    return nn.Identity() if kind == "identity" else SeparableUnit(width, int(kind[-1]))


class CellNet(nn.Module):
    """A stem, random cells that each read the two before them, and a classifier."""

    def __init__(self, cells: int, nodes: int, width: int, classes: int, seed: int) -> None:
        super().__init__()
        generator = random.Random(seed)
        self.stem = ConvUnit(3, width, 3, 2)
        self.cells = nn.ModuleList(RandomCell(width, nodes, generator) for _ in range(cells))
        self.head = nn.Linear(width, classes)

    def forward(self, image: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        before = last = self.stem(image)
        for cell in self.cells:
            before, last = last, cell(before, last)
        logits = self.head(last.mean(dim=(2, 3)))
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


class UNet(nn.Module):
    """An encoder, a decoder, and a skip connection between them at every scale."""

    def __init__(self, depth: int, width: int, classes: int) -> None:
        super().__init__()
        sizes = [width << level for level in range(depth + 1)]
        self.down = nn.ModuleList(
            nn.Sequential(ConvUnit(source, target, 3), ConvUnit(target, target, 3))
            for source, target in zip([3, *sizes[:-1]], sizes, strict=True)
        )
        self.expand = nn.ModuleList(nn.ConvTranspose2d(sizes[k + 1], sizes[k], 2, 2) for k in reversed(range(depth)))
        self.up = nn.ModuleList(
            nn.Sequential(ConvUnit(2 * sizes[k], sizes[k], 3), ConvUnit(sizes[k], sizes[k], 3)) for k in reversed(range(depth))
        )
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, image: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        skips = []
        hidden = image
        for level, block in enumerate(self.down):
            hidden = block(hidden if level == 0 else functional.max_pool2d(hidden, 2))
            skips.append(hidden)
        skips.pop()
        for expand, block in zip(self.expand, self.up, strict=True):
            hidden = block(torch.cat([skips.pop(), expand(hidden)], dim=1))
        logits = self.head(hidden)
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


def build_inception(
    *, batch: int, seq: int, blocks: int = 9, width: int = 64, branches: int = 4, classes: int = 1000, image: int = 224
) -> tuple[nn.Module, dict[str, Any]]:
    """Builds a CNN with branches."""
    inputs = {"image": random_floats(batch, 3, image, image), "labels": random_tokens(classes, batch)}
    return Inception(blocks, width, max(2, branches), classes), inputs


def build_nasnet(
    *, batch: int, seq: int, cells: int = 6, nodes: int = 5, width: int = 64, classes: int = 10, image: int = 64, seed: int = 0
) -> tuple[nn.Module, dict[str, Any]]:
    """Builds a CNN of random cells."""
    inputs = {"image": random_floats(batch, 3, image, image), "labels": random_tokens(classes, batch)}
    return CellNet(cells, nodes, width, classes, seed), inputs


def build_unet(
    *, batch: int, seq: int, depth: int = 4, width: int = 32, classes: int = 2, image: int = 128
) -> tuple[nn.Module, dict[str, Any]]:
    """Builds a segmentation network."""
    if image % (1 << depth):
        raise ValueError(f"image {image} is not a multiple of {1 << depth} (2 to the depth)")
    inputs = {"image": random_floats(batch, 3, image, image), "labels": random_tokens(classes, batch, image, image)}
    return UNet(depth, width, classes), inputs
