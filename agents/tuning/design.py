"""The first plans that are measured: good ones by what is known, that between them use every device and link."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from rlplace.planners.best import floor_answers
from rlplace.planners.common.evaluate import Deadline, Evaluator, Execution
from rlplace.planners.random_plans import candidates
from rlplace.problem import Problem
from rlplace.simulator import Simulator

_RANDOM = 48
_SLOWEST = 4.0  # plans that are predicted to take longer than so many times the best are not worth their time


def first_plans(
    problem: Problem, count: int, *, execution: Execution, first: NDArray[np.int32] | None = None, seed: int = 0
) -> list[NDArray[np.int32]]:
    """Distinct plans that fit, as many as there are up to `count`.

    Args:
        problem: As it was priced.
        count: How many.
        execution: Micro-batches and schedule of the step.
        first: int32 [G], a plan to begin with, such as the agent's.
        seed: Seed of the random candidates.
    """
    answers = [a.devices for _, a in floor_answers(problem, Evaluator(problem, execution), Deadline(None)) if a.score.feasible]
    options = np.array([*answers, *candidates(problem, seed, samples=_RANDOM)], dtype=np.int32)
    step, overflow = Simulator(problem, **execution.arguments).evaluate_many(options)
    fits = np.isfinite(step) & (overflow == 0.0)
    options, step = options[fits], step[fits]
    if first is not None:
        chosen = [np.asarray(first, dtype=np.int32)]
    else:
        chosen = [options[int(step.argmin())]] if len(step) else []
    covered = {pair for plan in chosen for pair in _used(problem, plan)}
    useful = step <= _SLOWEST * step.min(initial=np.inf)
    options, step = options[useful], step[useful]
    links = [_used(problem, plan) for plan in options]
    while len(chosen) < count:
        best = None
        for number, plan in enumerate(options):
            apart = min(float((plan != other).mean()) for other in chosen)
            if apart == 0.0:
                continue
            news = len(links[number] - covered) + 2.0 * apart
            value = (1.0 + news) / (step[number] / step.min())
            if best is None or value > best[0]:
                best = (value, number)
        if best is None:
            break
        chosen.append(options[best[1]])
        covered |= links[best[1]]
    return chosen[:count]


def roomiest(
    problem: Problem, known: Collection[tuple[int, ...]], *, execution: Execution, seed: int
) -> NDArray[np.int32] | None:
    """Of random plans that are not known, the one that leaves the fullest device most room; None when there is none.

    For clusters on which no plan has worked so far: most plans that fail need more memory than was predicted.
    """
    simulator = Simulator(problem, **execution.arguments)
    best: tuple[float, NDArray[np.int32]] | None = None
    for plan in candidates(problem, seed, samples=_RANDOM):
        if tuple(plan.tolist()) in known or not np.isfinite(simulator.evaluate(plan)[0]):
            continue
        fullest = float((simulator.peak_memory_bytes / np.minimum(problem.memory_limit_bytes, 1e18)).max())
        if best is None or fullest < best[0]:
            best = (fullest, plan)
    return None if best is None else best[1]


def _used(problem: Problem, plan: NDArray[np.int32]) -> set[tuple[int, int]]:
    """Ordered pairs of devices that a plan sends between, and (d, d) for devices that it computes on."""
    pairs = np.stack([plan[problem.edge_source_group], plan[problem.op_group[problem.consumers]]], axis=1)
    return {(int(i), int(j)) for i, j in np.unique(pairs, axis=0)} | {(int(d), int(d)) for d in np.unique(plan)}
