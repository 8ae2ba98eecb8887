"""Convolutional models with branches: Inception-style blocks, random cells as in NASNet, and a U-Net."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from rlplace.model.zoo.tabular import random_floats, random_tokens


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


class Cell(nn.Module):
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
        self.cells = nn.ModuleList(Cell(width, nodes, generator) for _ in range(cells))
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
    """Branchy CNN."""
    inputs = {"image": random_floats(batch, 3, image, image), "labels": random_tokens(classes, batch)}
    return Inception(blocks, width, max(2, branches), classes), inputs


def build_nasnet(
    *, batch: int, seq: int, cells: int = 6, nodes: int = 5, width: int = 64, classes: int = 10, image: int = 64, seed: int = 0
) -> tuple[nn.Module, dict[str, Any]]:
    """CNN of random cells."""
    inputs = {"image": random_floats(batch, 3, image, image), "labels": random_tokens(classes, batch)}
    return CellNet(cells, nodes, width, classes, seed), inputs


def build_unet(
    *, batch: int, seq: int, depth: int = 4, width: int = 32, classes: int = 2, image: int = 128
) -> tuple[nn.Module, dict[str, Any]]:
    """Segmentation network."""
    if image % (1 << depth):
        raise ValueError(f"image {image} is not a multiple of {1 << depth} (2 to the depth)")
    inputs = {"image": random_floats(batch, 3, image, image), "labels": random_tokens(classes, batch, image, image)}
    return UNet(depth, width, classes), inputs
