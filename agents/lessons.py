"""Pre-training: what policies of each environment learn from before PPO, and the descent that all of them share.

What a step reads follows from the seed and the number of the step, so that a run can stop anywhere and resume exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from torch import Tensor

from rlplace.agents import imitation, pretrain
from rlplace.agents.imitation import collect_decisions, imitation_loss
from rlplace.agents.labels import collect_labels
from rlplace.agents.policies import PLACEMENT, REFINEMENT, Policy

_TURN = 250  # steps after which a quarter of the window is replaced
_RATE = 2e-3


class Lesson(NamedTuple):
    """What is learned from the files of cases.

    Attributes:
        collect: Makes what the file of a case holds, see `rlplace.agents.gather`.
        begin: Called once before the fit.
        loss: Of a batch that it draws from some files.
        learned: What to say of files that are not fitted.
        window: Files that batches are drawn from at a time, as many as memory holds.
    """

    collect: Callable[..., Any]
    begin: Callable[[Policy, Sequence[Path]], None]
    loss: Callable[[Policy, Sequence[Path], Generator], Tensor]
    learned: Callable[[Policy, Sequence[Path]], str]
    window: int


LESSONS: Mapping[str, Lesson] = {
    REFINEMENT: Lesson(collect_labels, pretrain.set_standard, pretrain.ranking, pretrain.learned, pretrain.WINDOW),
    PLACEMENT: Lesson(collect_decisions, lambda *_: None, imitation_loss, imitation.learned, imitation.WINDOW),
}
"""By environment."""


def fit(
    network: Policy,
    optimizer: torch.optim.Optimizer,
    files: Sequence[Path],
    lesson: Lesson,
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
        lesson: What is learned from them.
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
        some = _window(files, step, seed, lesson.window)
        total += descend(network, optimizer, lesson.loss(network, some, np.random.default_rng([seed, step])))
    network.eval()
    return total / max(last - first, 1)


def descend(network: Policy, optimizer: torch.optim.Optimizer, loss: Tensor) -> float:
    """Makes one step of the optimizer, gradients clipped; returns the loss before it."""
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def _window(files: Sequence[Path], step: int, seed: int, size: int) -> list[Path]:
    """Returns the files that a step may read; a quarter of them changes every `_TURN` steps."""
    if len(files) <= size:
        return list(files)
    turn, part = step // _TURN, size // 4
    order = _order(len(files), seed)
    return [files[order[(turn * part + i) % len(files)]] for i in range(size)]


@lru_cache(maxsize=4)
def _order(count: int, seed: int) -> NDArray[np.int64]:
    return np.random.default_rng(seed).permutation(count)
