"""Start and end of placing: a floor, an instance and a deadline, and the plan of an answer."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.agents.search import warm_up
from rlplace.envs.base import greedy_fit
from rlplace.envs.instance import Instance, make_instance
from rlplace.errors import InfeasibleError, InputError, show, whole_number
from rlplace.plan.plan import PlacementPlan, make_plan
from rlplace.planners import get_planner
from rlplace.planners.common.evaluate import Evaluator, Score
from rlplace.planners.common.repair import legalize
from rlplace.planners.common.search import Start, start_devices
from rlplace.planners.common.shortage import check_possible
from rlplace.problem import Problem
from rlplace.simulator import simulate


@dataclass(frozen=True, eq=False)
class Setup:
    """The start of the agent's search.

    Attributes:
        instance: The instance of the problem.
        seed: Seed of all random choices.
        deadline_s: Moment on the monotonic clock; inf without a time limit.
        first: int32 [G], plan to start from.
        score: Score of `first`; a step time of inf unless it is feasible.
        priority: Priority of ops that belongs to `first`.
        reason: Error that tells why no feasible plan is known.
    """

    instance: Instance
    seed: int
    deadline_s: float
    first: NDArray[np.int32]
    score: Score
    priority: Any
    reason: InfeasibleError | None

    def answer(self, devices: NDArray[np.int32], *, search_calls: int, **figures: Any) -> PlacementPlan:
        """The plan of an assignment int32 [G], with these `figures` beside the simulator's.

        Raises:
            InfeasibleError: It does not fit.
        """
        problem = self.instance.problem
        Evaluator(problem).count(search_calls)
        priority = self.priority if np.array_equal(devices, self.first) else None
        line = simulate(problem, devices, priority=priority)
        if not line.feasible:
            raise self.reason or InfeasibleError("no feasible plan found; relax memory, or raise the time limit")
        floor_s = self.score.step_time_s if self.score.feasible else None
        predicted = line.predicted(problem).told(floor_step_time_s=floor_s, search_calls=search_calls, **figures)
        return make_plan(problem, devices, planner="agent", seed=self.seed, predicted=predicted, priority=priority)


def set_up(
    problem: Problem,
    start: Start,
    *,
    seed: int,
    time_limit_s: float | None,
    warm: Callable[[], None] = warm_up,
) -> Setup:
    """Checks the arguments of a placement and finds its start.

    Args:
        problem: The problem to place.
        start: Plan or assignment to start from instead of `best`.
        seed: Seed of all random choices.
        time_limit_s: Wall time from here, compiling left out; None: no limit.
        warm: Compiles the kernels that will run.
    """
    if time_limit_s is not None:
        check_limit(time_limit_s)
    check_possible(problem)  # no search finds what a bound rules out
    warm()
    deadline_s = math.inf if time_limit_s is None else time.monotonic() + time_limit_s
    first, score, priority, reason = None, Score(math.inf, 0.0), None, None
    if start is None:
        try:
            best = get_planner("best")(problem, seed=seed, time_limit_s=time_limit_s)
            first, score = best.device_of_group, Score(best.predicted.step_s, 0.0)
        except InfeasibleError as error:
            reason = error
    else:
        devices = start_devices(problem, start, "agent")
        first = legalize(problem, devices)
        order = start.priority if isinstance(start, PlacementPlan) and np.array_equal(first, devices) else None
        line = simulate(problem, first, priority=order)
        if line.step_time_s is not None and line.feasible:
            score, priority = Score(line.step_time_s, 0.0), order
    if problem.num_devices == 1 and not score.feasible:
        raise reason or InfeasibleError("the problem does not fit on its only device; use a device with more memory")
    instance = make_instance(problem, floor=first if score.feasible else None, compute_floor=False)
    return Setup(instance, seed, deadline_s, greedy_fit(instance) if first is None else first, score, priority, reason)


def check_limit(time_limit_s: Any) -> None:
    """Refuses values that are not a number of seconds."""
    number = isinstance(time_limit_s, Real) and not isinstance(time_limit_s, bool)
    if not number or not 0.0 <= float(time_limit_s) < math.inf:
        raise InputError(f"agent: time_limit_s must be a finite number of seconds from 0 up, found {show(time_limit_s)}")


def check_counts(**counts: Any) -> None:
    """Refuses values that are not whole numbers from 0 up; None stands for a default."""
    for name, value in counts.items():
        if value is not None:
            whole_number(value, f"agent: {name}")
