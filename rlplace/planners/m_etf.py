"""m-ETF: earliest task first, with memory.

Problem: makespan on devices of limited memory. Of all ready ops and all devices with room for the op's group, the pair that
can start earliest goes next; ties go to the op with the longest path to the end.

Paper: Jeon et al., "Baechi: fast device placement of machine learning graphs", SoCC 2020, algorithm m-ETF; the memory-free
rule is Hwang, Chow, Anger, Lee, "Scheduling precedence graphs in systems with interprocessor communication times", SIAM
Journal on Computing 18(2), 1989.

Departures: a whole group (forward, backward and update) is placed when its first op is; room is counted by footprint
(resident bytes plus saved activations) instead of Baechi's replay of allocations, the exact peak is checked by simulation;
transfers queue for the problem's channels instead of one channel per device; when inputs can be on a device is estimated when
an op becomes ready, and again only when it is taken, while Baechi renews the estimate with every transfer; ties go by priority
instead of topological order; candidates differ in the number of devices and in the share of memory that may be planned (all of
it, or 85 %).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.plan import PlacementPlan
from rlplace.planners.common import listkernels
from rlplace.planners.common.earliest import schedule_earliest
from rlplace.planners.common.evaluate import Assignment
from rlplace.planners.common.floor import one_shot
from rlplace.planners.common.subsets import device_subsets
from rlplace.problem import Problem


def m_etf(problem: Problem, *, seed: int = 0, time_limit_s: float | None = None, **execution: Any) -> PlacementPlan:
    """The best of m-ETF's assignments; see the module docstring."""
    return one_shot(problem, "m_etf", candidates, seed=seed, time_limit_s=time_limit_s, **execution)


def candidates(problem: Problem, seed: int) -> Iterator[Assignment]:
    """Assignments for every number of devices and share of memory."""
    del seed
    limited = bool(np.isfinite(problem.memory_limit_bytes).any())
    for subset in reversed(device_subsets(problem, least=min(2, problem.num_devices))):
        for share in (1.0, 0.85) if limited else (1.0,):
            yield earliest_task_first(problem, subset, share)[0]


def earliest_task_first(
    problem: Problem, subset: Sequence[int], share: float = 1.0
) -> tuple[Assignment, NDArray[np.float64], NDArray[np.float64]]:
    """Runs m-ETF on a subset of devices with a share of their memory.

    Returns:
        int32 [G] devices, and m-ETF's own start and finish times, float64 [N] seconds.
    """
    devices, start, finish, _ = schedule_earliest(
        problem, subset, share, lambda state, graph: listkernels.earliest_task_first(*state, *graph)
    )
    return devices, start, finish
