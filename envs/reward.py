"""Rewards: log ratios to the problem's reference, so that problems of all sizes share one learner."""

from __future__ import annotations

import math
from collections.abc import Callable

SHORTEST_S = 1e-30
"""Stands for a step time of 0, which has no logarithm."""

FinalReward = Callable[[float, float], float]
"""Called as ``reward(step_time_s, reference_step_time_s)`` with the step time of a feasible final plan."""


def log_ratio(step_time_s: float, reference_step_time_s: float) -> float:
    """log(reference / step time): 0 at the best classical plan, positive when faster."""
    return math.log(reference_step_time_s / max(step_time_s, SHORTEST_S))


def infeasible_reward(relative_overflow: float) -> float:
    """-(1 + relative overflow): the reward of a plan that does not fit or of an illegal action.

    The overflow is cut at 10 so that one bad episode does not drown the others.
    """
    return -(1.0 + min(relative_overflow, 10.0))


def score(step_time_s: float, relative_overflow: float, reference_step_time_s: float) -> float:
    """What refinement minimises: log(step time / reference), plus a penalty of 1 + overflow while the plan does not fit."""
    if not math.isfinite(step_time_s):
        return 20.0
    value = math.log(max(step_time_s, SHORTEST_S) / reference_step_time_s)
    return value + 1.0 + min(relative_overflow, 10.0) if relative_overflow > 0 else value
