"""Training of `rlplace.measured.residual.Residual` on measured runs, and on runs on made-up truths."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor

from rlplace.errors import InputError
from rlplace.measured.log import Run
from rlplace.measured.plan_graph import PlanGraph, ResidualNetwork, stack_rows, together
from rlplace.measured.residual import Residual

RATE, DECAY, BATCH = 3e-3, 1e-3, 48
MOST = 1.5
"""Logs of measured over predicted beyond this count as this: somebody's mistake, not the cost model's."""

NAMED = 0.5
"""Share of measured runs that a member sees with the name of their software, so that it knows of the others, too."""


def train_residual(
    measured: Sequence[Run], made_up: Sequence[Run] = (), *, members: int = 5, steps: int = 600, hidden: int = 32, seed: int = 0
) -> Residual:
    """Trains an ensemble by maximum likelihood.

    Half of every batch are runs on made-up truths, where there are any: they teach how far off a step of some kind may be.

    Args:
        measured: Runs on real devices; failed ones tell nothing and are left out.
        made_up: Runs on made-up truths, of no software.
        members: Networks of the ensemble.
        steps: Gradient steps of each.
        hidden: Width.
        seed: Of initial weights and batches.

    Raises:
        InputError: Nothing was measured.
    """
    real, other = ([run for run in runs if run.median_s is not None] for runs in (measured, made_up))
    if not real:
        raise InputError("residual: none of the runs has a step time, so there is nothing to learn from")
    stacks = tuple(sorted({name for run in real for name in run.stack}))
    sets = [_Set(runs, stacks) for runs in (real, other) if runs]
    fitted = tuple(_member(sets, len(stacks), hidden, steps, seed + number) for number in range(members))
    kinds = tuple(sorted({kind for run in real for kind in run.kinds}))
    return Residual(fitted, stacks, kinds, 1.0, max(len(run.kinds) for run in real))


class _Set:
    """Runs as tensors: graphs, software and targets."""

    def __init__(self, runs: Sequence[Run], stacks: Sequence[str]) -> None:
        self.graphs = [PlanGraph.of(run) for run in runs]
        self.stacks = stack_rows(runs, stacks)
        wrong = [math.log(float(run.median_s or 0.0) / run.predicted_s) for run in runs]
        self.wrong = torch.tensor(wrong).clamp(-MOST, MOST)

    def some(self, rng: Generator, count: int) -> tuple[list[PlanGraph], Tensor, Tensor]:
        """Drawn with replacement."""
        chosen = rng.integers(len(self.graphs), size=count)
        named = torch.from_numpy(rng.random((count, 1)) < NAMED)
        return [self.graphs[number] for number in chosen], self.stacks[chosen] * named, self.wrong[chosen]


def _member(sets: Sequence[_Set], stacks: int, hidden: int, steps: int, seed: int) -> ResidualNetwork:
    rng = np.random.default_rng(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = ResidualNetwork(stacks, hidden)
    whole = torch.stack([graph.whole for one in sets for graph in one.graphs])
    network.shift.copy_(whole.mean(dim=0))
    network.scale.copy_(whole.std(dim=0).clamp(min=0.05))
    optimizer = torch.optim.AdamW(network.parameters(), RATE, weight_decay=DECAY)
    slower = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        parts = [one.some(rng, BATCH // len(sets)) for one in sets]
        graph, of_stage = together([graph for part in parts for graph in part[0]])
        named, wrong = torch.cat([part[1] for part in parts]), torch.cat([part[2] for part in parts])
        mean, spread = network(graph, of_stage, named)
        loss = (0.5 * ((wrong - mean) / spread.exp()) ** 2 + spread).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        slower.step()
    return network.eval()
