"""Memory in use over a step: the allocations and frees of `rlplace.cost.lifetimes`, added up."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.cost.lifetimes import lifetimes
from rlplace.plan.plan import PlacementPlan
from rlplace.problem import Problem
from rlplace.simulator.timeline import Timeline, resident_by_device


@dataclass(frozen=True, eq=False)
class MemoryCurve:
    """Bytes in use on one device, a step function with P points.

    Attributes:
        time_s: float64 [P], ascending; several points may have the same time.
        in_use_bytes: int64 [P], from this point to the next one, resident and reserved bytes included.
    """

    time_s: NDArray[np.float64]
    in_use_bytes: NDArray[np.int64]

    @property
    def peak_bytes(self) -> int:
        """The largest value."""
        return int(self.in_use_bytes.max())

    def thinned(self, points: int) -> MemoryCurve:
        """Returns a curve of at most `points` points (at least 8): first, lowest, highest and last one of every stretch."""
        count = len(self.time_s)
        if count <= points:
            return self
        buckets = max(1, points // 4 - 1)
        bucket = np.arange(count) * buckets // count
        sort = np.lexsort((self.in_use_bytes, bucket))
        first = np.flatnonzero(np.diff(bucket, prepend=-1))
        last = np.append(first[1:], count) - 1
        kept = np.unique(np.concatenate([first, last, sort[first], sort[last], [int(self.in_use_bytes.argmax())]]))
        return MemoryCurve(self.time_s[kept], self.in_use_bytes[kept])


def memory_curves(problem: Problem, plan: PlacementPlan, timeline: Timeline) -> list[MemoryCurve]:
    """Returns the memory of every device over the step; its maximum is the simulator's peak.

    Args:
        problem: The simulated problem.
        plan: A plan for it.
        timeline: Its timeline. When the step does not complete, the curves are the resident bytes.
    """
    resident = resident_by_device(problem, np.asarray(plan.device_of_group, dtype=np.int32)).tolist()
    if timeline.step_time_s is None:
        return [MemoryCurve(np.zeros(1), np.array([size])) for size in resident]
    life = lifetimes(problem, plan)
    curves = []
    for device, size in enumerate(resident):
        here = life.device[life.item] == device
        times = np.concatenate([[0.0], life.time_s[here], [timeline.step_time_s]])
        live = np.concatenate([[0], life.live_bytes(device)[here]])
        curves.append(MemoryCurve(times, size + np.append(live, live[-1])))
    return curves
