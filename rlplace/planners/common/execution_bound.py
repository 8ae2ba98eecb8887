"""Lower bounds on the step time of a problem's execution with micro-batches and replicas.

A lower bound on step time that knows memory: groups that do not fit on fast devices must run on slow ones.

Linear program: groups are spread over devices in fractions, no device works longer than T, and no device holds more resident
bytes than it has; the least T. Any plan is such an assignment, with whole groups and activations on top, so T bounds its step
time. Without memory limits, or with like devices, it equals the work bound of `rlplace.planners.common.bounds`. The value is
computed from the solver's dual prices by weak duality, so that it holds whatever the solver's tolerance.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from rlplace.planners.common.bounds import Bounds, device_time_s, lower_bounds
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


def memory_forced(time_s: NDArray[np.float64], resident_bytes: NDArray[np.int64], limit_bytes: NDArray[np.float64]) -> float:
    """The same from arrays.

    Args:
        time_s: float64 [G, D], inf where a group may not sit.
        resident_bytes: int64 [G].
        limit_bytes: float64 [D], inf without a limit.
    """
    from scipy.optimize import linprog
    from scipy.sparse import csr_matrix

    groups, devices = time_s.shape
    group, device = np.nonzero(np.isfinite(time_s))
    if len(group) == 0:
        return 0.0
    seconds = time_s[group, device]
    scale_s = float(seconds.max())
    if scale_s <= 0.0:
        return 0.0
    limited = np.flatnonzero(np.isfinite(limit_bytes))
    if (limit_bytes[limited] < 0).any():
        return float("inf")
    row_of = np.full(devices, -1)
    row_of[limited] = devices + np.arange(len(limited))
    scale_bytes = max(1.0, float(resident_bytes.max(initial=0)))
    held = row_of[device] >= 0
    count = len(group)
    columns = np.arange(count)
    upper = csr_matrix(
        (
            np.concatenate([seconds / scale_s, resident_bytes[group[held]] / scale_bytes, np.full(devices, -1.0)]),
            (
                np.concatenate([device, row_of[device[held]], np.arange(devices)]),
                np.concatenate([columns, columns[held], np.full(devices, count)]),
            ),
        ),
        shape=(devices + len(limited), count + 1),
    )
    room = np.concatenate([np.zeros(devices), limit_bytes[limited] / scale_bytes])
    once = csr_matrix((np.ones(count), (group, columns)), shape=(groups, count + 1))
    cost = np.zeros(count + 1)
    cost[count] = 1.0
    solution = linprog(cost, A_ub=upper, b_ub=room, A_eq=once, b_eq=np.ones(groups), method="highs")
    if solution.status == 2:
        return float("inf")
    if solution.ineqlin is None or solution.status != 0:
        return 0.0  # no bound is a bound
    price = np.maximum(-solution.ineqlin.marginals, 0.0)
    load, memory = price[:devices], price[devices:]
    if load.sum() <= 0.0:
        return 0.0
    load, memory = load / load.sum(), memory / load.sum()
    charge = np.full(time_s.shape, np.inf)
    per_device = np.zeros(devices)
    per_device[limited] = memory
    charge[group, device] = seconds / scale_s * load[device] + resident_bytes[group] / scale_bytes * per_device[device]
    bound = float(charge.min(axis=1).sum() - memory @ room[devices:])
    return max(0.0, bound * scale_s)


def least_devices(needed_bytes: float, limit_bytes: NDArray[np.float64]) -> int | None:
    """Smallest number of devices, the largest ones, that hold so many bytes; None when all together do not."""
    total = np.cumsum(np.sort(np.maximum(limit_bytes, 0.0))[::-1])
    enough = np.flatnonzero(total >= needed_bytes)
    return int(enough[0]) + 1 if len(enough) else None
