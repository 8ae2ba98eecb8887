"""Moves that shorten the critical chain of a simulated step, ranked by an estimate of what they save."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from rlplace.planners import kernels
from rlplace.planners.evaluate import Assignment, Evaluator
from rlplace.planners.groupgraph import group_graph
from rlplace.planners.repair import traffic
from rlplace.problem import Problem
from rlplace.simulator import Timeline

Move = list[tuple[int, int]]


def propose(evaluator: Evaluator, devices: list[int], *, limit: int) -> list[Move]:
    """The most promising moves from an assignment; costs one simulator call.

    Args:
        evaluator: Simulates the assignment.
        devices: Device of every group.
        limit: Most moves to return.
    """
    assignment = np.asarray(devices, dtype=np.int32)
    ranked = ranked_moves(evaluator.problem, evaluator.timeline(assignment), assignment, limit=limit)
    return [move for _, move in ranked]


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
    devices = assignment.tolist()
    saved: dict[tuple[int, int], float] = defaultdict(float)
    for group, device, seconds in _remedies(problem, line, assignment):
        if problem.group_allowed[group, device] and device != devices[group]:
            saved[group, device] += seconds
    _relieve_memory(problem, line, assignment, saved)
    if not saved:
        return []
    links = traffic(problem)
    graph = group_graph(problem)
    groups, targets = np.array(list(saved)).T
    rows = kernels.all_communication(assignment, *links)
    here = assignment[groups]
    added = rows[groups, targets] - rows[groups, here] + graph.time_s[groups, targets] - graph.time_s[groups, here]
    worth = np.array(list(saved.values())) - added
    order, position = graph.depth_first_order.tolist(), np.argsort(graph.depth_first_order).tolist()
    ranked: list[tuple[float, Move]] = []
    # Runs are priced for the best single moves only: a run is never far better than its first group.
    for index in np.lexsort((targets, groups, -worth))[: 2 * limit].tolist():
        group, device = int(groups[index]), int(targets[index])
        ranked.append((float(worth[index]), [(group, device)]))
        run = _run(problem, devices, order, position[group], device)
        if len(run) > 1:
            gain = saved[group, device] - _run_traffic(problem, links, assignment, run, device)
            ranked.append((gain, [(member, device) for member in run]))
    ranked.sort(key=lambda item: (-item[0], item[1]))
    return ranked[:limit]


def _remedies(problem: Problem, line: Timeline, devices: Assignment) -> list[tuple[int, int, float]]:
    """(group, device, seconds) for every cause of delay on the critical chain."""
    found: list[tuple[int, int, float]] = []
    idle = np.argsort(line.busy_s, kind="stable").tolist()
    for kind, earlier, later, seconds in critical_chain(problem, line):
        a, b = int(problem.op_group[earlier]), int(problem.op_group[later])
        if kind == "transfer":
            found += [(a, int(devices[b]), seconds), (b, int(devices[a]), seconds)]
        elif a != b:
            here = int(devices[b])
            others = [d for d in idle if d != here][:2]
            found += [(group, d, seconds) for group in (a, b) for d in others]
    return found


def critical_chain(problem: Problem, line: Timeline) -> list[tuple[str, int, int, float]]:
    """Delays on the chain of events that ends the step, last first.

    Returns:
        Rows (kind, earlier op, later op, seconds). ``"transfer"``: the later op started when an input that the earlier one made
        arrived, `seconds` after it was made. ``"device"``: the later op had its inputs `seconds` before the earlier op left the
        device. An owner's tensor ends the chain.
    """
    # Views over what ends when: the op before each op on its device, and the arrival of every sent tensor.
    order = np.lexsort((line.end_s, line.start_s, line.device_of_op))
    before = np.full(problem.num_ops, -1, dtype=np.int64)
    same = line.device_of_op[order[1:]] == line.device_of_op[order[:-1]]
    before[order[1:][same]] = order[:-1][same]
    arrival = {
        (int(tensor), int(device)): float(end)
        for tensor, device, end in zip(line.transfer_tensor, line.transfer_destination, line.transfer_end_s, strict=True)
    }
    inputs = _inputs(problem)
    chain: list[tuple[str, int, int, float]] = []
    op = int(line.end_s.argmax())
    for _ in range(2 * problem.num_ops):
        device = int(line.device_of_op[op])
        ready, cause, sent = 0.0, -1, False
        for tensor in inputs[0][inputs[1][op] : inputs[1][op + 1]].tolist():
            producer = int(problem.tensor_producer[tensor])
            moved = arrival.get((tensor, device)) if producer < 0 or int(line.device_of_op[producer]) != device else None
            at = float(line.end_s[producer]) if moved is None and producer >= 0 else (moved or 0.0)
            if at > ready or cause < 0:
                ready, cause, sent = at, producer, moved is not None
        previous = int(before[op])
        if previous >= 0 and float(line.end_s[previous]) == float(line.start_s[op]) > ready:
            chain.append(("device", previous, op, float(line.start_s[op]) - ready))
            op = previous
        elif cause >= 0:
            if sent:
                chain.append(("transfer", cause, op, ready - float(line.end_s[cause])))
            op = cause
        else:
            break
    return chain


def _inputs(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    from rlplace.planners.oparrays import op_arrays

    arrays = op_arrays(problem)
    return arrays.inputs, arrays.input_ptr


def _relieve_memory(problem: Problem, line: Timeline, devices: Assignment, saved: dict[tuple[int, int], float]) -> None:
    """Adds moves off overflowing devices, worth the penalty that they take away."""
    limits = np.array([np.inf if d.memory_bytes is None else float(d.memory_bytes) for d in problem.devices])
    over = line.peak_memory_bytes - limits
    if not (over > 0).any():
        return
    footprint = group_graph(problem).footprint_bytes
    roomy = np.argsort(over, kind="stable").tolist()[:2]
    step = line.step_time_s or 0.0
    for device in np.flatnonzero(over > 0).tolist():
        for group in np.flatnonzero(devices == device).tolist():
            worth = 3.0 * step * min(float(footprint[group]), float(over[device])) / float(limits[device])
            for target in roomy:
                if target != device and problem.group_allowed[group, target]:
                    saved[group, target] += worth


def _run(problem: Problem, devices: list[int], order: list[int], start: int, device: int) -> list[int]:
    """Consecutive groups from place `start` towards the nearer neighbour in the order that already sits on `device`."""
    here = devices[order[start]]
    for step in (1, -1):
        run, at = [order[start]], start + step
        while 0 <= at < len(order) and devices[order[at]] == here and len(run) <= 64:
            run.append(order[at])
            at += step
        if 0 <= at < len(order) and devices[order[at]] == device:
            return [group for group in run if problem.group_allowed[group, device]]
    return [order[start]]


def _run_traffic(problem: Problem, links: tuple[Any, ...], devices: Assignment, run: list[int], device: int) -> float:
    """Seconds that moving a whole run adds in transfers and compute."""
    time_s = group_graph(problem).time_s
    moved = devices.copy()
    moved[run] = device
    total, row = 0.0, np.zeros(problem.num_devices)
    for group in run:
        kernels.communication_row(group, moved, *links, row)
        total += row[device]
        kernels.communication_row(group, devices, *links, row)
        total -= row[devices[group]]
        total += time_s[group, device] - time_s[group, devices[group]]
    return float(total)
