"""Recurrent nets, scans and alignments."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.trials.parts import VOCABULARY, Made, repeated, text


class _Recurrent(nn.Module):
    """A recurrent layer of torch between an embedding and a head."""

    def __init__(self, kind: type[nn.RNNBase], **options: bool) -> None:
        super().__init__()
        self.token, self.body = nn.Embedding(VOCABULARY, 16), kind(16, 16, num_layers=2, batch_first=True, **options)
        self.head = nn.Linear(32 if self.body.bidirectional else 16, VOCABULARY)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": F.cross_entropy(self.head(self.body(self.token(tokens))[0]).flatten(0, 1), labels.flatten())}


def rnn(batch: int = 8) -> Made:
    return _Recurrent(nn.RNN), text(batch, 8)


def lstm_both_ways(batch: int = 8) -> Made:
    return _Recurrent(nn.LSTM, bidirectional=True), text(batch, 8)


def gru(batch: int = 8) -> Made:
    return _Recurrent(nn.GRU), text(batch, 8)


class _Cells(nn.Module):
    """A cell called for every position; what it says is read again."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.cell, self.head = nn.Embedding(VOCABULARY, 16), nn.LSTMCell(32, 16), nn.Linear(16, VOCABULARY)
        self.start = nn.Parameter(torch.zeros(16))

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.token(tokens)
        h = c = self.start.expand(len(x), -1)
        losses = []
        for t in range(x.shape[1]):
            h, c = self.cell(torch.cat([x[:, t], h], 1), (h, c))
            losses.append(F.cross_entropy(self.head(h), labels[:, t]))
        return {"loss": torch.stack(losses).mean()}


def lstm_cell_in_a_loop(batch: int = 8) -> Made:
    return _Cells(), text(batch, 6)


class _Packed(nn.Module):
    """Lengths that are inputs; sequences are packed."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.GRU(4, 16, batch_first=True), nn.Linear(16, 1)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return F.mse_loss(self.head(self.body(packed)[1][0])[:, 0], y)


def packed_sequences(batch: int = 8) -> Made:
    return _Packed(), {"x": torch.randn(batch, 7, 4), "lengths": torch.randint(2, 8, (batch,)), "y": torch.randn(batch)}


class _Scan(nn.Module):
    """A selective state space in a loop over time."""

    def __init__(self, width: int = 32, states: int = 4) -> None:
        super().__init__()
        self.norm, self.inside, self.out = nn.RMSNorm(width), nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.conv, self.bc = nn.Conv1d(width, width, 3, groups=width, padding=2), nn.Linear(width, 2 * states)
        self.dt = nn.Linear(width, width)
        self.a_log = nn.Parameter(torch.arange(1.0, states + 1).log().repeat(width, 1))
        self.skip = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        u, gate = self.inside(self.norm(x)).chunk(2, -1)
        u = F.silu(self.conv(u.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        (b, c), dt, a = self.bc(u).chunk(2, -1), F.softplus(self.dt(u)), -self.a_log.exp()
        h, ys = torch.zeros(*u[:, 0].shape, a.shape[1], device=x.device), []
        for t in range(x.shape[1]):
            h = h * (dt[:, t, :, None] * a).exp() + (dt[:, t] * u[:, t])[..., None] * b[:, t, None]
            ys.append((h * c[:, t, None]).sum(-1))
        return x + self.out((torch.stack(ys, 1) + u * self.skip) * F.silu(gate))


def state_space_scan(batch: int = 8) -> Made:
    return repeated(_Scan, 2), text(batch, 5)


class _Speech(nn.Module):
    """CTC: a mean over samples of the loss of each over its length."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Conv1d(5, 16, 3, padding=1), nn.ReLU()), nn.Linear(16, 6)

    def forward(self, sound: torch.Tensor, target: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.body(sound).transpose(1, 2)).log_softmax(-1).transpose(0, 1)
        heard = torch.full((len(sound),), logits.shape[0], dtype=torch.long)
        return F.ctc_loss(logits, target, heard, lengths, zero_infinity=True)


def ctc(batch: int = 8) -> Made:
    inputs = {"sound": torch.randn(batch, 5, 14), "target": torch.randint(1, 6, (batch, 5))}
    return _Speech(), inputs | {"lengths": torch.randint(1, 6, (batch,))}


class _Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCABULARY, 16), nn.Embedding(VOCABULARY, 16)
        self.encoder, self.decoder = nn.GRU(16, 16, batch_first=True, bidirectional=True), nn.GRU(16, 16, batch_first=True)
        self.key, self.out = nn.Linear(32, 16), nn.Linear(32, VOCABULARY)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        memory = self.key(self.encoder(self.source(source))[0])
        query, _ = self.decoder(self.target(target[:, :-1]), memory.mean(1)[None])
        read = (query @ memory.transpose(1, 2)).softmax(-1) @ memory
        return {"loss": F.cross_entropy(self.out(torch.cat([query, read], -1)).flatten(0, 1), target[:, 1:].flatten())}


def translator(batch: int = 8) -> Made:
    return _Translator(), {name: torch.randint(0, VOCABULARY, (batch, n)) for name, n in (("source", 7), ("target", 6))}


class _TimeFirst(nn.Module):
    """Samples are the second dimension, as recurrent layers have it by default."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.LSTM(4, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.head(self.body(x[:-1])[0]), x[1:])


def samples_in_the_second_dimension() -> Made:
    return _TimeFirst(), {"x": torch.randn(6, 8, 4)}
