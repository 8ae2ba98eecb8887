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

import numpy as np

from rlplace.placement.common import listkernels
from rlplace.placement.common.earliestkernel import earliest_task_first
from rlplace.placement.common.evaluate import Assignment
from rlplace.placement.common.floor import device_subsets
from rlplace.placement.common.oparrays import empty_schedule, op_arrays, place_rest, upward_rank
from rlplace.problem import Problem


def candidates(problem: Problem, seed: int) -> Iterator[Assignment]:
    """Yields assignments for every number of devices and share of memory."""
    del seed
    limited = bool(np.isfinite(problem.memory_limit_bytes).any())
    for subset in reversed(device_subsets(problem, least=min(2, problem.num_devices))):
        for share in (1.0, 0.85) if limited else (1.0,):
            yield earliest_schedule(problem, subset, share).devices


def earliest_schedule(problem: Problem, subset: Sequence[int], share: float = 1.0) -> listkernels.Schedule:
    """List schedule: of all ready ops and devices with room for the op's group, the pair that can start earliest goes next.

    Args:
        problem: The problem.
        subset: Devices that may be used.
        share: Part of the memory that may be planned.
    """
    arrays = op_arrays(problem)
    schedule = empty_schedule(problem, subset, problem.memory_limit_bytes * share)
    earliest_task_first(upward_rank(problem, communication=False), arrays.num_made_inputs.copy(), arrays, schedule)
    place_rest(problem, schedule.devices, schedule.room)
    return schedule
