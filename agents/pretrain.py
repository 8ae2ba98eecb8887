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
from torch import Tensor

from rlplace.agents.labels import Labels
from rlplace.agents.policies import Policy, read_by

CASES, STATES, WINDOW = 8, 8, 768
"""Cases of a batch, states of each, and files that batches are drawn from at a time."""

_SHARPNESS = 0.003  # a move that gains 0.3 % more is e times as likely in the target
_LOSS, _GAIN = 0.05, 0.1  # losses and gains beyond these count as these
_FULL = 0.02  # a state whose best move gains this much or more has full weight
_RANKS = (1, 4, 16)


def _labels(path: Path) -> Labels:
    return _read(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=WINDOW + WINDOW // 2)
def _read(path: Path, written_ns: int) -> Labels:
    return Labels.load(path)


def set_standard(network: Policy, files: Sequence[Path]) -> None:
    """Standardises features by their mean and spread over some label files."""
    rows = []
    for path in files[:64]:
        labels = _labels(path)
        rows.append(labels.features[::8][np.isfinite(labels.change[::8])].astype(np.float32))
    table = np.concatenate(rows)
    network.standardise(read_by(network, table.mean(axis=0)), read_by(network, table.std(axis=0) + 1e-2))


def learned(network: Policy, files: Sequence[Path]) -> str:
    """What a card says of files that were not fitted."""
    share = captured_gain(network, files)
    return "of the best gain " + ", ".join(f"{100 * value:.1f} % by the first {rank}" for rank, value in share.items())


def captured_gain(network: Policy, files: Sequence[Path]) -> dict[int, float]:
    """Returns share of the best move's gain that the best of the 1, 4 and 16 highest scored moves has, over all states with a
    gain.
    """
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


def ranking(network: Policy, files: Sequence[Path], rng: Generator) -> Tensor:
    """Returns the loss of a batch that is drawn from some files."""
    chosen = [_labels(files[i]) for i in rng.choice(len(files), min(CASES, len(files)), replace=False)]
    rows = [rng.choice(len(labels.change), min(STATES, len(labels.change)), replace=False) for labels in chosen]
    features = np.concatenate([labels.features[row] for labels, row in zip(chosen, rows, strict=True)])
    change = np.concatenate([labels.change[row] for labels, row in zip(chosen, rows, strict=True)])
    return ranking_loss(network.scores(None, read_by(network, features)), torch.from_numpy(change))


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
