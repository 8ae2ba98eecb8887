"""Lower bounds on the step time of a problem's execution with micro-batches and replicas."""

from __future__ import annotations

import dataclasses

import numpy as np

from rlplace.planners.common.bounds import Bounds, device_time_s, lower_bounds
from rlplace.planners.common.memory_bound import memory_forced
from rlplace.problem import UPDATE, Problem

CRITICAL_PATH, WORK, LARGEST_GROUP, MEMORY = "critical path", "work", "largest group", "memory"
_SAME = 1e-6
"""Bounds nearer than this, relative, are equal; the simpler one is then named."""


def finite(value: float) -> float:
    """Where no plan exists there is no step time to bound; JSON has no infinity."""
    return value if np.isfinite(value) else 0.0


def largest(critical_path_s: float, work_s: float, largest_group_s: float, memory_s: float) -> tuple[float, str]:
    """The bound that binds and its name."""
    named = ((critical_path_s, CRITICAL_PATH), (work_s, WORK), (largest_group_s, LARGEST_GROUP), (memory_s, MEMORY))
    best = named[0]
    for item in named[1:]:
        if item[0] > best[0] * (1 + _SAME):
            best = item
    return best


def execution_bound(problem: Problem, microbatches: int, replicas: int) -> tuple[float, str]:
    """The largest bound for plans of so many micro-batches and replicas, and its name.

    Forward and backward ops run `microbatches` times and updates once, in each of `replicas` copies of all groups. The chain
    of ops is that of one micro-batch.
    """
    if microbatches == replicas == 1:
        times, once = device_time_s(problem), lower_bounds(problem)
    else:
        factor = np.where(problem.op_phase == UPDATE, 1.0, float(microbatches))
        repeated = dataclasses.replace(problem, time_s=problem.time_s * factor[:, None])
        times, once = device_time_s(repeated), _with_path(lower_bounds(repeated), lower_bounds(problem))
    memory = memory_forced(times * replicas, problem.resident_bytes * replicas, problem.memory_limit_bytes)
    return largest(once.critical_path_s, finite(once.work_s) * replicas, finite(once.largest_group_s), finite(memory))


def _with_path(bounds: Bounds, single: Bounds) -> Bounds:
    return dataclasses.replace(bounds, critical_path_s=single.critical_path_s)
