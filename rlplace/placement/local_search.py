"""Bottleneck-guided descent from the floor.

Problem: step time of the executor itself, as in `annealing`. A step ends when its critical chain ends: walking back from the
last event, every op on the chain started when an input arrived or when its device became free. A transfer on the chain is
removed by joining its two groups on either side; a wait for a busy device is removed by moving the waiting group, or the one
that ran before it, to an idler device. These moves, also for the run of consecutive groups around them, are ranked by the
seconds they remove less the transfers they add (`rlplace.placement.common.bottleneck`), and the first one that improves is
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

from rlplace.errors import InputError, show, whole_number
from rlplace.placement.common.bottleneck import Move, ranked_moves
from rlplace.placement.search import MoveMaker, PlacementSearch


@dataclass(frozen=True)
class LocalSearchSettings:
    """Parameters of the search, tuned on the validation split; see docs/planners.md.

    Attributes:
        tries: Guided moves tried from one assignment before random ones.
        random_tries: Random moves tried from one assignment before a kick.
        kick: Most random moves of a kick.
        kick_worse: Largest increase of the step time by a kick, relative to the best one: the descent would not return from
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


SETTINGS = LocalSearchSettings


def spend(search: PlacementSearch, seed: int, settings: LocalSearchSettings) -> None:
    """Spends the search's budget; `seed` is the seed of the kicks."""
    moves, rng = MoveMaker(search.evaluator.problem, seed), Random(seed)
    explored: set[bytes] = set()
    while moves.movable and search.budget.share() < 1.0:
        descend(search, moves, explored, settings)
        if search.score.objective_s > search.best_score.objective_s:
            search.restart()
        for _ in range(rng.randint(1, settings.kick)):
            kick = moves.draw(search.assignment)
            if kick and search.budget.share() < 1.0:
                score = search.evaluate(kick)
                if score.descent_s <= (1.0 + settings.kick_worse) * search.best_score.descent_s:
                    search.accept(kick, score)


def descend(search: PlacementSearch, moves: MoveMaker, explored: set[bytes], settings: LocalSearchSettings) -> None:
    """Improves until neither guided nor random moves do, or the budget is spent.

    Guided moves are the same whenever the search comes back to an assignment, so they are tried there only once.
    """
    improved = True
    while improved and search.budget.share() < 1.0:
        improved = False
        here = search.assignment.tobytes()
        guided: list[Move] = []
        if here not in explored:
            line = search.evaluator.timeline(search.assignment)
            ranked = ranked_moves(search.evaluator.problem, line, search.assignment, limit=settings.tries)
            guided = [move for _, move in ranked]
        explored.add(here)
        for index in range(len(guided) + settings.random_tries):
            if search.budget.share() >= 1.0:
                return
            move = guided[index] if index < len(guided) else moves.draw(search.assignment)
            if not move:
                continue
            score = search.evaluate(move)
            if score.step_time_s == math.inf or score.descent_s > search.score.descent_s:
                continue
            # Random moves also drift sideways: much of a plan is off the critical chain and can move freely.
            improved = score.descent_s < search.score.descent_s
            if improved or index >= len(guided):
                search.accept(move, score)
            if improved:
                break
