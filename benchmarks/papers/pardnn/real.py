"""The paper's five models as PyTorch modules, unrolled in time as it does; layers, widths and lengths are those of its table.

What the paper does not print is from the models' own papers: Word-RNN (Zaremba et al., arXiv 1409.2329), Char-CRN (Kim et al.,
arXiv 1508.06615), WRN (Zagoruyko and Komodakis, arXiv 1605.07146), TRN (Vaswani et al., arXiv 1706.03762) and E3D (Wang et al.,
"Eidetic 3D LSTM", ICLR 2019, on clips of two frames).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class Cell(nn.Module):
    """An LSTM cell of one product, op by op."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gates = nn.Linear(width + hidden, 4 * hidden)

    def forward(self, x: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
        taken, new, kept, given = self.gates(torch.cat([x, hidden], -1)).chunk(4, -1)
        cell = cell * torch.sigmoid(kept + 1.0) + torch.sigmoid(taken) * torch.tanh(new)
        return torch.tanh(cell) * torch.sigmoid(given), cell


class Recurrent(nn.Module):
    """LSTM layers over a list of steps, and the loss of the next word at each."""

    def __init__(self, width: int, hidden: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.layers = nn.ModuleList(Cell(width if number == 0 else hidden, hidden) for number in range(layers))
        self.head = nn.Linear(hidden, vocabulary)

    def loss(self, steps: list[Tensor], target: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = cell = steps[0].new_zeros(steps[0].shape[0], self.hidden)
            made = []
            for x in steps:
                hidden, cell = layer(x, hidden, cell)
                made.append(hidden)
            steps = made
        logits = self.head(torch.stack(steps, 1))
        return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


class WordRnn(Recurrent):
    """A word language model."""

    def __init__(self, hidden: int = 2048, layers: int = 8, vocabulary: int = 17_000) -> None:
        super().__init__(hidden, hidden, layers, vocabulary)
        self.embed = nn.Embedding(vocabulary, hidden)

    def forward(self, words: Tensor) -> Tensor:
        return self.loss(list(self.embed(words).unbind(1)), words)


class CharCrn(Recurrent):
    """Convolutions over the characters of every word, a highway layer, LSTM layers."""

    FILTERS = ((1, 32), (2, 32), (3, 64), (4, 128), (5, 256), (6, 512), (7, 1024))

    def __init__(self, hidden: int = 2048, layers: int = 8, characters: int = 100, embedding: int = 15) -> None:
        width = sum(count for _, count in self.FILTERS)
        super().__init__(width, hidden, layers, 10_000)
        self.embed = nn.Embedding(characters, embedding)
        self.filters = nn.ModuleList(nn.Conv1d(embedding, count, kernel) for kernel, count in self.FILTERS)
        self.carry, self.change = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, letters: Tensor, target: Tensor) -> Tensor:
        steps = []
        for word in letters.unbind(1):
            x = self.embed(word).transpose(1, 2)
            x = torch.cat([torch.tanh(one(x)).amax(-1) for one in self.filters], -1)
            kept = torch.sigmoid(self.carry(x))
            steps.append(kept * x + (1 - kept) * torch.relu(self.change(x)))
        return self.loss(steps, target)


class Unit(nn.Module):
    """A residual unit with its norms before its products."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.BatchNorm2d(before), nn.BatchNorm2d(after)])
        self.first = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.short = nn.Conv2d(before, after, 1, stride, bias=False) if before != after else None

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norms[0](x))
        short = x if self.short is None else self.short(y)
        return short + self.second(torch.relu(self.norms[1](self.first(y))))


class Wrn(nn.Module):
    """A wide residual network of 6 x `units` + 4 layers on images of 32 x 32."""

    def __init__(self, units: int = 101, widening: int = 14, classes: int = 100) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        made, before = [], 16
        for stage, base in enumerate((16, 32, 64)):
            for unit in range(units):
                made.append(Unit(before, base * widening, 2 if stage and not unit else 1))
                before = base * widening
        self.units, self.norm, self.head = nn.ModuleList(made), nn.BatchNorm2d(before), nn.Linear(before, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.stem(images)
        for unit in self.units:
            x = unit(x)
        return functional.cross_entropy(self.head(torch.relu(self.norm(x)).mean((2, 3))), labels)


class Layer(nn.Module):
    """An encoder layer, or a decoder layer that also reads a memory; attention op by op."""

    def __init__(self, model: int, inner: int, heads: int, decoder: bool) -> None:
        super().__init__()
        self.heads, self.count = heads, 2 if decoder else 1
        self.products = nn.ModuleList(nn.Linear(model, model) for _ in range(4 * self.count))
        self.norms = nn.ModuleList(nn.LayerNorm(model) for _ in range(self.count + 1))
        self.wide, self.narrow = nn.Linear(model, inner), nn.Linear(inner, model)
        self.drop = nn.Dropout(0.1)

    def attend(self, number: int, x: Tensor, memory: Tensor) -> Tensor:
        query, key, value, out = self.products[4 * number : 4 * number + 4]
        q, k, v = (
            one(t).unflatten(-1, (self.heads, -1)).transpose(1, 2) for one, t in ((query, x), (key, memory), (value, memory))
        )
        weights = self.drop(torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, -1))
        return out((weights @ v).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        x = self.norms[0](x + self.drop(self.attend(0, x, x)))
        if memory is not None:
            x = self.norms[1](x + self.drop(self.attend(1, x, memory)))
        return self.norms[-1](x + self.drop(self.narrow(torch.relu(self.wide(x)))))


class Trn(nn.Module):
    """A transformer that translates, half of its layers on either side."""

    def __init__(self, layers: int = 52, model: int = 2048, inner: int = 4098, heads: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(10_000, model)
        half = layers // 2
        self.encoder = nn.ModuleList(Layer(model, inner, heads, False) for _ in range(half))
        self.decoder = nn.ModuleList(Layer(model, inner, heads, True) for _ in range(layers - half))
        self.head = nn.Linear(model, 10_000)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, y = self.embed(source), self.embed(target)
        for layer in self.encoder:
            memory = layer(memory)
        for layer in self.decoder:
            y = layer(y, memory)
        return functional.cross_entropy(self.head(y).flatten(0, 1), target.flatten())


class EideticCell(nn.Module):
    """An E3D-LSTM cell: convolutions over short clips, and attention over the cells of all steps before."""

    def __init__(self, before: int, hidden: int, kernel: int) -> None:
        super().__init__()

        def convolve(channels: int, out: int, size: int = kernel) -> nn.Conv3d:
            return nn.Conv3d(channels, out, size, padding=size // 2)

        self.of_input, self.of_hidden = convolve(before, 7 * hidden), convolve(hidden, 4 * hidden)
        self.of_memory, self.of_cell = convolve(hidden, 4 * hidden), convolve(hidden, hidden)
        self.norm, self.last = nn.GroupNorm(1, hidden), convolve(2 * hidden, hidden, 1)

    def forward(self, x: Tensor, hidden: Tensor, cells: list[Tensor], memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        xr, xi, xg, yi, yg, yf, xo = self.of_input(x).chunk(7, 1)
        hr, hi, hg, ho = self.of_hidden(hidden).chunk(4, 1)
        mi, mg, mf, mo = self.of_memory(memory).chunk(4, 1)
        recall = torch.sigmoid(xr + hr).flatten(1)
        past = torch.stack([cell.flatten(1) for cell in cells], 1)
        weights = torch.softmax((past * recall[:, None]).sum(-1), -1)
        remembered = (weights[..., None] * past).sum(1).view_as(hidden)
        cell = torch.sigmoid(xi + hi) * torch.tanh(xg + hg) + self.norm(cells[-1] + remembered)
        memory = torch.sigmoid(yi + mi) * torch.tanh(yg + mg) + torch.sigmoid(yf + mf) * memory
        out = torch.sigmoid(xo + ho + mo + self.of_cell(cell))
        return out * torch.tanh(self.last(torch.cat([cell, memory], 1))), cell, memory


class E3d(nn.Module):
    """Four recurrent layers that predict the next frame of clips of two, nine steps on and back."""

    def __init__(self, hidden: int = 320, layers: int = 4, kernel: int = 5, channels: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(EideticCell(hidden if number else channels, hidden, kernel) for number in range(layers))
        self.head = nn.Conv3d(hidden, channels, 1)

    def forward(self, frames: Tensor) -> Tensor:
        clips = [frames[:, :, step : step + 2] for step in range(frames.shape[2] - 2)]
        first = self.layers[0].of_hidden
        shape = (frames.shape[0], first.in_channels, *clips[0].shape[2:])
        hidden = [frames.new_zeros(shape) for _ in self.layers]
        cells, memory, losses = [[h] for h in hidden], hidden[0], []
        for step, clip in enumerate(clips):
            x = clip
            for number, layer in enumerate(self.layers):
                hidden[number], cell, memory = layer(x, hidden[number], cells[number], memory)
                cells[number].append(cell)
                x = hidden[number]
            losses.append(functional.mse_loss(self.head(x)[:, :, -1], frames[:, :, step + 2]))
        return torch.stack(losses).mean()


Made = tuple[nn.Module, tuple[Tensor, ...]]


def _words(batch: int, steps: int, *more: int) -> Tensor:
    return torch.zeros(batch, steps, *more, dtype=torch.long)


@dataclass(frozen=True)
class PaperModel:
    """A model, and what the paper says of it.

    Attributes:
        make: Module and inputs of a batch, on the meta device; the second takes the paper's larger variant.
        nodes: Its TensorFlow graph's nodes, of both variants.
        parameters: Likewise, in billions.
        parallelism, communication: DoP and CCR of the first.
        batch: The smallest batch of its runs.
        over_cp: Its speed-ups over the critical-path baseline on 2, 4 and 8 GPUs.
    """

    make: Callable[[int, bool], Made]
    nodes: tuple[int, int]
    parameters: tuple[float, float]
    parallelism: float
    communication: float
    batch: int
    over_cp: tuple[float, float, float]


def _word_rnn(batch: int, larger: bool) -> Made:
    return WordRnn(layers=32 if larger else 8), (_words(batch, 25 if larger else 28),)


def _char_crn(batch: int, larger: bool) -> Made:
    return CharCrn(layers=32 if larger else 8), (_words(batch, 28, 50), _words(batch, 28))


def _wrn(batch: int, larger: bool) -> Made:
    module = Wrn(50, 28) if larger else Wrn(101, 14)
    return module, (torch.zeros(batch, 3, 32, 32), torch.zeros(batch, dtype=torch.long))


def _trn(batch: int, larger: bool) -> Made:
    return Trn(48, inner=8192) if larger else Trn(52), (_words(batch, 32), _words(batch, 32))


def _e3d(batch: int, larger: bool) -> Made:
    patch = 8 if larger else 4
    frames = torch.zeros(batch, patch * patch, 20, 64 // patch, 64 // patch)
    return E3d(512 if larger else 320, channels=patch * patch), (frames,)


MODELS: dict[str, PaperModel] = {
    "Word-RNN": PaperModel(_word_rnn, (10_578, 39_074), (0.34, 1.18), 10.45, 14.5, 16, (1.4, 1.4, 1.6)),
    "Char-CRN": PaperModel(_char_crn, (22_748, 86_663), (0.23, 1.09), 49.0, 57.0, 8, (1.3, 1.7, 1.9)),
    "WRN": PaperModel(_wrn, (187_742, 79_742), (1.91, 3.77), 1.16, 13.02, 1, (2.2, 1.7, 1.5)),
    "TRN": PaperModel(_trn, (204_792, 160_518), (1.99, 5.1), 2.0, 13.7, 1, (3.4, 7.0, 5.3)),
    "E3D": PaperModel(_e3d, (55_756, 55_756), (0.95, 2.4), 3.3, 1.12, 1, (1.1, 1.3, 1.5)),
}


def make(name: str, batch: int | None = None, *, larger: bool = False) -> tuple[nn.Module, tuple[Tensor, ...], Any]:
    """Returns module, inputs and loss (the module's own)."""
    with torch.device("meta"):
        return *MODELS[name].make(batch or MODELS[name].batch, larger), None
