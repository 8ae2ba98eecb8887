"""A race of searches from the quickest plans of the classical planners, of which `best` takes one.

Problem: step time of the executor itself, as in `annealing`. The quickest plans of the one-shot planners are improved by a
short search each; the better half stays, until one is left, which has the rest of the budget. Simulator calls of all count;
the plans themselves cost nothing, since `best` has made them before any method begins.

Paper: successive halving, Jamieson, Talwalkar, "Non-stochastic best arm identification and hyperparameter optimization", 2016.

Departures: runs go on as searches of their own, each with temperatures of its own, from the best plan of the one before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from benchmarks.ils import ils
from rlplace.errors import InputError, show, unknown_name, whole_number
from rlplace.placement.annealing import annealing
from rlplace.placement.common.evaluate import PlanEvaluator, ScoredAssignment, uncounted
from rlplace.placement.local_search import local_search
from rlplace.placement.search import PlacementSearch, floor_answers, search_planner
from rlplace.problem import Problem

SEARCHES = {"annealing": annealing, "local_search": local_search, "ils": ils}

_starts: dict[str, list[ScoredAssignment]] = {}


@dataclass(frozen=True)
class RaceSettings:
    """Parameters of the race, tuned on the validation split; see benchmarks/agent/README.md.

    Attributes:
        most: Plans that it begins with.
        share: Of the budget, what goes to all runs but the last.
        least: Simulator calls of a run; a small budget has fewer starts instead of shorter runs.
        search: The search that runs, with its own settings.
    """

    most: int = 3
    share: float = 0.35
    least: int = 16
    search: str = "annealing"

    def __post_init__(self) -> None:
        for name in ("most", "least"):
            whole_number(getattr(self, name), f"race: {name}", 1)
        if not 0.0 <= self.share < 1.0:
            raise InputError(f"race: share must be a number from 0 up, below 1, found {show(self.share)}")
        if self.search not in SEARCHES:
            raise unknown_name("search of the race", self.search, SEARCHES)


def starts_of(problem: Problem) -> list[ScoredAssignment]:
    """Returns the unlike plans of the one-shot planners, quickest first; made once a problem, in no budget."""
    if problem.fingerprint not in _starts:
        with uncounted():
            found = [answer for _, answer in floor_answers(PlanEvaluator(problem))]
        found.sort(key=lambda answer: answer.score.objective_s)
        _starts[problem.fingerprint] = list({answer.devices.tobytes(): answer for answer in found}.values())
    return _starts[problem.fingerprint]


@search_planner(RaceSettings, doc=__doc__)
def race(search: PlacementSearch, seed: int, settings: RaceSettings) -> None:
    """Spends the search's budget; `seed` is the seed of all runs."""
    first, whole_s = search.answer(), search.budget.left_s()
    others = [answer for answer in starts_of(search.evaluator.problem) if (answer.devices != first.devices).any()]
    count = min(settings.most, 1 + len(others))
    while count > 1 and settings.share * search.budget.calls < settings.least * count * halvings(count):
        count -= 1
    live, rounds, runs = [first, *others[: count - 1]], halvings(count), 0
    for _ in range(rounds):
        share = settings.share / (rounds * len(live))
        for place, answer in enumerate(live):
            live[place] = run(search, answer, seed + 1000 * runs, settings, share, whole_s)
            runs += 1
        live.sort(key=lambda answer: answer.score.objective_s)
        live = live[: math.ceil(len(live) / 2)]
    last = run(search, live[0], seed + 1000 * runs, settings, 1.0, whole_s)
    best = min(first, last, key=lambda answer: answer.score.objective_s)
    search.settle(best.score, best.devices, best.score)


def halvings(count: int) -> int:
    """Rounds until one of so many plans is left."""
    return math.ceil(math.log2(count))


def run(
    search: PlacementSearch, start: ScoredAssignment, seed: int, settings: RaceSettings, share: float, whole_s: float
) -> ScoredAssignment:
    """Returns the best plan of a run that has `share` of the whole budget, or what is left of it where that is less."""
    planner, calls, limit_s = SEARCHES[settings.search], None, None
    budget = search.budget
    if budget.calls != math.inf:
        calls = int(min(share * budget.calls, budget.calls - budget.used))
    if whole_s != math.inf:
        limit_s = max(0.0, min(share * whole_s, budget.left_s()))
    with uncounted():
        own = PlacementSearch(search.evaluator.problem, "race", start.devices, calls=calls, time_limit_s=limit_s)
        planner.spend(own, seed, planner.settings())
    search.evaluator.count(own.budget.used)
    return own.answer()
