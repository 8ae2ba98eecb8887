"""Bottleneck-guided descent from the floor.

Problem: step time of the executor itself, as in `annealing`. A step ends when its critical chain ends: walking back from the
last event, every op on the chain started when an input arrived or when its device became free. A transfer on the chain is
removed by joining its two groups on either side; a wait for a busy device is removed by moving the waiting group, or the one
that ran before it, to an idler device. These moves, also for the run of consecutive groups around them, are ranked by the
seconds they remove less the transfers they add (`rlplace.planners.common.bottleneck`), and the first one that improves is
made. At a local optimum a few random moves are made, and the descent goes on from there; it returns to the best answer when
that did not pay.

Paper: guided moves are in the spirit of critical-path local search for scheduling (van Laarhoven, Aarts, Lenstra, "Job shop
scheduling by simulated annealing", 1992); restarts by small kicks are iterated local search (Lourenco, Martin, Stutzle, 2003).

Departures: none from a fixed algorithm; this is rlplace's own combination.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from typing import Any

from rlplace.errors import InputError, show, whole_number
from rlplace.plan import PlacementPlan
from rlplace.planners.common.bottleneck import propose
from rlplace.planners.common.evaluate import Execution
from rlplace.planners.common.floor import finish
from rlplace.planners.common.moves import MoveMaker
from rlplace.planners.common.search import Search, Start
from rlplace.problem import Problem


@dataclass(frozen=True)
class LocalSearchSettings:
    """Parameters of the search, tuned on the validation split; see docs/planners/local_search.md.

    Attributes:
        tries: Guided moves tried from one assignment before random ones are.
        random_tries: Random moves tried from one assignment before a kick.
        kick: Most random moves of a kick.
        kick_worse: By how much a kick may worsen the step time, relative to the best one: the descent would not find back from
            more within a budget.
    """

    tries: int = 12
    random_tries: int = 12
    kick: int = 6
    kick_worse: float = 0.03

    def __post_init__(self) -> None:
        for name in ("tries", "random_tries", "kick"):
            value = getattr(self, name)
            whole_number(value, f"local_search: {name}", 1)
        if not 0.0 <= self.kick_worse < math.inf:
            raise InputError(f"local_search: kick_worse must not be negative, found {show(self.kick_worse)}")


def local_search(
    problem: Problem,
    *,
    seed: int = 0,
    time_limit_s: float | None = None,
    calls: int | None = None,
    start: Start = None,
    tries: int = LocalSearchSettings.tries,
    random_tries: int = LocalSearchSettings.random_tries,
    kick: int = LocalSearchSettings.kick,
    kick_worse: float = LocalSearchSettings.kick_worse,
    **execution: Any,
) -> PlacementPlan:
    """Bottleneck-guided descent with kicks.

    Args:
        problem: The problem.
        seed: Of the kicks.
        time_limit_s: Seconds, floor included.
        calls: Simulator calls after the floor; default 4096 when there is no time limit.
        start: Plan or assignment to start from; default the floor, `best`.
        tries: See `LocalSearchSettings`, and so the following.
        random_tries: Random moves.
        kick: Random moves.
        kick_worse: Relative increase of step time.
        **execution: Fields of `rlplace.planners.common.evaluate.Execution`.

    Raises:
        InfeasibleError: Neither the floor nor the search found a plan that fits.
    """
    run = Execution(**execution)
    search = Search(problem, "local_search", start, run, calls=calls, time_limit_s=time_limit_s)
    settings = LocalSearchSettings(tries, random_tries, kick, kick_worse)
    run_local_search(search, MoveMaker(problem, seed), Random(seed), settings)
    return finish(problem, search.answer(), run, planner="local_search", seed=seed)


def run_local_search(search: Search, moves: MoveMaker, rng: Random, settings: LocalSearchSettings) -> None:
    """Spends the search's budget."""
    explored: set[tuple[int, ...]] = set()
    while moves.movable and search.progress() < 1.0:
        _descend(search, moves, explored, settings)
        if search.score.objective_s > search.best_score.objective_s:
            search.restart()
        for _ in range(rng.randint(1, settings.kick)):
            kick = moves.draw(search.assignment)
            if kick and search.progress() < 1.0:
                score = search.evaluate(kick)
                if score.descent_s <= (1.0 + settings.kick_worse) * search.best_score.descent_s:
                    search.accept(kick, score)


def _descend(search: Search, moves: MoveMaker, explored: set[tuple[int, ...]], settings: LocalSearchSettings) -> None:
    """Improves until neither guided nor random moves do, or the budget is spent.

    Guided moves are the same whenever the search comes back to an assignment, so they are tried there only once.
    """
    found = True
    while found and search.progress() < 1.0:
        found = False
        here = tuple(search.devices)
        guided = propose(search.evaluator, search.devices, limit=settings.tries) if here not in explored else []
        explored.add(here)
        for index in range(len(guided) + settings.random_tries):
            if search.progress() >= 1.0:
                return
            move = guided[index] if index < len(guided) else moves.draw(search.assignment)
            if not move:
                continue
            score = search.evaluate(move)
            if score.step_time_s == math.inf or score.descent_s > search.score.descent_s:
                continue
            # Random moves also drift sideways: much of a plan is off the critical chain and can move freely.
            found = score.descent_s < search.score.descent_s
            if found or index >= len(guided):
                search.accept(move, score)
            if found:
                break
