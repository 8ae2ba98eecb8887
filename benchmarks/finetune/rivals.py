"""What the fine-tuned agent is compared with: proposers with the same first trials, calibration and simulator calls.

* `random`: the best of so many random plans by the corrected simulator.
* `annealing`: annealing in the corrected simulator, from the best plan measured.
* `bayes`: Bayesian optimisation. A Gaussian process over plans (the kernel of `rlplace.agents.tuning.proposer`) learns what the
  corrected simulator gets wrong; what it expects to improve on the best plan most (expected improvement; Jones et al. 1998) is
  measured. Candidates are random changes of the best plans, which are then improved move by move.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from scipy.stats import norm

from rlplace.agents.tuning.belief import Belief, Pool, Proposer, Value
from rlplace.agents.tuning.proposer import Residual
from rlplace.errors import InfeasibleError
from rlplace.planners import get_planner
from rlplace.planners.random_plans import candidates
from rlplace.simulator import Simulator

FASTEST: Value = lambda plans, step_s: step_s  # noqa: E731
FLOOR_EVERY = 6
"""Proposals after which annealing and Bayesian optimisation begin at the best classical plan of the corrected problem, as the
agent does; otherwise at the fastest plans measured."""


class RandomProposer:
    """See the module."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def propose(self, belief: Belief, *, calls: int, number: int) -> NDArray[np.int32] | None:
        pool = Pool(belief)
        pool.add(candidates(belief.problem, self._seed + 1000 * number, samples=calls))
        pool.fill(np.random.default_rng([self._seed, number]), 0)
        return pool.least(FASTEST)


class AnnealingProposer:
    """See the module."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def propose(self, belief: Belief, *, calls: int, number: int) -> NDArray[np.int32] | None:
        pool, rng = Pool(belief), np.random.default_rng([self._seed, number])
        keep = calls // 10  # for neighbours, where annealing finds a plan that is known
        try:
            start = belief.floor if number % FLOOR_EVERY == 0 else belief.incumbent
            seed = self._seed + 1000 * number
            found = get_planner("annealing")(belief.problem, start=start, calls=calls - keep, seed=seed)
        except InfeasibleError:
            pass
        else:
            pool.add([found.device_of_group])
        if not len(pool):
            pool.fill(rng, keep)
        return pool.least(FASTEST)


class InTurn:
    """Several proposers, one after the other."""

    def __init__(self, proposers: Sequence[Proposer]) -> None:
        self._proposers = proposers

    def propose(self, belief: Belief, *, calls: int, number: int) -> NDArray[np.int32] | None:
        """See `rlplace.agents.tuning.belief.Proposer`."""
        count = len(self._proposers)
        return self._proposers[number % count].propose(belief, calls=calls, number=number // count)


class BayesProposer:
    """See the module."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def propose(self, belief: Belief, *, calls: int, number: int) -> NDArray[np.int32] | None:
        rng = np.random.default_rng([self._seed, number])
        residual = Residual(belief.plans, np.log(belief.seconds / belief.fit.predicted_s), belief.noise)
        simulator = Simulator(belief.problem)
        best = float(np.log(belief.seconds[belief.best]))

        def improvement(plans: NDArray[np.int32]) -> NDArray[np.float64]:
            """Expected improvement in log step time; below zero for plans that are known or do not fit."""
            step, overflow = simulator.evaluate_many(np.ascontiguousarray(plans))
            mean, spread = residual.at(plans)
            ahead = best - np.log(np.maximum(step, 1e-12)) - mean
            spread = np.maximum(spread, 1e-4)
            value = ahead * norm.cdf(ahead / spread) + spread * norm.pdf(ahead / spread)
            known = np.array([tuple(plan.tolist()) in belief.known for plan in plans])
            return np.where(known | ~np.isfinite(step) | (overflow > 0), -1.0, np.maximum(value, 1e-12 * np.exp(ahead)))

        found, values = np.zeros((0, belief.problem.num_groups), dtype=np.int32), np.zeros(0)
        batch, used = 128, 0
        while used < calls:
            size = min(batch, calls - used)
            known = belief.plans[np.argsort(belief.seconds)[: 2 if len(found) else 8]]
            floor = belief.floor[None] if number % FLOOR_EVERY == 0 else known[:0]
            parents = np.concatenate([found, known, floor])
            made = _changed(belief, parents, size, rng)
            used += size
            found, values = np.concatenate([found, made]), np.concatenate([values, improvement(made)])
            keep = np.argsort(-values, kind="stable")[:16]
            found, values = found[keep], values[keep]
        if not len(values) or values[0] < 0:
            pool = Pool(belief)
            pool.fill(rng, 0)
            return pool.least(FASTEST)
        return found[0]


def _changed(belief: Belief, parents: NDArray[np.int32], count: int, rng: Generator) -> NDArray[np.int32]:
    """Random changes of plans: one to four groups, or a crossing of two plans."""
    allowed = belief.problem.group_allowed
    rows = []
    for _ in range(count):
        plan = parents[rng.integers(len(parents))].copy()
        if len(parents) > 1 and rng.random() < 0.2:
            other = parents[rng.integers(len(parents))]
            mask = rng.random(len(plan)) < 0.5
            plan[mask] = other[mask]
        for group in rng.choice(len(plan), min(len(plan), int(rng.integers(1, 5))), replace=False):
            plan[group] = rng.choice(np.flatnonzero(allowed[group]))
        rows.append(plan)
    return np.array(rows, dtype=np.int32)
