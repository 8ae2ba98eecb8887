"""Lower bounds on the step time of any plan, and conditions without which no plan fits in memory.

All bounds hold for every plan under the simulator's rules:

* critical path: the longest chain of ops, each on its fastest device, without transfers;
* work: fractional assignment of all groups to unlike devices, by its Lagrangian dual (any weights give a valid bound);
* largest group: a group's ops share a device, and a device runs one op at a time;
* memory: resident bytes of all groups, plus the tensors that are alive when the first backward op starts: those made by its
  ancestors and read by it or its descendants; each has a copy somewhere.

* work with memory: groups that do not fit on fast devices must run on slow ones. A linear program spreads groups over devices
  in fractions, no device works longer than T, and none holds more resident bytes than it has; the least T. Any plan is such an
  assignment, with whole groups and activations on top. Without memory limits, or with like devices, it equals the work bound.
  The value is computed from the solver's dual prices by weak duality, so that it holds whatever the solver's tolerance.

The messages of `rlplace.placement.common.shortage` are built on these.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.problem import BACKWARD, Problem
from rlplace.problem.order import longest_ways, reach


@dataclass(frozen=True)
class Bounds:
    """Lower bounds of a problem.

    Attributes:
        critical_path_s: Longest chain of ops at their fastest times.
        work_s: All work spread over all devices.
        largest_group_s: Longest group on its fastest device.
        resident_bytes: Resident bytes of all groups.
        live_bytes: Activations that must exist at one moment, in addition.
        capacity_bytes: Memory of all devices without reserved bytes; inf when a device has no limit.
    """

    critical_path_s: float
    work_s: float
    largest_group_s: float
    resident_bytes: int
    live_bytes: int
    capacity_bytes: float

    @property
    def step_time_s(self) -> float:
        """The largest of the three bounds on step time."""
        return max(self.critical_path_s, self.work_s, self.largest_group_s)


def lower_bounds(problem: Problem) -> Bounds:
    """Computes all bounds; seconds and bytes."""
    occupied_s = device_time_s(problem)
    return Bounds(
        critical_path_s=critical_path_s(problem),
        work_s=_work(occupied_s),
        largest_group_s=float(occupied_s.min(axis=1).max(initial=0.0)),
        resident_bytes=int(problem.resident_bytes.sum()),
        live_bytes=live_bytes(problem),
        capacity_bytes=float(problem.memory_limit_bytes.sum()),
    )


def device_time_s(problem: Problem) -> NDArray[np.float64]:
    """Returns float64 [G, D], seconds for which each group occupies a device, inf where barred; collectives occupy none."""
    if not problem.collectives:
        return problem.group_time_s
    time_s = np.nan_to_num(problem.time_s, nan=0.0)
    time_s[[op for collective in problem.collectives for op in collective.ops]] = 0.0
    total = np.zeros((problem.num_groups, problem.num_devices))
    np.add.at(total, problem.op_group, time_s)
    total[~problem.group_allowed] = np.inf
    return total


def critical_path_s(problem: Problem) -> float:
    """Returns seconds of the longest chain of ops, each on its fastest device, without transfers."""
    shortest = np.where(problem.group_allowed[problem.op_group], problem.time_s, np.inf).min(axis=1)
    return float((shortest + longest_ways(problem, shortest.tolist(), backwards=True)).max())


def _work(time_s: NDArray[np.float64], steps: int = 30) -> float:
    """Returns the dual of ``min T: every group fully assigned, load of each device <= T``, by multiplicative steps."""
    finite = np.isfinite(time_s)
    times = np.where(finite, time_s, 0.0)
    columns = times.sum(axis=0) / np.maximum(finite.sum(axis=0), 1)
    weights = 1.0 / np.maximum(columns, 1e-30)
    weights[finite.sum(axis=0) == 0] = 0.0
    weights /= weights.sum()
    best, rate = 0.0, 0.3
    for _ in range(steps):
        priced = np.where(finite, times * weights, np.inf)
        choice = priced.argmin(axis=1)
        picked = priced[np.arange(len(priced)), choice]
        best = max(best, float(picked.sum()))
        # Ties go to all devices that attain the minimum, so that like devices keep equal weights.
        ties = priced <= picked[:, None] * (1 + 1e-9)
        share = ties / ties.sum(axis=1, keepdims=True)
        load = (times * share).sum(axis=0)
        top = load.max()
        if top <= 0.0:
            break
        weights = weights * np.exp(rate * (load / top - (weights * load).sum() / top))
        weights /= weights.sum()
        rate *= 0.9
    return best


def live_bytes(problem: Problem) -> int:
    """Returns bytes of the tensors that exist, each at least once, when the first backward op starts."""
    backward = np.flatnonzero(problem.op_phase >= BACKWARD)
    if len(backward) == 0:
        return 0
    position = np.argsort(problem.topological_order)
    # The first backward op in topological order: the gradient of the loss in a training step.
    pivot = int(backward[position[backward].argmin()])
    before, after = reach(problem, pivot, backwards=True), reach(problem, pivot, backwards=False)
    producer = problem.tensor_producer
    made_before = (producer >= 0) & before[np.maximum(producer, 0)] & (producer != pivot)
    read_after = np.zeros(problem.num_tensors, dtype=bool)
    later = after[problem.consumers] | (problem.consumers == pivot)
    read_after[problem.edge_tensor[later]] = True
    return int(problem.tensor_bytes[made_before & read_after].sum())


def largest_op_bytes(problem: Problem) -> NDArray[np.float64]:
    """Returns float64 [G], most bytes that one op of each group needs beside the resident bytes: outputs, temporaries, inputs.

    Inputs that live in some group's resident bytes are left out: they may cost nothing more.
    """
    need = problem.temporary_bytes.astype(np.float64)
    producer = problem.tensor_producer
    produced = producer >= 0
    np.add.at(need, producer[produced], problem.tensor_bytes[produced])
    edges = produced[problem.edge_tensor]
    np.add.at(need, problem.consumers[edges], problem.tensor_bytes[problem.edge_tensor[edges]])
    largest = np.zeros(problem.num_groups)
    np.maximum.at(largest, problem.op_group, need)
    return largest


CRITICAL_PATH, WORK, LARGEST_GROUP, MEMORY = "critical path", "work", "largest group", "memory"
_SAME = 1e-6
"""Bounds nearer than this, relative, are equal; the simpler one is then named."""


def finite(value: float) -> float:
    """Returns a bound for JSON, which has no infinity: 0 where no plan exists, so that there is no step time to bound."""
    return value if np.isfinite(value) else 0.0


def largest(critical_path_s: float, work_s: float, largest_group_s: float, memory_s: float) -> tuple[float, str]:
    """Returns the bound that binds and its name."""
    named = ((critical_path_s, CRITICAL_PATH), (work_s, WORK), (largest_group_s, LARGEST_GROUP), (memory_s, MEMORY))
    best = named[0]
    for item in named[1:]:
        if item[0] > best[0] * (1 + _SAME):
            best = item
    return best


def largest_bound(problem: Problem) -> tuple[float, str]:
    """Returns the largest bound on the step time of a plan, and its name."""
    once = lower_bounds(problem)
    memory = memory_forced(device_time_s(problem), problem.resident_bytes, problem.memory_limit_bytes)
    return largest(once.critical_path_s, finite(once.work_s), finite(once.largest_group_s), finite(memory))


def memory_forced(time_s: NDArray[np.float64], resident_bytes: NDArray[np.int64], limit_bytes: NDArray[np.float64]) -> float:
    """Returns the least seconds of a step by the linear program of work with memory; inf where memory is too small.

    Args:
        time_s: float64 [G, D], inf where a group is not allowed.
        resident_bytes: int64 [G].
        limit_bytes: float64 [D], inf without a limit.
    """
    from scipy.optimize import linprog
    from scipy.sparse import bmat, csr_matrix

    groups, devices = time_s.shape
    group, device = np.nonzero(np.isfinite(time_s))
    if len(group) == 0:
        return 0.0
    seconds, count = time_s[group, device], len(group)
    scale_s, scale_bytes = float(seconds.max()), max(1.0, float(resident_bytes.max(initial=0)))
    if scale_s <= 0.0:
        return 0.0
    limited = np.flatnonzero(np.isfinite(limit_bytes))
    if (limit_bytes[limited] < 0).any():
        return float("inf")
    columns, room = np.arange(count), limit_bytes[limited] / scale_bytes
    loads = csr_matrix((seconds / scale_s, (device, columns)), shape=(devices, count))
    sizes = csr_matrix((resident_bytes[group] / scale_bytes, (device, columns)), shape=(devices, count))[limited]
    solution = linprog(
        np.append(np.zeros(count), 1.0),
        A_ub=bmat([[loads, -np.ones((devices, 1))], [sizes, None]], format="csr"),
        b_ub=np.concatenate([np.zeros(devices), room]),
        A_eq=csr_matrix((np.ones(count), (group, columns)), shape=(groups, count + 1)),
        b_eq=np.ones(groups),
        method="highs",
    )
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
    bound = float(charge.min(axis=1).sum() - memory @ room)
    return max(0.0, bound * scale_s)


def least_devices(needed_bytes: float, limit_bytes: NDArray[np.float64]) -> int | None:
    """Returns the smallest number of devices, largest ones first, that hold these bytes; None when all together do not."""
    total = np.cumsum(np.sort(np.maximum(limit_bytes, 0.0))[::-1])
    enough = np.flatnonzero(total >= needed_bytes)
    return int(enough[0]) + 1 if len(enough) else None
