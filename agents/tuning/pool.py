"""Candidates for the next measurement: distinct unknown plans that fit, with their simulated step times."""

from __future__ import annotations

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from rlplace.agents.tuning.belief import Belief
from rlplace.simulator import Simulator

_TRIES = 64


class Pool:
    """Plans that could be measured next.

    Attributes:
        calls: Simulations that it has made itself.
    """

    def __init__(self, belief: Belief, simulator: Simulator | None = None) -> None:
        self._belief = belief
        self._simulator = simulator or belief.simulator()
        self._plans: dict[tuple[int, ...], float] = {}
        self.calls = 0

    def __len__(self) -> int:
        return len(self._plans)

    def add(self, plans: NDArray[np.int32]) -> None:
        """Simulates plans int32 [K, G] and takes those that are unknown, complete and fit."""
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
            self.add(plan[None])

    def table(self) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
        """int32 [K, G] and float64 [K], plans and simulated step times."""
        return np.array(list(self._plans), dtype=np.int32), np.array(list(self._plans.values()))

    def fastest(self) -> NDArray[np.int32] | None:
        """The plan that is simulated to be fastest."""
        if not self._plans:
            return None
        return np.array(min(self._plans, key=self._plans.__getitem__), dtype=np.int32)
