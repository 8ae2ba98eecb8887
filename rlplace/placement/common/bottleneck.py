"""Moves that shorten the critical chain of a simulated step, ranked by an estimate of what they save."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlplace.placement.common import kernels
from rlplace.placement.common.evaluate import Assignment
from rlplace.placement.common.groupgraph import group_graph
from rlplace.placement.common.oparrays import op_arrays
from rlplace.placement.common.repair import traffic
from rlplace.problem import Problem
from rlplace.simulator import Timeline

Move = list[tuple[int, int]]


def ranked_moves(problem: Problem, line: Timeline, assignment: Assignment, *, limit: int) -> list[tuple[float, Move]]:
    """Moves that shorten the critical chain of a timeline, most promising first.

    Args:
        problem: The problem.
        line: Timeline of the assignment.
        assignment: int32 [G].
        limit: Most moves to return.

    Returns:
        Rows (estimated saving in seconds, move). The groups of a move all go to one device.
    """
    if line.step_time_s is None:
        return []
    graph = group_graph(problem)
    devices = np.array(assignment, dtype=np.int32)
    saved = np.zeros((problem.num_groups, problem.num_devices))
    touched = np.zeros(saved.shape, dtype=np.bool_)
    arrival_s = np.full((problem.num_tensors, problem.num_devices), -1.0)
    arrival_s[line.transfer_tensor, line.transfer_destination] = line.transfer_end_s
    kernels.chain_savings(
        int(line.end_s.argmax()), np.lexsort((line.end_s, line.start_s)), line.device_of_op, line.start_s, line.end_s,
        arrival_s, op_arrays(problem), np.argsort(line.busy_s, kind="stable"), np.empty(problem.num_ops, dtype=np.int64),
        np.empty(problem.num_devices, dtype=np.int64), saved, touched,
    )  # fmt: skip
    _relieve_memory(problem, line, devices, saved, touched)
    touched &= problem.group_allowed
    touched[np.arange(problem.num_groups), devices] = False
    groups, targets = np.nonzero(touched)
    if len(groups) == 0:
        return []
    links = traffic(problem)
    rows = np.empty(saved.shape)
    kernels.all_communication(devices, *links, rows)
    here = devices[groups]
    added = rows[groups, targets] - rows[groups, here] + graph.time_s[groups, targets] - graph.time_s[groups, here]
    worth = saved[groups, targets] - added
    # Runs are priced for the best single moves only: a run is never far better than its first group.
    kept = np.argsort(-worth, kind="stable")[: 2 * limit]
    groups, targets, worth = groups[kept], targets[kept], worth[kept]
    low, high, cost_s = np.empty(len(kept), dtype=np.int64), np.empty(len(kept), dtype=np.int64), np.empty(len(kept))
    order = graph.depth_first_order
    kernels.run_costs(
        groups, targets, order, np.argsort(order), devices, devices.copy(), problem.group_allowed, graph.time_s, *links, low,
        high, cost_s,
    )  # fmt: skip
    runs = np.flatnonzero(low <= high)
    gains = np.concatenate([worth, saved[groups[runs], targets[runs]] - cost_s[runs]])
    least = np.sort(-gains)[:limit][-1:]  # moves are only built for rows that can be among the first
    ranked: list[tuple[float, Move]] = []
    for index in np.flatnonzero(-gains <= least).tolist():
        if index < len(kept):
            members = [int(groups[index])]
            target = int(targets[index])
        else:
            row = runs[index - len(kept)]
            target = int(targets[row])
            members = [group for group in order[low[row] : high[row] + 1].tolist() if problem.group_allowed[group, target]]
            if members[0] != groups[row]:
                members.reverse()
        ranked.append((float(gains[index]), [(member, target) for member in members]))
    ranked.sort(key=lambda item: (-item[0], item[1]))
    return ranked[:limit]


def _relieve_memory(
    problem: Problem, line: Timeline, devices: Assignment, saved: NDArray[np.float64], touched: NDArray[np.bool_]
) -> None:
    """Adds moves off overflowing devices, worth the penalty that they take away."""
    over = line.peak_memory_bytes - problem.capacity_bytes
    if not (over > 0).any():
        return
    footprint = group_graph(problem).footprint_bytes
    roomy = np.argsort(over, kind="stable").tolist()[:2]
    step = line.step_time_s or 0.0
    for device in np.flatnonzero(over > 0).tolist():
        for group in np.flatnonzero(devices == device).tolist():
            worth = 3.0 * step * min(float(footprint[group]), float(over[device])) / float(problem.capacity_bytes[device])
            for target in roomy:
                saved[group, target] += worth
                touched[group, target] = True
