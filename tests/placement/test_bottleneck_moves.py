"""The compiled bottleneck analysis against the same analysis written down plainly."""

from collections import defaultdict

import numpy as np
import pytest

from rlplace.placement.common.groupgraph import finite_links, group_graph
from rlplace.placement.local_search import ranked_moves
from rlplace.problem.generate import random_problem
from rlplace.simulator import simulate


def plain_moves(problem, line, assignment, limit):
    """Returns rows (estimated saving, [(group, device), ...]), most promising first."""
    if line.step_time_s is None:
        return []
    devices = assignment.tolist()
    graph = group_graph(problem)
    saved = defaultdict(float)
    for group, device, seconds in remedies(problem, line, devices):
        if problem.group_allowed[group, device] and device != devices[group]:
            saved[group, device] += seconds
    relieve_memory(problem, line, devices, saved)
    singles = []
    for (group, device), seconds in saved.items():
        here = devices[group]
        added = communication(problem, devices, group, device) - communication(problem, devices, group, here)
        added = added + graph.time_s[group, device] - graph.time_s[group, here]
        singles.append((seconds - added, group, device))
    singles.sort(key=lambda item: (-item[0], item[1], item[2]))
    return [(worth, [(group, device)]) for worth, group, device in singles[:limit]]


def communication(problem, devices, group, device):
    graph = group_graph(problem)
    latency, inverse = finite_links(problem)
    total = 0.0
    for k in range(graph.neighbor_ptr[group], graph.neighbor_ptr[group + 1]):
        other, e = devices[graph.neighbor[k]], graph.neighbor_edge[k]
        if other != device:
            a, b = (device, other) if graph.neighbor_out[k] else (other, device)
            total += graph.edge_count[e] * latency[a, b] + graph.edge_bytes[e] * inverse[a, b] + graph.edge_fixed_s[e]
    return total


def remedies(problem, line, devices):
    """Yields (group, device, seconds) for every cause of delay on the critical chain."""
    idle = np.argsort(line.busy_s, kind="stable").tolist()
    for kind, earlier, later, seconds in critical_chain(problem, line):
        a, b = int(problem.op_group[earlier]), int(problem.op_group[later])
        if kind == "transfer":
            yield a, devices[b], seconds
            yield b, devices[a], seconds
        elif a != b:
            for device in [d for d in idle if d != devices[b]][:2]:
                yield a, device, seconds
                yield b, device, seconds


def critical_chain(problem, line):
    """Returns rows (kind, earlier op, later op, seconds), last first."""
    before = {}
    for device in range(problem.num_devices):
        ops = [op for op in range(problem.num_ops) if line.device_of_op[op] == device]
        ops.sort(key=lambda op: (line.start_s[op], line.end_s[op]))
        before.update(zip(ops[1:], ops[:-1], strict=True))
    sent = zip(line.transfer_tensor.tolist(), line.transfer_destination.tolist(), strict=True)
    arrival = dict(zip(sent, line.transfer_end_s.tolist(), strict=True))
    chain, op = [], int(line.end_s.argmax())
    for _ in range(2 * problem.num_ops):
        device = int(line.device_of_op[op])
        ready, cause, waited = 0.0, -1, False
        for edge in np.flatnonzero(problem.consumers == op):
            tensor = int(problem.edge_tensor[edge])
            producer = int(problem.tensor_producer[tensor])
            moved = arrival.get((tensor, device)) if producer < 0 or line.device_of_op[producer] != device else None
            at = line.end_s[producer] if moved is None and producer >= 0 else (moved or 0.0)
            if at > ready or cause < 0:
                ready, cause, waited = at, producer, moved is not None
        previous = before.get(op, -1)
        if previous >= 0 and line.end_s[previous] == line.start_s[op] > ready:
            chain.append(("device", previous, op, line.start_s[op] - ready))
            op = previous
        elif cause >= 0:
            if waited:
                chain.append(("transfer", cause, op, ready - line.end_s[cause]))
            op = cause
        else:
            break
    return chain


def relieve_memory(problem, line, devices, saved):
    limits = np.array([np.inf if d.memory_bytes is None else float(d.memory_bytes) for d in problem.devices])
    over = line.peak_memory_bytes - limits
    if not (over > 0).any():
        return
    footprint = group_graph(problem).footprint_bytes
    for device in np.flatnonzero(over > 0):
        for group in [g for g in range(problem.num_groups) if devices[g] == device]:
            worth = 3.0 * line.step_time_s * min(float(footprint[group]), float(over[device])) / float(limits[device])
            for target in np.argsort(over, kind="stable")[:2].tolist():
                if target != device and problem.group_allowed[group, target]:
                    saved[group, target] += worth


@pytest.mark.parametrize("seed", range(24))
def test_compiled_analysis_equals_the_plain_one(seed):
    """Bit for bit, on contiguous and scattered plans, with overflow, unlike devices, several hosts and tied seconds."""
    rng = np.random.default_rng(seed)
    count = (2, 3, 4, 8)[seed % 4]
    factor = (None, 0.8, 1.3)[seed % 3]
    if seed % 2:
        problem = random_problem(
            seed, 40, count, memory_factor=factor, unlike=seed % 4 == 1, hosts=1 + (count > 3), comm_ratio=2.0
        )
    else:
        problem = random_problem(seed, 30, count, memory_factor=factor or 2.0)
    groups = problem.num_groups
    order = group_graph(problem).depth_first_order
    contiguous = np.empty(groups, dtype=np.int32)
    contiguous[order] = np.arange(groups) * count // groups
    patchy = np.where(rng.random(groups) < 0.2, rng.integers(0, count, groups), contiguous).astype(np.int32)
    seen = 0
    for plan in (contiguous, patchy, rng.integers(0, count, groups).astype(np.int32)):
        line = simulate(problem, plan)
        for limit in (3, 16, 200):
            expected = plain_moves(problem, line, plan, limit)
            assert ranked_moves(problem, line, plan, limit=limit) == expected
            seen += len(expected)
    assert seen > 0
