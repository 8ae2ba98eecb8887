"""Groups dealt out to devices in turn, in topological order: the plan that balances counts and ignores traffic."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from rlplace.plan import PlacementPlan
from rlplace.planners.common.evaluate import Assignment
from rlplace.planners.common.floor import one_shot
from rlplace.planners.common.groupgraph import group_graph
from rlplace.problem import Problem


def round_robin(problem: Problem, *, seed: int = 0, time_limit_s: float | None = None, **execution: Any) -> PlacementPlan:
    """Device ``i mod D`` for the i-th group; repaired where that does not fit."""
    return one_shot(problem, "round_robin", candidates, seed=seed, time_limit_s=time_limit_s, **execution)


def candidates(problem: Problem, seed: int) -> Iterator[Assignment]:
    """The one assignment."""
    del seed
    devices = np.empty(problem.num_groups, dtype=np.int32)
    devices[group_graph(problem).order] = np.arange(problem.num_groups) % problem.num_devices
    yield devices
