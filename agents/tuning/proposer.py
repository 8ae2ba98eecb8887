"""The agent as a proposer of plans to measure: its search in the corrected simulator, by a network that learns there.

The residual error of the corrected simulator, from measured plans: a Gaussian process over plans.

The target is log(measured / predicted), with mean zero: far from every measured plan the simulator is believed. Two plans are
the more alike the fewer groups sit on different devices: the kernel falls exponentially with that share (Hamming distance, as
in Oh et al. 2019 for categorical variables). Amplitude and length are those of the largest marginal likelihood on a small grid
(Rasmussen and Williams 2006, section 5.4.1).
"""

from __future__ import annotations

import copy
import itertools

import numpy as np
from numpy.typing import NDArray

from rlplace.agents.checkpoint import Checkpoint
from rlplace.agents.search import Search, warm_up
from rlplace.agents.tuning.belief import Belief, Pool, Value, refine
from rlplace.agents.tuning.learn import MOVES, fit_moves, price_moves
from rlplace.envs.instance import Instance, make_instance

_LEARN_EVERY = 6  # proposals
_LEARN_SHARE = 0.25  # of the calls of a proposal, saved up from one learning to the next
_FLOOR_EVERY = 6
_PARENTS = 6  # fastest plans that are crossed
_REFINE_SHARE = 0.4  # of the calls: changes of the plans that were found, judged with the residual
_STEPS = 120
_CURIOSITY = 0.5
"""Standard deviations of the residual that a plan is credited with, so that unlike plans are measured more readily."""


class AgentProposer:
    """The proposer of the module docstring.

    Attributes:
        network: The current network, a copy of the checkpoint's.
    """

    def __init__(self, checkpoint: Checkpoint, *, learn: bool = True, residual: bool = True, seed: int = 0) -> None:
        """Prepares.

        Args:
            checkpoint: An agent of Refinement-v0.
            learn: Whether the network is fine-tuned in the corrected simulator.
            residual: Whether to learn the residual error of the corrected simulator.
            seed: Seed of all random choices.
        """
        warm_up()
        self.network = copy.deepcopy(checkpoint.network)
        self._learns, self._corrects, self._seed = learn, residual, seed
        self._saved = 0

    def propose(self, belief: Belief, *, calls: int, number: int) -> NDArray[np.int32] | None:
        """See `rlplace.agents.tuning.belief.Proposer`."""
        instance = make_instance(belief.problem, floor=belief.incumbent, compute_floor=False)
        calls -= self._learn(instance, belief, calls, number) if self._learns else 0
        seed = self._seed + 1000 * number
        search = Search(instance, self.network, self._start(belief, number), seed=seed)
        search.run(calls=max(1, int(calls * (1.0 - _REFINE_SHARE))))
        pool = Pool(belief)
        begin = [belief.incumbent]
        if search.best.feasible:
            pool.add([search.best_plan])
            begin.append(search.best_plan)
        refine(pool, instance, self.network, begin, self._value(belief, number), calls=int(calls * _REFINE_SHARE), seed=seed)
        pool.fill(np.random.default_rng([self._seed, number]), 0)
        return pool.least(self._value(belief, number))

    def _start(self, belief: Belief, number: int) -> NDArray[np.int32]:
        """Plan to search from: in turn the fastest plan, crossings of fast plans, the classical plan of corrected costs."""
        if number % _FLOOR_EVERY == 0:
            return belief.floor
        if number % 2:
            return belief.incumbent
        rng = np.random.default_rng([self._seed, number, 1])
        first, second = (belief.plans[n] for n in rng.choice(np.argsort(belief.seconds)[:_PARENTS], 2))
        return np.where(rng.random(len(first)) < 0.5, first, second).astype(np.int32)

    def _learn(self, instance: Instance, belief: Belief, calls: int, number: int) -> int:
        """Fine-tunes now and then; returns what this proposal pays for it in calls."""
        share = int(_LEARN_SHARE * calls)
        self._saved += share
        if number % _LEARN_EVERY == 0 and self._saved >= MOVES:
            plans = [belief.plans[n] for n in np.argsort(belief.seconds)[:4]]
            states = max(2, self._saved // MOVES)
            lesson = price_moves(instance, plans, states=states, seed=self._seed + number)
            fit_moves(self.network, [lesson], steps=_STEPS, seed=self._seed + number)
            self._saved -= lesson.calls
        return share

    def _value(self, belief: Belief, number: int) -> Value:
        """The value to minimise by measuring: the logarithm of a guess at the step time.

        The residual is believed at every second proposal only: where it is wrong it keeps the search near what is known.
        """
        if not self._corrects or number % 2:
            return lambda plans, step_s: np.log(step_s)
        residual = Residual(belief.plans, np.log(belief.seconds / belief.fit.predicted_s), belief.noise)

        def value(plans: NDArray[np.int32], step_s: NDArray[np.float64]) -> NDArray[np.float64]:
            mean, spread = residual.at(plans)
            return np.log(step_s) + mean - _CURIOSITY * spread

        return value


_AMPLITUDES = (0.005, 0.01, 0.02, 0.04, 0.08)
_LENGTHS = (0.03, 0.1, 0.3, 1.0)


class Residual:
    """A fitted process.

    Attributes:
        amplitude: Standard deviation of the residual of a plan unlike all others.
        length: Share of differing groups over which residuals forget each other.
    """

    def __init__(self, plans: NDArray[np.int32], log_ratio: NDArray[np.float64], noise: NDArray[np.float64]) -> None:
        """Fits.

        Args:
            plans: int32 [P, G], measured plans.
            log_ratio: float64 [P], log of measured over predicted step time.
            noise: float64 [P], standard deviation of each.
        """
        self._plans = plans
        apart = _distance(plans, plans)
        best = None
        for amplitude, length in itertools.product(_AMPLITUDES, _LENGTHS):
            cover = amplitude**2 * np.exp(-apart / length) + np.diag(noise**2)
            factor = np.linalg.cholesky(cover)
            half = np.linalg.solve(factor, log_ratio)
            likelihood = -0.5 * float(half @ half) - float(np.log(np.diag(factor)).sum())
            if best is None or likelihood > best[0]:
                best = (likelihood, amplitude, length, factor, half)
        assert best is not None
        _, self.amplitude, self.length, self._factor, self._half = best

    def at(self, plans: NDArray[np.int32]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Mean and standard deviation of the log ratio of plans int32 [K, G], float64 [K] each."""
        like = self.amplitude**2 * np.exp(-_distance(self._plans, plans) / self.length)
        half = np.linalg.solve(self._factor, like)
        spread = np.sqrt(np.maximum(self.amplitude**2 - (half**2).sum(axis=0), 0.0))
        return half.T @ self._half, spread


def _distance(first: NDArray[np.int32], second: NDArray[np.int32]) -> NDArray[np.float64]:
    """float64 [A, B], share of groups that sit on different devices."""
    return np.stack([(second != plan).mean(axis=1) for plan in first])
