"""Rewards: the planners' objective as a log ratio to a problem's reference, so that problems of all sizes share one learner."""

from __future__ import annotations

import math
from collections.abc import Callable

from rlplace.planners.common.objective import UNFIT_S, objective_s

SHORTEST_S = 1e-30
"""Stands for a step time of 0, which has no logarithm."""

UNFIT = 5.0
"""Score from which a plan does not fit; plans that fit and are 148 times slower than the reference count no worse."""

FinalReward = Callable[[float, float], float]
"""Called as ``reward(step_time_s, reference_step_time_s)`` with the step time of a feasible final plan."""


def score(step_time_s: float, relative_overflow: float, reference_step_time_s: float) -> float:
    """What refinement minimises: the order of `objective_s` on a scale that is the same for all problems.

    log(step time / reference) of a plan that fits; of any other `UNFIT` plus log(1 + overflow), the overflow cut at 10 so that
    one bad episode does not drown the others; four times `UNFIT` where the step cannot complete.
    """
    objective = objective_s(step_time_s, relative_overflow)
    if objective < UNFIT_S:
        return min(math.log(max(objective, SHORTEST_S) / reference_step_time_s), UNFIT)
    return UNFIT + math.log(min(objective / UNFIT_S, 11.0)) if math.isfinite(objective) else 4 * UNFIT


def log_ratio(step_time_s: float, reference_step_time_s: float) -> float:
    """log(reference / step time): 0 at the best classical plan, positive when faster."""
    return -score(step_time_s, 0.0, reference_step_time_s)


def infeasible_reward(relative_overflow: float) -> float:
    """The reward of a plan that does not fit or of an illegal action: below that of any plan that fits."""
    return -score(UNFIT_S, relative_overflow, 1.0)
