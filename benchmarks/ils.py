"""Iterated local search from the floor: the descent of `local_search`, kicks that are random, and restarts at the best plan.

Problem: step time of the executor itself, as in `annealing`. From a local optimum as good as the best plan, or else from that
plan itself, so many random moves are made at once, for one simulation, whatever they cost, and the descent goes on from there.
Kicks grow by a move each time that one brought nothing new, and begin anew with a new best plan or beyond the largest.

Paper: Lourenco, Martin, Stutzle, "Iterated local search", 2003; kicks that grow are those of variable neighbourhood search
(Mladenovic, Hansen, 1997).

Departures: `local_search` itself, which is iterated too, looks at every move of a kick and drops those that cost over 3 %.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from rlplace.errors import whole_number
from rlplace.placement.local_search import LocalSearchSettings, descend
from rlplace.placement.search import Move, MoveMaker, PlacementSearch, search_planner


@dataclass(frozen=True)
class IlsSettings:
    """Parameters of the search, tuned on the validation split; see benchmarks/agent/README.md.

    Attributes:
        tries, random_tries: Guided and random moves tried from a plan before it counts as a local optimum.
        kick: Most random moves of a kick.
        repeats: Kicks of one size before they grow.
    """

    tries: int = 12
    random_tries: int = 96
    kick: int = 4
    repeats: int = 1

    def __post_init__(self) -> None:
        for name in ("tries", "random_tries", "kick", "repeats"):
            whole_number(getattr(self, name), f"ils: {name}", 1)


@search_planner(IlsSettings, doc=__doc__)
def ils(search: PlacementSearch, seed: int, settings: IlsSettings) -> None:
    """Spends the search's budget; `seed` is the seed of the random moves."""
    moves, explored, best_s, failed = MoveMaker(search.evaluator.problem, seed), set[bytes](), math.inf, 0
    inner = LocalSearchSettings(tries=settings.tries, random_tries=settings.random_tries)
    while moves.movable and search.budget.share() < 1.0:
        descend(search, moves, explored, inner)
        failed = 0 if search.best_score.objective_s < best_s else failed + 1
        best_s = search.best_score.objective_s
        if search.score.objective_s > search.best_score.objective_s:
            search.restart()
        move = kick(search, moves, 1 + failed // settings.repeats % settings.kick)
        if move and search.budget.share() < 1.0:
            score = search.evaluate(move)
            if score.step_time_s != math.inf:
                search.accept(move, score)


def kick(search: PlacementSearch, moves: MoveMaker, count: int) -> Move:
    """Returns so many random moves of the current plan, one after the other, as one move."""
    after = search.assignment.copy()
    for _ in range(count):
        for group, device in moves.draw(after):
            after[group] = device
    changed = np.flatnonzero(after != search.assignment)
    return list(zip(changed.tolist(), after[changed].tolist(), strict=True))
