"""Planning anew for every question: another assignment, or, for a plan with replicas, another way to split its global batch.

What is found for one question is simulated for all, so that the luck of a search is not taken for the worth of a change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InfeasibleError
from rlplace.explaining.questions import Question, fitting_s
from rlplace.explaining.simulated_plan import run_unchecked
from rlplace.plan.plan import PlacementPlan
from rlplace.planners import get_planner
from rlplace.planners.strategy.sweep import place_strategies
from rlplace.problem import Problem


def assignments(questions: Sequence[Question], *, calls: int, time_limit_s: float | None, seed: int) -> list[float | None]:
    """The best step of every question with the plan's micro-batches and schedule; None where nothing fits.

    Args:
        questions: About a plan without replicas.
        calls: Simulations of each search beside the classical floor.
        time_limit_s: Seconds of each search.
        seed: Seed of the searches.
    """
    limits: dict[str, Any] = {"calls": calls, "time_limit_s": time_limit_s, "seed": seed}
    pool: dict[bytes, NDArray[np.int32]] = {}
    for question in questions:
        starts = [_devices(question.same.plan), *pool.values()]
        for devices in _searched(question, starts, limits):
            pool[devices.tobytes()] = devices
    best: list[float | None] = []
    for question in questions:
        known = [d for d in pool.values() if int(d.max(initial=0)) < question.problem.num_devices]
        best.append(_least(question, [question.step_s(devices) for devices in known]))
    return best


def strategies(
    questions: Sequence[Question], at: Callable[[int], Problem] | None, *, time_limit_s: float | None, seed: int
) -> list[float | None]:
    """The best step of every question over all ways to split its samples among replicas and micro-batches.

    Args:
        questions: About a plan with replicas.
        at: The plan's problem for a micro-batch of so many samples; None: it is known for its own only.
        time_limit_s: Seconds for each question.
        seed: Seed of the planner.
    """
    known = questions[0].same.given.samples_per_microbatch

    @cache
    def problem_of(question: Question, samples: int) -> Problem:
        return question.same.given if samples == known or at is None else question.made(at(samples))

    pool: dict[int, list[tuple[int, PlacementPlan]]] = {}  # by samples of a step: samples of a micro-batch, plan
    for question in questions:
        total = question.same.line.samples
        try:
            problem, plan = place_strategies(
                partial(problem_of, question), first=question.same.given, global_batch=total,
                samples=known if at is None else None, planner="best", seed=seed, time_limit_s=time_limit_s,
            )  # fmt: skip
        except InfeasibleError:
            continue
        pool.setdefault(total, []).append((problem.samples_per_microbatch, plan))
    best: list[float | None] = []
    for question in questions:
        candidates = pool.get(question.same.line.samples, [])
        here = [(samples, plan) for samples, plan in candidates if _last(plan) < question.same.given.num_devices]
        best.append(_least(question, [fitting_s(run_unchecked(problem_of(question, n), plan)) for n, plan in here]))
    return best


def _least(question: Question, steps: list[float]) -> float | None:
    step = min([fitting_s(question.same), *steps])
    return step if math.isfinite(step) else None


def _last(plan: PlacementPlan) -> int:
    """The highest number among the devices that a plan uses."""
    return max(max(row) for row in plan.replicas) if plan.replicas else int(plan.device_of_group.max(initial=0))


def _searched(question: Question, starts: list[NDArray[np.int32]], limits: dict[str, Any]) -> list[NDArray[np.int32]]:
    """The floor's plan, and what a search finds from the best plan that is known."""
    problem = question.problem
    execution = {"microbatches": question.same.plan.microbatches, "schedule": question.schedule}
    candidates = [devices for devices in starts if int(devices.max(initial=0)) < problem.num_devices]
    try:
        fixed = {"seed": limits["seed"], "time_limit_s": limits["time_limit_s"]}
        candidates.append(get_planner("best")(problem, **fixed, **execution).device_of_group)
    except InfeasibleError:
        pass
    start = min(candidates, key=question.step_s)
    try:
        candidates.append(get_planner("local_search")(problem, start=start, **limits, **execution).device_of_group)
    except InfeasibleError:
        pass
    return [np.ascontiguousarray(devices, dtype=np.int32) for devices in candidates]


def _devices(plan: PlacementPlan) -> NDArray[np.int32]:
    """The plan's devices in the cluster."""
    own = plan.device_of_group if plan.replicas is None else np.asarray(plan.replicas[0])[plan.device_of_group]
    return np.ascontiguousarray(own, dtype=np.int32)
