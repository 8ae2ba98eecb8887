"""The agent's search: one instance, one network, a budget of simulator calls or seconds.

A `GuidedSearch` holds the buffers of the compiled parts (`rlplace.agents.guided`) and asks the policy once between the two.
"""

from __future__ import annotations

import math
import time
from functools import cache
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from rlplace.envs.guide.draw import SHARES
from rlplace.envs.guide.guide import Guide
from rlplace.envs.instance import Instance
from rlplace.placement.common.evaluate import Score
from rlplace.placement.search import MoveMaker

if TYPE_CHECKING:
    from rlplace.agents.policies import Policy

_SEEN = 1 << 18  # plans that are remembered
_EMPTY = 50  # looks in a row that find no untried move, after which the search ends
_IDLE = 1000  # such looks in all: where all plans can be remembered, all are known then
_KICK = 3


# How the compiled loop searches: tuned on the validation split, the same for every budget, since nothing else was better by
# more than the noise.
_MOVES = 256  # drawn and ranked at a time
_NOISE = 0.3  # scale of the Gumbel noise on scores
_TRIES = 24  # moves tried before others are drawn
_STALE = 3  # moves made before the plan is looked at again
_FILL = 1.1  # plans that provably fill a device beyond this share of its memory are not tried
_HOT, _COOLING = 1e-3, 0.1  # start temperature relative to the best step time, end temperature relative to it
_PATIENCE = 8  # rounds without a new best plan before the search goes back to the best one and changes it at random


class GuidedSearch:
    """A search from a plan.

    Attributes:
        instance: The instance that is solved.
        calls: Simulator calls so far.
    """

    def __init__(
        self,
        instance: Instance,
        policy: Policy,
        start: NDArray[np.int32],
        *,
        seed: int,
    ) -> None:
        """Prepares; nothing is simulated yet.

        Args:
            instance: The instance to solve.
            policy: Ranks moves.
            start: int32 [G], the plan to start from.
            seed: Seed of all random choices.
        """
        self.instance, self._seed = instance, seed
        self._guide = Guide(instance, _MOVES, seed)
        self._moves = MoveMaker(instance.problem, seed)
        self._simulation, self._trial = self._guide.simulator.compiled
        self._plan = np.array(start, dtype=np.int32)
        self._trial[:] = self._plan
        self._best = self._plan.copy()
        self._score = np.array([math.inf, 0.0, math.inf, 0.0])
        self._counts = np.zeros(5, dtype=np.int64)
        rng = np.random.default_rng(seed)
        self._keys = rng.integers(0, 1 << 63, size=instance.allowed.shape, dtype=np.uint64)
        self._seen = np.zeros(_SEEN, dtype=np.uint64)
        self._logits = np.zeros(_MOVES, dtype=np.float32)
        self._policy = policy
        self.calls = 0

    @property
    def best_plan(self) -> NDArray[np.int32]:
        """int32 [G], the best plan so far."""
        return self._best.copy()

    @property
    def best(self) -> Score:
        """Score of the best plan; the step time is inf before the first call."""
        return Score(float(self._score[2]), float(self._score[3]))

    def run(self, *, calls: int | None = None, deadline_s: float = math.inf) -> None:
        """Searches until the calls or the time are used up, or nothing is left to try.

        Args:
            calls: Simulations to make, over which the temperature falls; None: no limit.
            deadline_s: Moment on the monotonic clock at which the search ends.
        """
        begin_s, first = time.monotonic(), self.calls
        limit = math.inf if calls is None else calls
        progress, slope = 0.0, 0.0 if calls is None else 1.0 / max(1, calls)
        few = float(np.log(self.instance.allowed.sum(axis=1)).sum()) <= math.log(_SEEN) + 1e-9
        empty = idle = 0
        while progress < 1.0 and empty < _EMPTY and not (few and idle >= _IDLE):
            used = self.calls
            tried = self._round(int(min(_TRIES + 1, limit - (self.calls - first))), progress, slope)
            empty, idle = (0, idle) if tried else (empty + 1, idle + 1)
            done = (self.calls - first) / limit
            if deadline_s != math.inf:
                done = max(done, (time.monotonic() - begin_s) / max(deadline_s - begin_s, 1e-9))
                slope = (done - progress) / max(self.calls - used, 1)
            progress = done

    def _scores(self, plan: NDArray[np.int32], count: int) -> NDArray[np.float32]:
        """Scores of the first moves of the table by the policy."""
        import torch

        from rlplace.agents.policies import AnalysedPlan, read_by

        with torch.inference_mode():
            moves = read_by(self._policy, self._guide.table[:count])
            return self._policy.scores(AnalysedPlan(self._guide, plan), moves).numpy()

    def _round(self, calls: int, progress: float, slope: float) -> int:
        """Returns one look at the plan and some tries, `calls` simulations at most; returns the tries."""
        from rlplace.agents.guided import CALLS, attempt, look

        g, counts = self._guide, self._counts
        state = (
            self._simulation, self._trial, *g.arguments, tuple(self._moves.tables), self._plan, self._best, self._score, counts,
            g.state,
        )  # fmt: skip
        before = int(counts[CALLS])
        count = int(look(*state, SHARES, g.ptr, g.groups, g.targets, g.kinds, g.table, calls))
        left, tried = min(_TRIES, calls - int(counts[CALLS]) + before), 0
        if count and left:
            self._logits[:count] = self._scores(self._plan, count)
        if left:
            tried = attempt(
                *state, self._keys, self._seen, g.ptr, g.groups, g.targets, g.table, self._logits, count, left, _NOISE, _STALE,
                _FILL, _HOT, _COOLING, _PATIENCE, progress, slope, _KICK,
            )  # fmt: skip
        self.calls += int(counts[CALLS]) - before
        return int(tried)


class _Unranked(GuidedSearch):
    """A search without a policy, which needs no torch."""

    def _scores(self, plan: NDArray[np.int32], count: int) -> NDArray[np.float32]:
        return np.zeros(count, dtype=np.float32)


@cache
def warm_up() -> None:
    """Compiles the kernels of the search, or loads them, so that time limits do not include it; needs no torch."""
    from rlplace.envs.instance import make_instance
    from rlplace.placement.annealing import warm_up as warm_up_searches
    from rlplace.problem.generate import random_problem

    warm_up_searches()
    problem = random_problem(1, 8, 3, memory_factor=1.0, unlike=True, hosts=2)
    plan = np.arange(problem.num_groups, dtype=np.int32) % 3
    instance = make_instance(problem, floor=plan, compute_floor=False)
    _Unranked(instance, cast("Policy", None), plan, seed=0).run(calls=4)
