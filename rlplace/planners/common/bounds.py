"""What no plan can beat: lower bounds on step time, and conditions without which no plan fits in memory.

All bounds hold for every plan with one micro-batch under the simulator's rules:

* critical path: the longest chain of ops, each on its fastest device, without transfers;
* work: fractional assignment of all groups to unlike devices, by its Lagrangian dual (any weights give a valid bound);
* largest group: a group's ops share a device, and a device runs one op at a time;
* memory: resident bytes of all groups, plus the tensors that are alive when the first backward op starts: those made by its
  ancestors and read by it or its descendants; each has a copy somewhere.

The messages of `rlplace.planners.common.shortage` are built on these.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.problem import BACKWARD, Problem
from rlplace.problem.order import reach, successor_lists


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
    """float64 [G, D], for how long each group holds a device, inf where it may not sit; ops of collectives hold none."""
    if not problem.collectives:
        return problem.group_time_s
    time_s = np.nan_to_num(problem.time_s, nan=0.0)
    time_s[[op for collective in problem.collectives for op in collective.ops]] = 0.0
    total = np.zeros((problem.num_groups, problem.num_devices))
    np.add.at(total, problem.op_group, time_s)
    total[~problem.group_allowed] = np.inf
    return total


def critical_path_s(problem: Problem) -> float:
    """Seconds of the longest chain of ops, each on its fastest device, without transfers."""
    shortest = np.where(problem.group_allowed[problem.op_group], problem.time_s, np.inf).min(axis=1)
    successors, starts = successor_lists(*problem.op_edges, problem.num_ops)
    level = shortest.tolist()
    for op in problem.topological_order[::-1].tolist():
        below = max((level[s] for s in successors[starts[op] : starts[op + 1]]), default=0.0)
        level[op] += below
    return float(max(level))


def _work(time_s: NDArray[np.float64], steps: int = 30) -> float:
    """Dual of ``min T: every group fully assigned, load of each device <= T``, by projected multiplicative steps."""
    finite = np.isfinite(time_s)
    times = np.where(finite, time_s, 0.0)
    columns = times.sum(axis=0) / np.maximum(finite.sum(axis=0), 1)
    weights = 1.0 / np.maximum(columns, 1e-30)
    weights[finite.sum(axis=0) == 0] = 0.0
    weights /= weights.sum()
    best = 0.0
    rate = 0.3
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
    """Bytes of the tensors that exist, each at least once, when the first backward op starts."""
    backward = np.flatnonzero(problem.op_phase >= BACKWARD)
    if len(backward) == 0:
        return 0
    position = np.argsort(problem.topological_order)
    # The first backward op in topological order: the gradient of the loss in a training step.
    pivot = int(backward[position[backward].argmin()])
    before, after = reach(problem, pivot, backwards=True), reach(problem, pivot, backwards=False)
    tensor = problem.edge_tensor
    producer = problem.tensor_producer
    made_before = (producer >= 0) & before[np.maximum(producer, 0)]
    made_before[producer == pivot] = False
    read_after = np.zeros(problem.num_tensors, dtype=bool)
    later = after[problem.consumers] | (problem.consumers == pivot)
    read_after[tensor[later]] = True
    return int(problem.tensor_bytes[made_before & read_after].sum())


def largest_op_bytes(problem: Problem) -> NDArray[np.float64]:
    """float64 [G], most bytes that one op of each group needs beside the resident bytes: outputs, temporaries, inputs.

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
