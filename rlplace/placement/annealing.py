"""Simulated annealing from the floor.

Problem: step time of the executor itself, memory included: overflow multiplies it, so that a search can pass through
assignments that do not fit; the best one is chosen by the objective (`rlplace.placement.common.evaluate`). A random move
(`rlplace.placement.search`) is accepted when it improves, or with probability ``exp(-increase / temperature)``; the
temperature falls geometrically, relative to the best step time, so that one setting serves all problems.

Paper: Kirkpatrick, Gelatt, Vecchi, "Optimization by simulated annealing", Science 220, 1983. FlexFlow (Jia, Zaharia, Aiken,
2019) searches parallel strategies this way.

Departures: starts from `best` instead of at random and therefore cool; the fewer calls a group, the cooler. A few times, spread
evenly over the budget, the search returns to the best assignment seen, which is also the answer, never worse than the start.
"""

# Compiled functions take their types from their arguments.
# mypy: disable-error-code="no-untyped-def, assignment"
from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from rlplace.compiled import entry, inner, stamp_of
from rlplace.errors import InputError, show, whole_number
from rlplace.placement.common import evaluate, movekernels
from rlplace.placement.common.evaluate import Score, descent_s, objective_s, uncounted
from rlplace.placement.common.movekernels import Tables, draw_move, draw_uniform
from rlplace.placement.search import MoveMaker, PlacementSearch, search_planner
from rlplace.problem.generate import random_problem
from rlplace.simulator.fast import STAMP, simulate_plans

COOLING = 0.01
"""End temperature relative to the start temperature."""

RETURNS = 8
"""Number of times, spread evenly over the budget, that the search returns to the best assignment so far."""

_CHUNK = 256
"""Simulations between two checks of the budget; fewer when they would take longer than `_CHUNK_S`."""

_CHUNK_S = 0.01

IDLE = 1000
"""Draws in a row without a move after which nothing counts as movable."""

_COOL_EVERY = 16  # simulations between two changes of the temperature


@dataclass(frozen=True)
class AnnealingSettings:
    """Parameters of the search.

    Attributes:
        start_temperature: Relative increase of step time that is accepted with probability 1/e at first; default by budget and
            number of groups.
        cooling: End temperature relative to the start temperature.
        returns: Number of times that the search returns to the best assignment so far.
    """

    start_temperature: float | None = None
    cooling: float = COOLING
    returns: int = RETURNS

    def __post_init__(self) -> None:
        if self.start_temperature is not None and not 0.0 <= self.start_temperature < math.inf:
            raise InputError(f"annealing: start_temperature must not be negative, found {show(self.start_temperature)}")
        if not 0.0 < self.cooling <= 1.0:
            raise InputError(f"annealing: cooling must be above 0 and at most 1, found {show(self.cooling)}")
        whole_number(self.returns, "annealing: returns")


class Walk(NamedTuple):
    """State of the compiled loop."""

    tables: Any  # `Tables` as a plain tuple
    trial: Any  # int32 [G], what is simulated; `devices` when the loop begins and when it ends
    state: Any  # uint64 [1], state of the random numbers
    devices: Any  # int32 [G], the current assignment
    best: Any  # int32 [G], the best assignment so far
    score: Any  # float64 [4], step time and overflow of the current assignment and of the best one
    groups: Any  # int32 [max(G, CLUSTER)], buffer for the groups of a move
    targets: Any  # int32 [max(G, CLUSTER)], buffer for their devices


_objective_s, _descent_s = inner(objective_s), inner(descent_s)


def _compile(stamp):
    @entry
    def anneal(simulation, walk, calls, hot, cooling, progress, slope):
        """Makes simulations, fewer when no move is found; returns how many.

        Args:
            simulation: Arguments of `fast.simulate_plans`; it simulates ``walk.trial``.
            walk: A `Walk` as a plain tuple.
            calls: Simulations to make.
            hot: Start temperature relative to the best step time.
            cooling: End temperature relative to `hot`.
            progress: Share of the budget that is spent.
            slope: Increase of `progress` with every simulation.
        """
        _ = stamp
        tables, trial, state, devices, best, score, groups, targets = walk
        t = Tables(*tables)
        graph, work, ranks, position, rows, results = simulation
        used, idle, temperature = 0, 0, 0.0
        while used < calls and idle < IDLE:
            count = draw_move(t, state, devices, groups, targets)
            if count == 0:
                idle += 1
                continue
            idle = 0
            if used % _COOL_EVERY == 0:
                temperature = hot * cooling ** min(1.0, progress + slope * used)
            for i in range(count):
                trial[groups[i]] = targets[i]
            step, overflow = simulate_plans(graph, work, ranks, position, rows, results)
            used += 1
            if _objective_s(step, overflow) < _objective_s(score[2], score[3]):
                best[:] = trial
                score[2], score[3] = step, overflow
            now, before = _descent_s(step, overflow), _descent_s(score[0], score[1])
            taken = False
            if now != np.inf:
                taken = now <= before
                scale = temperature * _descent_s(score[2], score[3])
                if not taken and scale > 0.0:
                    taken = draw_uniform(state) < np.exp((before - now) / scale)
            if taken:
                score[0], score[1] = step, overflow
            for i in range(count):
                if taken:
                    devices[groups[i]] = targets[i]
                else:
                    trial[groups[i]] = devices[groups[i]]
        return used

    return anneal


anneal = _compile(stamp_of(movekernels, evaluate) ^ STAMP)


def default_temperature(calls: float, groups: int) -> float:
    """Returns the start temperature for a budget of calls, tuned on the validation split; see docs/planners.md."""
    return min(0.02, 0.01 * (calls / (64 * groups)) ** 1.2)


@cache
def warm_up() -> None:
    """Compiles the loop, or loads it from the cache, so that time limits do not pay for it."""
    problem = random_problem(0, 6, 3, memory_factor=1.0)
    with uncounted():
        search = PlacementSearch(problem, "annealing", [0] * 6, calls=2, time_limit_s=None)
        annealing.spend(search, 0, AnnealingSettings())


@search_planner(AnnealingSettings, doc=__doc__, ready=warm_up)
def annealing(search: PlacementSearch, seed: int, settings: AnnealingSettings) -> None:
    """Spends the search's budget; `seed` is the seed of the moves."""
    moves = MoveMaker(search.evaluator.problem, seed)
    hot, cooling, returns = settings.start_temperature, settings.cooling, settings.returns
    groups = search.evaluator.problem.num_groups
    simulation, trial = search.evaluator.simulator.compiled
    trial[:] = search.assignment
    best = search.best_devices.copy()
    score = np.array(
        [search.score.step_time_s, search.score.overflow, search.best_score.step_time_s, search.best_score.overflow]
    )
    tables, buffers = tuple(moves.tables), (moves.groups, moves.targets)
    walk = tuple(Walk(tables, trial, moves.state, search.assignment, best, score, *buffers))
    budget = search.budget
    timed, unlimited = budget.end_s != math.inf, budget.calls == math.inf
    # With a time limit alone, the temperature falls within a chunk as fast as it fell in the one before.
    slope = 1.0 / max(1.0, budget.calls)
    longest = int(min(_CHUNK, max(1.0, budget.calls / max(1, returns))))
    chunk = 1 if timed else longest
    progress, left_s = budget.share(), budget.left_s()
    began_s, calls_made = time.monotonic(), 0
    while progress < 1.0:
        if settings.start_temperature is None:
            # The budget in calls is what the rate so far promises; before there is one, nothing uphill is accepted.
            spent_s = time.monotonic() - began_s
            promised = 0.0 if calls_made == 0 else calls_made / spent_s * left_s
            hot = default_temperature(min(budget.calls, promised) if timed else budget.calls, groups)
        calls = int(min(chunk, budget.calls - budget.used))
        chunk_began_s = time.monotonic()
        used = anneal(simulation, walk, calls, hot, cooling, progress, slope)
        search.evaluator.count(used)
        calls_made += used
        if used < calls:
            break
        before, progress = progress, budget.share()
        # From an assignment as good as the best one the search goes on: it has drifted there, and that is worth something.
        if int(progress * returns) > int(before * returns) and tuple(score[:2]) != tuple(score[2:]):
            search.assignment[:] = best
            trial[:] = best
            score[:2] = score[2:]
        if timed:
            rate_s = (time.monotonic() - chunk_began_s) / used
            chunk = min(longest, 2 * chunk, max(1, int(_CHUNK_S / rate_s)))
            if unlimited:
                slope = (progress - before) / used
    search.settle(Score(float(score[0]), float(score[1])), best, Score(float(score[2]), float(score[3])))
