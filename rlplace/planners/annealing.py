"""Simulated annealing from the floor.

Problem: step time of the executor itself, memory included: overflow multiplies the step time (see `Score.penalized_s`), so
that a search can pass through assignments that do not fit. A random move (`rlplace.planners.moves`) is accepted when it
improves, or with probability ``exp(-increase / temperature)``; the temperature falls geometrically, relative to the best step
time, so that one setting serves all problems.

Paper: Kirkpatrick, Gelatt, Vecchi, "Optimization by simulated annealing", Science 220, 1983. FlexFlow (Jia, Zaharia, Aiken,
2019) searches parallel strategies this way.

Departures: starts from `best` instead of at random and therefore cool; the fewer calls, the cooler. The answer is the best
assignment seen, never worse than the start.
"""

from __future__ import annotations

import math
from random import Random
from typing import Any

from rlplace.plan import PlacementPlan
from rlplace.planners.evaluate import Execution
from rlplace.planners.floor import finish
from rlplace.planners.moves import MoveMaker
from rlplace.planners.search import Search, Start
from rlplace.problem import Problem

COOLING = 0.01
"""End temperature relative to the start temperature."""


def annealing(
    problem: Problem,
    *,
    seed: int = 0,
    time_limit_s: float | None = None,
    calls: int | None = None,
    start: Start = None,
    start_temperature: float | None = None,
    **execution: Any,
) -> PlacementPlan:
    """Tuned simulated annealing.

    Args:
        problem: The problem.
        seed: Of the moves.
        time_limit_s: Seconds, floor included.
        calls: Simulator calls after the floor; default 4096 when there is no time limit.
        start: Plan or assignment to start from; default the floor, `best`.
        start_temperature: Relative increase of step time that is accepted with probability 1/e at first; default by budget.
        **execution: Fields of `rlplace.planners.evaluate.Execution`.

    Raises:
        InfeasibleError: Neither the floor nor the search found a plan that fits.
    """
    run = Execution(**execution)
    search = Search(problem, "annealing", start, run, calls=calls, time_limit_s=time_limit_s)
    run_annealing(search, MoveMaker(problem, Random(seed)), start_temperature)
    return finish(problem, search.answer(), run, planner="annealing", seed=seed)


def default_temperature(calls: int) -> float:
    """Start temperature for a budget of calls, tuned on generated problems; see docs/planners/annealing.md."""
    return 1e-4 * math.sqrt(max(1.0, calls / 4096))


def run_annealing(search: Search, moves: MoveMaker, start_temperature: float | None = None) -> None:
    """Spends the search's budget."""
    rng = moves.rng
    budget = search.calls if search.calls is not None else 20_000
    hot = default_temperature(budget) if start_temperature is None else start_temperature
    temperature = hot
    idle = step = 0
    while idle < 1000:  # so many draws in a row without a move: nothing is movable
        if step % 16 == 0:
            progress = search.progress()
            if progress >= 1.0:
                return
            temperature = hot * COOLING**progress
        move = moves.draw(search.devices)
        if not move:
            idle += 1
            continue
        if search.calls is not None and search.used() >= search.calls:
            return
        idle, step = 0, step + 1
        score = search.evaluate(move)
        now, before = score.penalized_s, search.score.penalized_s
        if now == math.inf:
            continue
        scale = temperature * search.best_score.penalized_s
        if now <= before or (scale > 0 and rng.random() < math.exp((before - now) / scale)):
            search.accept(move, score)
