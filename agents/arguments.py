"""What people hand to the agent, checked before anything is computed."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InputError, show, whole_number
from rlplace.plan.plan import PlacementPlan
from rlplace.planners.common.search import Start
from rlplace.problem import Problem
from rlplace.simulator.inputs import check_devices


def check_limit(time_limit_s: Any) -> None:
    """Refuses what is no number of seconds."""
    number = isinstance(time_limit_s, Real) and not isinstance(time_limit_s, bool)
    if not number or not 0.0 <= float(time_limit_s) < math.inf:
        raise InputError(f"agent: time_limit_s must be a finite number of seconds from 0 up, found {show(time_limit_s)}")


def check_counts(**counts: Any) -> None:
    """Refuses what is no whole number from 0 up; None stands for a default."""
    for name, value in counts.items():
        if value is not None:
            whole_number(value, f"agent: {name}")


def start_devices(problem: Problem, start: Start) -> NDArray[np.int32]:
    """int32 [G] of a given start."""
    given = start.device_of_group if isinstance(start, PlacementPlan) else start
    try:
        return check_devices(given, (problem.num_groups,), problem)
    except InputError as error:
        raise InputError(f"agent: start must be a plan or name a device for every group: {error}") from None
