"""Candidates for the next measurement: distinct unknown plans that fit, with their simulated step times."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray

from rlplace.agents.network import PlacerNetwork
from rlplace.agents.tuning.belief import Belief
from rlplace.agents.tuning.learn import graph_part
from rlplace.envs.guide.guide import Guide
from rlplace.envs.instance import Instance

Value = Callable[[NDArray[np.int32], NDArray[np.float64]], NDArray[np.float64]]
"""float64 [K] of plans int32 [K, G] and their simulated step times float64 [K]; small is good."""

_TRIES = 64
_DRAWN, _TRIED = 128, 24  # moves that are drawn from a plan, and those of them that are simulated


class Pool:
    """Plans that could be measured next.

    Attributes:
        calls: Simulations that it has made itself.
    """

    def __init__(self, belief: Belief) -> None:
        self._belief = belief
        self._simulator = belief.simulator()
        self._plans: dict[tuple[int, ...], float] = {}
        self.calls = 0

    def __len__(self) -> int:
        return len(self._plans)

    def add(self, plans: Iterable[NDArray[np.int32]]) -> None:
        """Simulates plans int32 [G] and takes those that are unknown, complete and fit."""
        fresh = [plan for plan in plans if (key := tuple(plan.tolist())) not in self._belief.known and key not in self._plans]
        if not fresh:
            return
        table = np.ascontiguousarray(np.stack(fresh), dtype=np.int32)
        step, overflow = self._simulator.evaluate_many(table)
        self.calls += len(table)
        for plan, step_s, over in zip(table, step.tolist(), overflow.tolist(), strict=True):
            if np.isfinite(step_s) and over == 0.0:
                self._plans[tuple(plan.tolist())] = step_s

    def fill(self, rng: Generator, calls: int) -> None:
        """Adds random neighbours of the best plans: at least one, so that there is something to measure."""
        belief = self._belief
        allowed = belief.problem.group_allowed
        order = np.argsort(belief.seconds)[:4]
        done = self.calls + calls
        for _ in range(_TRIES):
            if self._plans and self.calls >= done:
                return
            plan = belief.plans[rng.choice(order)].copy()
            for group in rng.choice(len(plan), min(len(plan), int(rng.integers(1, 4))), replace=False):
                plan[group] = rng.choice(np.flatnonzero(allowed[group]))
            self.add([plan])

    def table(self) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
        """int32 [K, G] and float64 [K], plans and simulated step times."""
        return np.array(list(self._plans), dtype=np.int32), np.array(list(self._plans.values()))

    def least(self, value: Value) -> NDArray[np.int32] | None:
        """The plan whose value is least; None when there is none."""
        if not self._plans:
            return None
        plans, step_s = self.table()
        return plans[int(value(plans, step_s).argmin())]


def refine(
    pool: Pool,
    instance: Instance,
    network: PlacerNetwork,
    begin: Sequence[NDArray[np.int32]],
    value: Value,
    *,
    calls: int,
    seed: int,
) -> None:
    """Adds plans that are better by a value which the compiled search does not know: best-first, over the network's moves.

    Args:
        pool: Filled.
        instance: The corrected problem.
        network: Chooses the moves from a plan that are simulated.
        begin: Plans to change first.
        value: What is to become small.
        calls: Simulations that it may cost.
        seed: Seed that moves are drawn by.
    """
    guide, done = Guide(instance, _DRAWN, seed), pool.calls + calls
    embed = graph_part(network, instance)
    open_plans = [np.asarray(plan, dtype=np.int32) for plan in begin]
    seen: set[tuple[int, ...]] = set()
    while pool.calls + _TRIED <= done:
        if not open_plans:
            plans, step_s = pool.table()
            order = [n for n in np.argsort(value(plans, step_s)) if tuple(plans[n].tolist()) not in seen] if len(pool) else []
            if not order:
                return
            open_plans = [plans[order[0]]]
        plan = open_plans.pop(0)
        seen.add(tuple(plan.tolist()))
        done -= 1
        if guide.look(plan)[0] == np.inf:
            continue
        count = guide.draw(plan)
        first = torch.from_numpy(guide.groups[guide.ptr[:count]].astype(np.int64))
        with torch.no_grad():
            logits = network.scores(torch.from_numpy(guide.table[None, :count]), None if embed is None else embed[first][None])[
                0
            ][0]
        pool.add([guide.moved(plan, k) for k in np.argsort(-logits.numpy())[:_TRIED]])
