"""Step 2 of ParDNN: making a mapping fit.

H1 reads the times of the step off a run, tracks the memory consumption of every device over its events, and where
one passes its limit moves groups away: a greedy min-knapsack over what a move costs (the group's time and its transfers with
neighbours on the device) and what it frees there now. Then the step is run again with the new devices, until nothing passes.

H2 runs nothing: it moves groups with resident bytes from heavy to light devices until every device has its share of resident
and of produced bytes together.

Limits are the devices' memory less a reserve, a tenth in the paper, and less their reserved bytes.

Memory is the paper's own account (Mcons) over the events of that run, not the executor's (`rlplace.simulator.ledger`), by which
the plan is judged afterwards like any other.

Departures. Groups are moved. One overflow frees a little more than it must, so that the next op does not overflow again. The
paper sweeps once; times change when ops move, so this one repeats until the run with the new devices stays under the limits.
Of the devices with room now, those with room at their peak come first, then the one with the cheapest transfers.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from rlplace.placement.common.evaluate import Assignment
from rlplace.placement.common.groupgraph import group_graph, mean_link
from rlplace.placement.common.oparrays import op_arrays
from rlplace.placement.published.pardnn import sweep_kernel as kernels
from rlplace.problem import Problem
from rlplace.simulator import Timeline

RESERVE = 0.1
"""Share of a device's memory that stays free."""

ROUNDS = 12
"""Runs and sweeps of one call of `reduce_peaks`."""

SLACK = 0.01
"""Bytes that a move frees beyond the overflow, relative to the limit."""

MAX_MOVED = 0.15
"""Share of the ops that H1 may move in all; one op always may."""


def limits(problem: Problem, reserve: float = RESERVE) -> NDArray[np.float64]:
    """Returns float64 [D], bytes that Mcons may reach."""
    total = problem.capacity_bytes
    return (1.0 - reserve) * total - np.array([d.reserved_bytes for d in problem.devices], dtype=np.float64)


def peak_bytes(problem: Problem, devices: Assignment, run: Timeline) -> NDArray[np.float64]:
    """Returns float64 [D], peaks of Mcons over a run, with resident bytes, without the devices' reserved ones."""
    return _sweep(problem, devices.copy(), run, np.full(problem.num_devices, np.inf), 0)[1]


def reduce_peaks(
    problem: Problem, devices: Assignment, run_of: Callable[[Assignment], Timeline], *, reserve: float = RESERVE
) -> Assignment:
    """Moves groups by heuristic H1.

    Args:
        problem: The problem.
        devices: int32 [G], legal; not changed.
        run_of: Runs an assignment.
        reserve: Share of every device's memory that stays free.

    Returns:
        int32 [G], the assignment of least overflow that was met.
    """
    limit = limits(problem, reserve)
    ops_of = np.bincount(problem.op_group, minlength=problem.num_groups)
    movable = problem.group_allowed.sum(axis=1) > 1
    budget = max(1, int(MAX_MOVED * problem.num_ops))
    current = devices.astype(np.int32)
    best, least = current, np.inf
    for rounds_left in reversed(range(ROUNDS)):
        run = run_of(current)
        peak = peak_bytes(problem, current, run)
        over = float((np.maximum(peak - limit, 0.0) / np.maximum(limit, 1.0))[np.isfinite(limit)].sum())
        if over < least:
            best, least = current, over
        left = budget - int(ops_of[current != devices].sum())
        if over == 0.0 or rounds_left == 0 or left <= 0:
            break
        following = current.copy()
        moves, _ = _sweep(problem, following, run, limit, left, peak=peak, movable=movable)
        if moves == 0:
            break
        current = following
    return best


def balance_residents(problem: Problem, devices: Assignment, tolerance: float = 0.02) -> Assignment:
    """Moves groups with resident bytes by heuristic H2, until D/2 x (share of resident + share of produced bytes) is about 1.

    Args:
        problem: The problem.
        devices: int32 [G], legal; not changed.
        tolerance: Allowed excess of a device above 1.

    Returns:
        int32 [G].
    """
    result = devices.astype(np.int32)
    graph = group_graph(problem)
    count = problem.num_devices
    produced = problem.tensor_producer >= 0
    outputs = np.bincount(
        problem.op_group[problem.tensor_producer[produced]], weights=problem.tensor_bytes[produced], minlength=len(result)
    )
    resident = problem.resident_bytes.astype(np.float64)
    share = 0.5 * count * (resident / max(resident.sum(), 1.0) + outputs / max(outputs.sum(), 1.0))
    load = np.bincount(result, weights=share, minlength=count)
    latency, inverse = mean_link(problem)
    cost = graph.mean_time_s + np.bincount(
        np.concatenate([graph.source, graph.target]), weights=np.tile(graph.edge_s(latency, inverse), 2), minlength=len(result)
    )
    # Cheap moves of many bytes first.
    order = np.argsort(cost / np.maximum(resident, 1e-9), kind="stable")
    for group in order[resident[order] > 0]:
        home = int(result[group])
        if load[home] <= 1.0 + tolerance:
            continue
        after = np.where(problem.group_allowed[group], load + share[group], np.inf)
        after[home] = np.inf
        target = int(after.argmin())
        if after[target] < load[home]:
            load[home] -= share[group]
            load[target] += share[group]
            result[group] = target
    return result


def _sweep(
    problem: Problem,
    devices: Assignment,
    run: Timeline,
    limit: NDArray[np.float64],
    moves: int,
    *,
    peak: NDArray[np.float64] | None = None,
    movable: NDArray[np.bool_] | None = None,
) -> tuple[int, NDArray[np.float64]]:
    """Returns moves made and float64 [D] peaks; changes `devices`."""
    a = op_arrays(problem)
    ops, tensors, count, groups = problem.num_ops, problem.num_tensors, problem.num_devices, problem.num_groups
    by_group = np.argsort(problem.op_group, kind="stable").astype(np.int32)
    latency, inverse = mean_link(problem)
    facts = kernels.SweepFacts(
        a=a,
        cost_s=latency + a.size * inverse,
        ops_ptr=np.searchsorted(problem.op_group[by_group], np.arange(groups + 1)).astype(np.int64),
        ops=by_group,
        temporary=problem.temporary_bytes.astype(np.float64),
        resident=problem.resident_bytes.astype(np.float64),
        group_time=np.ascontiguousarray(group_graph(problem).time_s),
        movable=np.ones(groups, dtype=bool) if movable is None else movable,
        limit=limit,
    )
    uses = np.zeros((tensors, count), dtype=np.int32)
    np.add.at(uses, (problem.edge_tensor, devices[problem.op_group[problem.consumers]]), 1)
    memory = np.bincount(devices, weights=problem.resident_bytes, minlength=count).astype(np.float64)
    state = kernels.SweepState(
        devices=devices,
        phase=np.zeros(ops, dtype=np.int8),
        uses=uses,
        sends=np.bincount(run.transfer_tensor, minlength=tensors).astype(np.int32),
        held=np.zeros((tensors, count), dtype=bool),
        rerouted=np.zeros(tensors, dtype=bool),
        memory=memory,
        peak=memory.copy(),
        room=np.full(count, np.inf) if peak is None else limit - peak,
        seen=np.zeros((tensors, 2), dtype=np.int64),
        stamp=np.zeros(1, dtype=np.int64),
    )
    slack = SLACK * np.where(np.isfinite(limit), limit, 0.0)
    return int(kernels.sweep(*_events(run), moves, slack, facts, state)), state.peak


def _events(run: Timeline) -> tuple[NDArray[np.int8], NDArray[np.int32], NDArray[np.int32]]:
    """Returns kind, op or tensor, and device (-1 for ops) of all events, in order."""
    ops, sends = len(run.start_s), len(run.transfer_tensor)
    ends = np.where(run.end_s <= run.start_s, kernels.OP_END_AT_ONCE, kernels.OP_END)
    fixed = [np.full(n, k) for n, k in ((sends, kernels.ARRIVED), (sends, kernels.SENT), (ops, kernels.OP_START))]
    kind = np.concatenate([ends, *fixed]).astype(np.int8)
    number, none = np.arange(ops, dtype=np.int32), np.full(ops, -1, dtype=np.int32)
    order = np.lexsort((kind, np.concatenate([run.end_s, run.transfer_end_s, run.transfer_start_s, run.start_s])))
    item = np.concatenate([number, run.transfer_tensor, run.transfer_tensor, number]).astype(np.int32)
    device = np.concatenate([none, run.transfer_destination, run.transfer_destination, none]).astype(np.int32)
    return kind[order], item[order], device[order]
