"""A network learns from moves that are priced around given plans: the step that all fine-tuning shares."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlplace.agents.labels import Rows, walk
from rlplace.agents.policies import Policy, read_by
from rlplace.envs.guide.guide import Guide
from rlplace.envs.instance import Instance

_BATCH = 16
MOVES = 96
"""Moves that are priced from each plan."""
_RATE = 3e-4


@dataclass(frozen=True, eq=False)
class Lesson:
    """Priced moves of one instance.

    Attributes:
        rows: (features, change) of each state, see `rlplace.agents.labels.walk`.
        calls: Number of simulations that it took.
    """

    rows: Rows
    calls: int


def price_moves(
    instance: Instance,
    plans: Sequence[NDArray[np.int32]],
    *,
    states: int | None = None,
    deadline_s: float = float("inf"),
    seed: int = 0,
) -> Lesson:
    """Prices moves along descents from some plans.

    Args:
        instance: The problem.
        plans: Plans at which descents begin, in turn.
        states: Number of states in all; None: until the deadline.
        deadline_s: Moment on the monotonic clock at which this ends.
        seed: Seed of the moves and of the descents.
    """
    guide, rng = Guide(instance, MOVES, seed), np.random.default_rng(seed)
    rows: Rows = []
    turn = 0
    while time.monotonic() < deadline_s and (states is None or len(rows) < states) and turn < 10_000:
        walked = walk(guide, plans[turn % len(plans)], 6 if states is None else min(6, states - len(rows)), rng)
        turn += 1
        if not walked and turn >= len(plans) and not rows:
            break
        rows += walked
    return Lesson(rows, guide.simulator.calls)


def fit_moves(
    network: Policy,
    lessons: Sequence[Lesson],
    *,
    rehearsed: Sequence[Lesson] = (),
    steps: int,
    deadline_s: float = float("inf"),
    seed: int = 0,
    rate: float = _RATE,
    keep: float = 0.0,
) -> float:
    """Fits a policy to priced moves; returns the mean loss of the last quarter of the steps.

    Args:
        network: The policy, changed in place.
        lessons: Each batch is drawn from one of them.
        rehearsed: Half of the batches are drawn from one of these, if there are any.
        steps: Steps of Adam.
        deadline_s: Moment on the monotonic clock at which this ends.
        seed: Seed of the batches.
        rate: Learning rate.
        keep: Weight of the squared distance to the weights at the start, which keeps old skills (L2-SP; Li et al. 2018).
    """
    from rlplace.agents.pretrain import descend, ranking_loss

    new, old = _tables(lessons, network), _tables(rehearsed, network)
    if not new:
        return float("nan")
    rng = np.random.default_rng([seed, 7])
    start = [parameter.detach().clone() for parameter in network.parameters()]
    optimizer = torch.optim.Adam(network.parameters(), lr=rate)
    losses = []
    network.train()
    for step in range(steps):
        if time.monotonic() > deadline_s:
            break
        source = old if old and step % 2 else new
        features, change = source[int(rng.integers(len(source)))]
        chosen = torch.from_numpy(rng.choice(len(features), min(_BATCH, len(features)), replace=False))
        loss = ranking_loss(network.scores(None, features[chosen]), change[chosen])
        if source is new:
            losses.append(loss.item())
        if keep:
            moved = sum(((now - then) ** 2).sum() for now, then in zip(network.parameters(), start, strict=True))
            loss = loss + keep * moved
        descend(network, optimizer, loss)
    network.eval()
    return float(np.mean(losses[-max(1, len(losses) // 4) :])) if losses else float("nan")


def _tables(lessons: Sequence[Lesson], network: Policy) -> list[tuple[Tensor, Tensor]]:
    """(features, change) of every lesson that has something to rank."""
    tables = [zip(*lesson.rows, strict=True) for lesson in lessons if len(lesson.rows) >= 2]
    return [(read_by(network, np.stack(features)), torch.from_numpy(np.stack(change))) for features, change in tables]
