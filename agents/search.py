"""Refinement guided by the network: sampled rollouts and a short search around the best plan.

Both start from a complete plan and draw moves as Refinement-v0 does. Every simulator call is counted, those that only
provide the timeline for features included.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from rlplace.agents.bank import graph_tensors
from rlplace.agents.network import PlacerNetwork
from rlplace.envs.base import context_vector
from rlplace.envs.instance import Instance, make_instance
from rlplace.envs.moves import Moves, draw_runs, make_moves, propose
from rlplace.envs.observation import features, placed_state
from rlplace.envs.reward import score as environment_score
from rlplace.planners.best import warm_up as warm_up_planners
from rlplace.planners.common.evaluate import Score
from rlplace.problem.generate import random_problem
from rlplace.simulator import Simulator, simulate

_MOVES = 48  # moves drawn per decision
_TRIES = 12  # most moves simulated per decision of the search
_NOISE = 0.5  # of the Gumbel noise on logits, so that ties and near ties alternate
_HEAT = 0.0005  # a move that loses 0.05 % is made with probability 1/e when no better one was found
_PATIENCE = 3
_OVERFILL = 1.1  # the search may pass through plans that provably overfill a device this far; rollouts keep to the mask
_SEEN_BYTES = 1 << 28  # memory for plans that were simulated already


@cache
def warm_up() -> None:
    """Compiles, or loads from the cache, what floor and search run, so that time limits do not pay for it."""
    warm_up_planners()
    problem = random_problem(0, 6, 3, memory_factor=1.0, unlike=True, hosts=2)
    plan = np.arange(problem.num_groups, dtype=np.int32) % 3
    instance = make_instance(problem, floor=plan, compute_floor=False)
    timeline = simulate(problem, plan)
    state = placed_state(instance, timeline, plan)
    moves = propose(instance, timeline, plan, state.tightness, np.random.default_rng(0), _MOVES)
    features(instance, state, moves)


@dataclass(eq=False)
class Search:
    """State of a search on one instance; `run_rollout` and `run_guided` may be called in any mix.

    Attributes:
        best_plan: int32 [G], feasible as soon as a feasible plan was seen. best: its outcome.
        calls: Simulator calls so far.
    """

    instance: Instance
    network: PlacerNetwork
    rng: np.random.Generator
    max_calls: int
    deadline: float
    best_plan: NDArray[np.int32]
    best: Score = field(default_factory=lambda: Score(math.inf, 0.0))
    calls: int = 0

    def __post_init__(self) -> None:
        self._begin = time.perf_counter()
        self._seen: dict[bytes, Score] = {}
        self._simulator = Simulator(self.instance.problem, **self.instance.execution.arguments)
        with torch.no_grad():
            self._embedding = self.network.encode(graph_tensors(self.instance))
        self._evaluate(self.best_plan)

    @property
    def exhausted(self) -> bool:
        """Whether calls or time are used up."""
        return self.spent() >= 1.0

    def spent(self) -> float:
        """Share of the budget that is used up, the larger of calls and time."""
        now = time.perf_counter()
        by_time = (now - self._begin) / max(self.deadline - self._begin, 1e-9)
        return max(self.calls / max(self.max_calls, 1), by_time)

    def try_plan(self, plan: NDArray[np.int32]) -> None:
        """Simulates one complete plan."""
        self._evaluate(plan)

    def run_rollout(self, start: NDArray[np.int32], length: int, temperature: float = 1.0) -> None:
        """One episode of the policy: sample a move, apply it, keep the best plan seen. Temperature 0 is greedy."""
        plan, current = start, self._evaluate(start)
        for step in range(length):
            if self.exhausted:
                return
            moves, logits = self._decide(plan, current, 1.0 - step / length, fill=1.0)
            if len(logits) == 0:
                return
            noise = self.rng.gumbel(size=len(logits)) if temperature > 0 else 0.0
            choice = int(np.argmax(logits + temperature * noise))
            plan = moves.apply(plan, choice)
            current = self._evaluate(plan)

    def run_guided(self) -> None:
        """Simulates the most promising moves of each decision, each plan at most once.

        The first move that improves is made. Where none does, the best of them is made with a probability that falls with
        its loss; after `_PATIENCE` decisions without a new best plan, the search goes on from the best plan after a few random
        moves.
        """
        plan, score, stalled = self.best_plan, self.best, 0
        while not self.exhausted:
            before = self.best.rank
            moves, logits = self._decide(plan, score, 0.5, fill=_OVERFILL)
            current = self._value(score)
            found: tuple[float, Score, NDArray[np.int32]] | None = None
            tried = 0
            for choice in np.argsort(-(logits + _NOISE * self.rng.gumbel(size=len(logits)))):
                candidate = moves.apply(plan, int(choice))
                if candidate.tobytes() in self._seen:
                    continue
                outcome = self._evaluate(candidate)
                value = self._value(outcome)
                tried += 1
                if found is None or value < found[0]:
                    found = (value, outcome, candidate)
                if value < current - 1e-12 or tried == _TRIES or self.exhausted:
                    break
            if found is not None and (found[0] <= current or self.rng.random() < math.exp(-(found[0] - current) / _HEAT)):
                _, score, plan = found
            stalled = 0 if self.best.rank < before else stalled + 1
            if found is None or stalled > _PATIENCE:
                plan, stalled = self._kick(), 0
                score = self._evaluate(plan)

    def _kick(self) -> NDArray[np.int32]:
        """The best plan after one to three random moves."""
        plan = self.best_plan.copy()
        flat = np.ones(len(plan))
        for groups, device in draw_runs(self.instance, plan, flat, self.rng, int(self.rng.integers(1, 4))):
            plan[groups] = device
        return plan

    def _evaluate(self, plan: NDArray[np.int32]) -> Score:
        key = plan.tobytes()
        if key in self._seen:
            return self._seen[key]
        self.calls += 1
        step_time, overflow = self._simulator.evaluate(plan)
        score = Score(float(step_time), float(overflow))
        if len(self._seen) * len(key) < _SEEN_BYTES:
            self._seen[key] = score
        if score.rank < self.best.rank or self.calls == 1:
            self.best, self.best_plan = score, plan.copy()
        return score

    def _value(self, score: Score) -> float:
        """What the search descends on: log of the penalised step time over the reference, finite.

        Overflow raises it gently, so that the search can pass through plans that do not fit.
        """
        if not math.isfinite(score.step_time_s):
            return 20.0
        return math.log(max(score.penalized_s, 1e-30) / self.instance.reference_step_time_s)

    def _decide(
        self, plan: NDArray[np.int32], current: Score, left: float, *, fill: float
    ) -> tuple[Moves, NDArray[np.float64]]:
        """Moves that provably fill no device beyond `fill` times its memory, and their logits."""
        instance = self.instance
        self.calls += 1
        timeline = simulate(instance.problem, plan, **instance.execution.arguments)
        state = placed_state(instance, timeline, plan)
        moves = propose(instance, timeline, plan, state.tightness, self.rng, _MOVES)
        table = features(instance, state, moves)
        legal = np.flatnonzero(moves.exists & (table[:, 8] <= fill))
        if len(legal) == 0:
            return make_moves([], 0), np.zeros(0)
        rows = [(0.0, moves.groups[moves.ptr[k] : moves.ptr[k + 1]].tolist(), int(moves.device[k])) for k in legal]
        moves, table = make_moves(rows, len(rows)), table[legal]
        load = float(state.load_s.max()) / instance.ideal_s
        now, best = (environment_score(s.step_time_s, s.overflow, instance.reference_step_time_s) for s in (current, self.best))
        context = context_vector(instance, [left, now, best, load])
        return moves, self.network.score_one(self._embedding, table, moves.first_group, context)
