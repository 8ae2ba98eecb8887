"""Pre-training: the scorer learns from priced moves which of them gain.

Per state the target is a softmax of the gains of all moves, and the loss the cross-entropy of the scorer's softmax to it.
States where no move gains weigh nothing: there is nothing to rank. Label files are read through a bounded cache, and what a
step reads follows from the seed and the number of the step, so that a run can stop anywhere and resume exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from torch import Tensor

from rlplace.agents.labels import Labels
from rlplace.agents.policies import Policy, read_by

CASES, STATES = 8, 8
"""Cases of a batch, and states of each."""

_SHARPNESS = 0.003  # a move that gains 0.3 % more is e times as likely in the target
_LOSS, _GAIN = 0.05, 0.1  # losses and gains beyond these count as these
_FULL = 0.02  # a state whose best move gains this much or more has full weight
_WINDOW = 768  # files that batches are drawn from at a time
_TURN = 250  # steps after which a quarter of the window is replaced
_RATE = 2e-3
_RANKS = (1, 4, 16)


def _labels(path: Path) -> Labels:
    return _read(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=_WINDOW + _WINDOW // 2)
def _read(path: Path, written_ns: int) -> Labels:
    return Labels.load(path)


def fit(
    network: Policy,
    optimizer: torch.optim.Optimizer,
    files: Sequence[Path],
    *,
    first: int,
    last: int,
    steps: int,
    seed: int,
) -> float:
    """Makes the steps `first` to `last` of `steps`; returns the mean loss.

    Args:
        network: The policy, changed in place.
        optimizer: Optimizer of its parameters; the number of the step sets its learning rate.
        files: Label files.
        first: Number of the first step to make.
        last: Number after the last one.
        steps: Steps of the whole fit; the learning rate falls linearly to zero at the last one.
        seed: Seed of the batches.
    """
    network.train()
    total = 0.0
    for step in range(first, last):
        for group in optimizer.param_groups:
            group["lr"] = _RATE * (1.0 - step / steps) + 1e-5
        features, change = _batch(network, _window(files, step, seed), np.random.default_rng([seed, step]))
        total += descend(network, optimizer, ranking_loss(network.scores(None, features), change))
    network.eval()
    return total / max(last - first, 1)


def set_standard(network: Policy, files: Sequence[Path]) -> None:
    """Standardises features by their mean and spread over some label files."""
    rows = []
    for path in files[:64]:
        labels = _labels(path)
        rows.append(labels.features[::8][np.isfinite(labels.change[::8])].astype(np.float32))
    table = np.concatenate(rows)
    network.standardise(read_by(network, table.mean(axis=0)), read_by(network, table.std(axis=0) + 1e-2))


def captured_gain(network: Policy, files: Sequence[Path]) -> dict[int, float]:
    """Share of the best move's gain that the best of the 1, 4 and 16 highest scored moves has, over all states with a gain."""
    captured, best = np.zeros(len(_RANKS)), 0.0
    for path in files:
        labels = _labels(path)
        with torch.no_grad():
            logits = network.scores(None, read_by(network, labels.features)).numpy()
        gain = np.clip(np.where(np.isfinite(labels.change), -labels.change, -1.0), -1.0, _GAIN)
        logits[~np.isfinite(labels.change)] = -np.inf
        ranked = np.take_along_axis(gain, np.argsort(-logits, axis=1), axis=1)
        best += gain.max(axis=1).clip(min=0.0).sum()
        captured += [ranked[:, :rank].max(axis=1).clip(min=0.0).sum() for rank in _RANKS]
    return {rank: float(share) for rank, share in zip(_RANKS, captured / max(best, 1e-12), strict=True)}


def descend(network: Policy, optimizer: torch.optim.Optimizer, loss: Tensor) -> float:
    """Makes one step of the optimizer, gradients clipped; returns the loss before it."""
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def _window(files: Sequence[Path], step: int, seed: int) -> list[Path]:
    """The files that a step may read; a quarter of them changes every `_TURN` steps."""
    if len(files) <= _WINDOW:
        return list(files)
    turn, part = step // _TURN, _WINDOW // 4
    order = _order(len(files), seed)
    return [files[order[(turn * part + i) % len(files)]] for i in range(_WINDOW)]


@lru_cache(maxsize=4)
def _order(count: int, seed: int) -> NDArray[np.int64]:
    return np.random.default_rng(seed).permutation(count)


def _batch(network: Policy, files: Sequence[Path], rng: Generator) -> tuple[Tensor, Tensor]:
    chosen = [_labels(files[i]) for i in rng.choice(len(files), min(CASES, len(files)), replace=False)]
    rows = [rng.choice(len(labels.change), min(STATES, len(labels.change)), replace=False) for labels in chosen]
    features = np.concatenate([labels.features[row] for labels, row in zip(chosen, rows, strict=True)])
    change = np.concatenate([labels.change[row] for labels, row in zip(chosen, rows, strict=True)])
    return read_by(network, features), torch.from_numpy(change)


def ranking_loss(logits: Tensor, change: Tensor) -> Tensor:
    """Cross-entropy of a softmax of logits to one of gains, less the entropy of the latter, weighted by the best gain.

    Args:
        logits: float32 [S, K], scores of the moves.
        change: float32 [S, K], NaN where there is no move; see `Labels`.
    """
    exists = torch.isfinite(change)
    gain = torch.where(exists, -change, -_LOSS).clamp(-_LOSS, _GAIN)
    target = torch.where(exists, gain / _SHARPNESS, -torch.inf).softmax(1)
    log_probability = torch.where(exists, logits, -1e9).log_softmax(1)
    apart = target * (torch.log(target.clamp(min=1e-12)) - torch.where(exists, log_probability, 0.0))
    weight = (gain.max(1).values.clamp(0.0, _FULL) / _FULL).sqrt()
    return (weight * apart.sum(1)).sum() / weight.sum().clamp(min=1e-6)
