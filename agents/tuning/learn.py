"""A network learns from moves that are priced around given plans: the step that all fine-tuning shares.

Labels straight from a log of timings, without believing the simulator's times.

The log of a plan's measured step time is modelled as a sum over groups of what each costs on its device: Bayesian linear
regression on one-hot plans, so what no plan has tried has coefficient zero. A move's label is the sum of the differences of its
groups. That is crude (a step is a maximum of paths, not a sum), but it needs nothing but the log, so it also learns what the
cost model has no word for. Labels reach only as far as the log: moves to where no measured plan has a group get none.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from torch import Tensor

from rlplace.agents.labels import Rows, labelled, walk
from rlplace.agents.network import PlacerNetwork
from rlplace.envs.guide.guide import Guide
from rlplace.envs.instance import Instance
from rlplace.errors import InputError

_BATCH = 16
MOVES = 96
"""Moves that are priced from each plan."""
_RATE = 3e-4


@dataclass(frozen=True, eq=False)
class Lesson:
    """Priced moves of one instance.

    Attributes:
        rows: (features, change, group) of each state, see `rlplace.agents.labels.walk`.
        embed: float32 [G, H], what the graph adds to the network; None without message passing. It is not fine-tuned.
        calls: Simulations that it took.
    """

    rows: Rows
    embed: Tensor | None
    calls: int


def price_moves(
    network: PlacerNetwork,
    instance: Instance,
    plans: Sequence[NDArray[np.int32]],
    *,
    states: int | None = None,
    deadline_s: float = float("inf"),
    seed: int = 0,
) -> Lesson:
    """Prices moves along descents from some plans.

    Args:
        network: Whose graph part describes the groups.
        instance: The problem.
        plans: Where descents begin, in turn.
        states: States in all; None: until the deadline.
        deadline_s: On the monotonic clock.
        seed: Seed of the moves and of the descents.
    """
    from rlplace.envs.guide.guide import Guide

    guide, rng = Guide(instance, MOVES, seed), np.random.default_rng(seed)
    rows: Rows = []
    turn = 0
    while time.monotonic() < deadline_s and (states is None or len(rows) < states) and turn < 10_000:
        walked = walk(guide, plans[turn % len(plans)], 6 if states is None else min(6, states - len(rows)), rng)
        turn += 1
        if not walked and turn >= len(plans) and not rows:
            break
        rows += walked
    return lesson_of(network, instance, rows, guide.simulator.calls)


def lesson_of(network: PlacerNetwork, instance: Instance, rows: Rows, calls: int = 0) -> Lesson:
    """Labelled moves of an instance as a lesson for a network."""
    return Lesson(rows, graph_part(network, instance), calls)


def graph_part(network: PlacerNetwork, instance: Instance) -> Tensor | None:
    """float32 [G, H], what the graph adds to the network; None without message passing."""
    from rlplace.agents.network import graph_tensors

    if not network.config.layers:
        return None
    with torch.no_grad():
        return network.encode(graph_tensors(instance))


def fit_moves(
    network: PlacerNetwork,
    lessons: Sequence[Lesson],
    *,
    rehearsed: Sequence[Lesson] = (),
    steps: int,
    deadline_s: float = float("inf"),
    seed: int = 0,
    rate: float = _RATE,
    keep: float = 0.0,
) -> float:
    """Fits the network to priced moves; returns the mean loss of the last quarter of the steps.

    Args:
        network: Changed.
        lessons: Each batch is drawn from one of them.
        rehearsed: Half of the batches are drawn from one of these, if there are any.
        steps: Steps of Adam.
        deadline_s: On the monotonic clock.
        seed: Seed that batches are drawn by.
        rate: Learning rate.
        keep: Weight of the squared distance to the weights at the start, which keeps old skills (L2-SP; Li et al. 2018).
    """
    from rlplace.agents.pretrain import descend, ranking_loss

    new, old = _tables(lessons), _tables(rehearsed)
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
        embed, features, change, group = source[int(rng.integers(len(source)))]
        chosen = torch.from_numpy(rng.choice(len(features), min(_BATCH, len(features)), replace=False))
        of_group = None if embed is None else embed[group[chosen].long().clamp(min=0)]
        loss = ranking_loss(network.scores(features[chosen].float(), of_group)[0], change[chosen])
        if source is new:
            losses.append(loss.item())
        if keep:
            moved = sum(((now - then) ** 2).sum() for now, then in zip(network.parameters(), start, strict=True))
            loss = loss + keep * moved
        descend(network, optimizer, loss)
    network.eval()
    return float(np.mean(losses[-max(1, len(losses) // 4) :])) if losses else float("nan")


def _tables(lessons: Sequence[Lesson]) -> list[tuple[Tensor | None, Tensor, Tensor, Tensor]]:
    """(embed, features, change, group) of every lesson that has something to rank."""
    tables = []
    for lesson in lessons:
        if len(lesson.rows) >= 2:
            features, change, group = (torch.from_numpy(np.stack(column)) for column in zip(*lesson.rows, strict=True))
            tables.append((lesson.embed, features, change, group))
    return tables


_SPREAD = 0.3
"""Prior standard deviation of what a group costs on a device, relative to an even share of all groups."""

_NOISE = 0.03
_LEAST = 8


class LogModel:
    """What each group costs on each device, in log step time.

    Attributes:
        cost: float64 [G, D].
        seen: bool [G, D], whether a measured plan has the group there.
    """

    def __init__(self, plans: NDArray[np.int32], seconds: NDArray[np.float64], devices: int) -> None:
        """Fits.

        Args:
            plans: int32 [P, G].
            seconds: float64 [P], measured.
            devices: D.

        Raises:
            InputError: Too few plans to learn anything.
        """
        if len(plans) < _LEAST:
            raise InputError(
                f"finetune: {len(plans)} plans with times are too few to learn from directly; measure at least {_LEAST}"
            )
        count, groups = plans.shape
        one_hot = np.zeros((count, groups * devices))
        one_hot[np.arange(count)[:, None], np.arange(groups)[None] * devices + plans] = 1.0
        centre = one_hot.mean(axis=0)
        table, target = one_hot - centre, np.log(seconds) - np.log(seconds).mean()
        cover = _SPREAD**2 / np.sqrt(groups) * table @ table.T + _NOISE**2 * np.eye(count)
        self.cost = (_SPREAD**2 / np.sqrt(groups) * table.T @ np.linalg.solve(cover, target)).reshape(groups, devices)
        self.seen = one_hot.any(axis=0).reshape(groups, devices)

    def change(self, plan: NDArray[np.int32], groups: NDArray[np.int32], targets: NDArray[np.int32]) -> float:
        """Change of the log step time by a move; NaN where it leaves what was measured."""
        if not self.seen[groups, targets].all():
            return float("nan")
        return float((self.cost[groups, targets] - self.cost[groups, plan[groups]]).sum())


def log_rows(
    instance: Instance, plans: NDArray[np.int32], seconds: NDArray[np.float64], *, states: int, rng: Generator
) -> Rows:
    """Labelled moves at measured plans, in the form of `rlplace.agents.labels.walk`.

    Args:
        instance: Gives the features; its timeline is simulated.
        plans: int32 [P, G].
        seconds: float64 [P].
        states: Plans that moves are drawn from, each several times if there are fewer.
        rng: Draws the order of the plans.
    """
    model = LogModel(plans, seconds, instance.problem.num_devices)
    guide = Guide(instance, MOVES, int(rng.integers(1 << 30)))
    rows: Rows = []
    order = np.concatenate([rng.permutation(len(plans)) for _ in range(-(-states // len(plans)))])[:states]
    for number in order:
        plan = plans[number]
        if guide.look(plan)[0] == np.inf:  # it cannot complete in the simulator
            continue
        count = guide.draw(plan)
        change = np.array([model.change(plan, *guide.move(k)) for k in range(count)])
        known = np.flatnonzero(np.isfinite(change))
        if len(known) >= 2:
            rows.append(labelled(guide, known, known, change[known]))
    return rows
