"""The agent proposes what to measure: its search in the corrected simulator, by a network that learns there meanwhile."""

from __future__ import annotations

import copy

import numpy as np
from numpy.typing import NDArray

from rlplace.agents.checkpoint import Checkpoint
from rlplace.agents.search import Search, warm_up
from rlplace.agents.tuning.belief import Belief
from rlplace.agents.tuning.learn import MOVES, fit_moves, price_moves
from rlplace.agents.tuning.pool import Pool, Value, refine
from rlplace.agents.tuning.residual import Residual
from rlplace.envs.instance import Instance, make_instance

_LEARN_EVERY = 6  # proposals
_LEARN_SHARE = 0.25  # of the calls of a proposal, saved up from one learning to the next
_FLOOR_EVERY = 6
_PARENTS = 6  # fastest plans that are crossed
_REFINE_SHARE = 0.4  # of the calls: changes of the plans that were found, judged with the residual
_STEPS = 120
_CURIOSITY = 0.5
"""How many standard deviations of the residual a plan is forgiven: unlike plans are measured a little more readily."""


class AgentProposer:
    """See the module.

    Attributes:
        network: As it is by now; a copy of the checkpoint's.
    """

    def __init__(self, checkpoint: Checkpoint, *, learn: bool = True, residual: bool = True, seed: int = 0) -> None:
        """Prepares.

        Args:
            checkpoint: An agent of Refinement-v0.
            learn: Whether the network is fine-tuned in the corrected simulator.
            residual: Whether to learn what the corrected simulator gets wrong.
            seed: Seed of everything random.
        """
        warm_up()
        self.network = copy.deepcopy(checkpoint.network)
        self._learns, self._corrects, self._seed = learn, residual, seed
        self._saved = 0

    def propose(self, belief: Belief, *, calls: int, number: int) -> NDArray[np.int32] | None:
        """See `rlplace.agents.tuning.belief.Proposer`."""
        instance = make_instance(belief.problem, floor=belief.incumbent, compute_floor=False, execution=belief.execution)
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
        """Where to search from: in turn the fastest plan, crossings of fast plans, the classical plan of corrected costs."""
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
            lesson = price_moves(self.network, instance, plans, states=states, seed=self._seed + number)
            fit_moves(self.network, [lesson], steps=_STEPS, seed=self._seed + number)
            self._saved -= lesson.calls
        return share

    def _value(self, belief: Belief, number: int) -> Value:
        """What is least where a measurement pays most: the logarithm of a guess at the step time.

        The residual is believed at every second proposal only: where it is wrong it keeps the search near what is known.
        """
        if not self._corrects or number % 2:
            return lambda plans, step_s: np.log(step_s)
        residual = Residual(belief.plans, np.log(belief.seconds / belief.fit.predicted_s), belief.noise)

        def value(plans: NDArray[np.int32], step_s: NDArray[np.float64]) -> NDArray[np.float64]:
            mean, spread = residual.at(plans)
            guess: NDArray[np.float64] = np.log(step_s) + mean - _CURIOSITY * spread
            return guess

        return value
