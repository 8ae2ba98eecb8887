"""The guided search: annealing with moves ranked by a policy; one instance, one policy, a budget of simulator calls or seconds.

From the current plan, moves are drawn and their features computed (`draw_ranked`), the policy scores them, and they are tried
in the order of score plus noise, no plan twice (`attempt`). A plan that is better is kept, a worse one with a probability that
falls with its loss and with the spent budget. Timelines come from simulations that are needed anyway, so only tried plans cost
calls. All but the policy is compiled.
"""

# Compiled functions take their types from their arguments.
# mypy: disable-error-code="no-untyped-def, assignment, operator"
from __future__ import annotations

import math
import time
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from rlplace.budget import Budget
from rlplace.compiled import entry, inner, stamp_of
from rlplace.envs.guide import analysis, draw, features, records
from rlplace.envs.guide.analysis import analyse
from rlplace.envs.guide.draw import draw_moves
from rlplace.envs.guide.features import COLUMN, move_features
from rlplace.envs.guide.guide import Guide
from rlplace.envs.guide.records import MoveSet
from rlplace.envs.instance import PlacementInstance
from rlplace.placement.common import evaluate as objective
from rlplace.placement.common import movekernels
from rlplace.placement.common.evaluate import Score, descent_s, objective_s
from rlplace.placement.common.movekernels import Tables, draw_move, draw_uniform
from rlplace.placement.search import MoveMaker
from rlplace.simulator import records as r
from rlplace.simulator.fast import STAMP, simulate_plans

if TYPE_CHECKING:
    from rlplace.agents.policies import Policy

_SEEN = 1 << 18  # plans that are remembered
_EMPTY = 50  # rounds in a row that find no untried move, after which the search ends
_IDLE = 1000  # such rounds in all: where all plans can be remembered, all are known then

# How the compiled loop searches: tuned on the validation split, the same for every budget, since nothing else was better by
# more than the noise.
_MOVES = 256  # drawn and ranked at a time
_NOISE = 0.3  # scale of the Gumbel noise on scores
_TRIES = 24  # moves tried before others are drawn
_STALE = 3  # accepted moves before the plan is analysed again
_FILL = 1.1  # plans that provably fill a device beyond this share of its memory are not tried
_HOT, _COOLING = 1e-3, 0.1  # start temperature relative to the best step time, end temperature relative to it
_PATIENCE = 8  # rounds without a new best plan after which the search returns to the best one and changes it at random
_KICK = 3  # largest number of random moves of such a change

# Entries of `SearchState.score` and of `SearchState.counts`; FRESH tells whether the view is that of the current plan.
STEP, OVERFLOW, BEST_STEP, BEST_OVERFLOW = range(4)
CALLS, LOOKS, TAKEN, STALLED, FRESH = range(5)


class SearchState(NamedTuple):
    """Buffers of a search. G groups, D devices, K moves, F features."""

    simulation: Any  # arguments of `fast.simulate_plans`, which simulates `trial` and keeps a timeline
    trial: Any  # int32 [G], equal to `plan` between calls
    facts: Any  # `AnalysisTables` as a plain tuple
    analysed: Any  # `View` as a plain tuple
    tables: Any  # `Tables` as a plain tuple, for random moves
    plan: Any  # int32 [G], the current plan
    best: Any  # int32 [G], the best plan
    score: Any  # float64 [4], see STEP to BEST_OVERFLOW
    counts: Any  # int64 [5], see CALLS to FRESH
    random: Any  # uint64 [1], state of the random numbers
    keys: Any  # uint64 [G, D], random, one for each group on each device: a plan is hashed by their XOR
    seen: Any  # uint64 [2^n], hashes of tried plans
    moves: Any  # `MoveSet` as a plain tuple
    table: Any  # float32 [K, F], features of the moves
    logits: Any  # float32 [K], scores of the moves


_objective_s, _descent_s = inner(objective_s), inner(descent_s)


@inner
def _known(seen, key):
    """Returns whether a key is in the table of seen plans; adds it, unless the table is full there."""
    if key == 0:
        key = np.uint64(1)
    mask = np.uint64(len(seen) - 1)
    at = key & mask
    for _ in range(16):
        if seen[at] == key:
            return True
        if seen[at] == 0:
            seen[at] = key
            return False
        at = (at + np.uint64(1)) & mask
    seen[at] = key
    return False


@inner
def _room(plan):
    """Returns buffers for the groups and targets of one move."""
    return np.zeros(max(len(plan), 8), dtype=np.int32), np.zeros(max(len(plan), 8), dtype=np.int32)


@inner
def _simulate(s):
    """Simulates `trial`."""
    graph, work, ranks, position, rows, results = s.simulation
    return simulate_plans(graph, work, ranks, position, rows, results)


@inner
def _keep_best(s, step_s, overflow):
    """Keeps `trial`, which has just been simulated, where it is the best plan so far; returns whether it is."""
    better = _objective_s(step_s, overflow) < _objective_s(s.score[BEST_STEP], s.score[BEST_OVERFLOW])
    if better:
        s.best[:] = s.trial
        s.score[BEST_STEP], s.score[BEST_OVERFLOW] = step_s, overflow
    return better


@inner
def _analyse(s, step_s, overflow):
    """Analyses the plan, which was simulated last."""
    w, peak = r.Work(*s.simulation[1]), s.simulation[5][2]
    step = w.time_s[0], w.time_s[1], w.transfer[: w.layout[r.TRANSFERS]], peak[0], step_s, overflow
    analyse(s.facts, s.analysed, s.plan, step)
    s.counts[LOOKS] += 1


def _compile(stamp):
    @entry
    def draw_ranked(search, calls):
        """Simulates and analyses the plan where that was not done, draws moves and computes their features.

        A plan that cannot complete is changed by random moves until it can.

        Args:
            search: `SearchState` as a plain tuple, changed.
            calls: Simulations to make at most; after them no move is drawn.

        Returns:
            Number of the moves.
        """
        _ = stamp
        s = SearchState(*search)
        t, plan, counts, used = Tables(*s.tables), s.plan, s.counts, 0
        while counts[FRESH] == 0:
            if used == calls:
                return 0
            step_s, overflow = _simulate(s)
            used += 1
            counts[CALLS] += 1
            s.score[STEP], s.score[OVERFLOW] = step_s, overflow
            _keep_best(s, step_s, overflow)
            if step_s == np.inf:  # a link is missing
                groups, targets = _room(plan)
                for i in range(draw_move(t, s.random, plan, groups, targets)):
                    plan[groups[i]] = s.trial[groups[i]] = targets[i]
                continue
            counts[FRESH] = 1
            _analyse(s, step_s, overflow)
        count = draw_moves(s.facts, s.analysed, plan, s.random, s.moves)
        move_features(s.facts, s.analysed, plan, s.moves, count, s.trial, s.table)
        return count

    @entry
    def attempt(search, count, calls, progress, slope):
        """Tries moves in the order of their logits; returns how many were tried.

        Args:
            search: `SearchState` as a plain tuple, changed.
            count: Number of moves.
            calls: Moves to try at most.
            progress: Share of the budget that is spent.
            slope: Increase of `progress` with every simulation.
        """
        _ = stamp
        s = SearchState(*search)
        t, m = Tables(*s.tables), MoveSet(*s.moves)
        plan, trial, score, counts, random, keys, logits = s.plan, s.trial, s.score, s.counts, s.random, s.keys, s.logits
        own_groups, own_targets = _room(plan)
        key = np.uint64(0)
        for g in range(len(plan)):
            key ^= keys[g, plan[g]]
        _known(s.seen, key)
        for k in range(count):
            if s.table[k, COLUMN.pinned_target] > _FILL:
                logits[k] = -1e30
            else:
                logits[k] -= _NOISE * np.log(-np.log(draw_uniform(random) * (1.0 - 2e-16) + 1e-16))
        order = np.argsort(-logits[:count])
        tried, accepted, at, improved = 0, 0, 0, False
        while tried < calls:
            if at >= count or logits[order[at]] < -1e29:
                break
            k = order[at]
            at += 1
            size, moved_key = 0, key
            for i in range(m.ptr[k], m.ptr[k + 1]):
                g, d = m.groups[i], m.targets[i]
                if plan[g] != d:
                    own_groups[size], own_targets[size] = g, d
                    moved_key ^= keys[g, plan[g]] ^ keys[g, d]
                    size += 1
            if size == 0 or _known(s.seen, moved_key):
                continue
            for i in range(size):
                trial[own_groups[i]] = own_targets[i]
            step_s, overflow = _simulate(s)
            tried += 1
            improved = _keep_best(s, step_s, overflow) or improved
            now, before = _descent_s(step_s, overflow), _descent_s(score[STEP], score[OVERFLOW])
            taken = False
            if now != np.inf:
                taken = now < before
                if not taken:
                    temperature = _HOT * _COOLING ** min(1.0, progress + slope * tried)
                    scale = temperature * _descent_s(score[BEST_STEP], score[BEST_OVERFLOW])
                    taken = scale > 0.0 and draw_uniform(random) < np.exp((before - now) / scale)
            if taken:
                score[STEP], score[OVERFLOW] = step_s, overflow
                key = moved_key
                accepted += 1
                counts[TAKEN] += 1
            for i in range(size):
                if taken:
                    plan[own_groups[i]] = own_targets[i]
                else:
                    trial[own_groups[i]] = plan[own_groups[i]]
            if taken and accepted >= _STALE:
                _analyse(s, step_s, overflow)
                accepted = 0
                break
        counts[CALLS] += tried
        if accepted > 0:
            counts[FRESH] = 0
        counts[STALLED] = 0 if improved else counts[STALLED] + 1
        if counts[STALLED] > _PATIENCE and tried < calls:
            counts[STALLED] = 0
            counts[FRESH] = 0
            plan[:] = s.best
            for _ in range(1 + np.int64(draw_uniform(random) * _KICK)):
                for i in range(draw_move(t, random, plan, own_groups, own_targets)):
                    plan[own_groups[i]] = own_targets[i]
            trial[:] = plan
        return tried

    return draw_ranked, attempt


draw_ranked, attempt = _compile(stamp_of(analysis, draw, features, records, movekernels, objective) ^ STAMP)


class GuidedSearch:
    """A search from a plan.

    Attributes:
        instance: The instance that is solved.
        calls: Simulator calls so far.
    """

    def __init__(self, instance: PlacementInstance, policy: Policy, start: NDArray[np.int32], *, seed: int) -> None:
        """Prepares; nothing is simulated yet.

        Args:
            instance: The instance to solve.
            policy: Ranks moves.
            start: int32 [G], the plan to start from.
            seed: Seed of all random choices.
        """
        self.instance, self.calls = instance, 0
        self._policy, self._guide = policy, Guide(instance, _MOVES, seed)
        simulation, trial = self._guide.simulator.compiled
        trial[:] = start
        rng = np.random.default_rng(seed)
        self._state = SearchState(
            simulation,
            trial,
            *self._guide.arguments,
            tuple(MoveMaker(instance.problem, seed).tables),
            trial.copy(),
            trial.copy(),
            np.array([math.inf, 0.0, math.inf, 0.0]),
            np.zeros(5, dtype=np.int64),
            self._guide.state,
            rng.integers(0, 1 << 63, size=instance.allowed.shape, dtype=np.uint64),
            np.zeros(_SEEN, dtype=np.uint64),
            tuple(self._guide.moves),
            self._guide.table,
            np.zeros(_MOVES, dtype=np.float32),
        )

    @property
    def best_plan(self) -> NDArray[np.int32]:
        """int32 [G], the best plan so far."""
        plan: NDArray[np.int32] = self._state.best.copy()
        return plan

    @property
    def best(self) -> Score:
        """Score of the best plan; the step time is inf before the first call."""
        return Score(float(self._state.score[BEST_STEP]), float(self._state.score[BEST_OVERFLOW]))

    def run(self, *, calls: int | None = None, deadline_s: float = math.inf) -> None:
        """Searches until the calls or the time are used up, or nothing is left to try.

        Args:
            calls: Simulations to make, over which the temperature falls; None: no limit.
            deadline_s: Moment on the monotonic clock at which the search ends.
        """
        budget = Budget(calls, None if deadline_s == math.inf else deadline_s - time.monotonic())
        progress, slope = 0.0, 0.0 if calls is None else 1.0 / max(1, calls)
        few = float(np.log(self.instance.allowed.sum(axis=1)).sum()) <= math.log(_SEEN) + 1e-9
        empty = idle = 0
        while progress < 1.0 and empty < _EMPTY and not (few and idle >= _IDLE):
            before = self.calls
            tried = self._round(int(min(_TRIES + 1, budget.calls - budget.used)), progress, slope)
            budget.used += self.calls - before
            empty, idle = (0, idle) if tried else (empty + 1, idle + 1)
            done = budget.share()
            if budget.end_s != math.inf:
                slope = (done - progress) / max(self.calls - before, 1)
            progress = done

    def _scores(self, count: int) -> NDArray[np.float32]:
        """Returns the policy's scores of the first moves of the table."""
        import torch

        from rlplace.agents.policies import AnalysedPlan, read_by

        with torch.inference_mode():
            moves = read_by(self._policy, self._guide.table[:count])
            return self._policy.scores(AnalysedPlan(self._guide, self._state.plan), moves).numpy()

    def _round(self, calls: int, progress: float, slope: float) -> int:
        """Draws moves and tries some of them, by `calls` simulations at most; returns the tries."""
        state, counts = tuple(self._state), self._state.counts
        before = int(counts[CALLS])
        count = int(draw_ranked(state, calls))
        left, tried = min(_TRIES, calls - int(counts[CALLS]) + before), 0
        if count and left:
            self._state.logits[:count] = self._scores(count)
        if left:
            tried = int(attempt(state, count, left, progress, slope))
        self.calls += int(counts[CALLS]) - before
        return tried


class _Unranked(GuidedSearch):
    """A search without a policy, which needs no torch."""

    def _scores(self, count: int) -> NDArray[np.float32]:
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
