"""An `Instance`: a problem with everything about it that does not change while it is being solved.

Axes: D devices, G groups, E directed group pairs that exchange data, A entries of the symmetric adjacency.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from rlplace.envs.memory import group_footprint_bytes, group_pinned_bytes

from rlplace.errors import InfeasibleError, InputError
from rlplace.planners import get_planner
from rlplace.planners.bounds import lower_bounds
from rlplace.problem import FORWARD, Problem


@dataclass(frozen=True, eq=False)
class Instance:
    """A problem, its classical floor, and static arrays for observations.

    Attributes:
        problem: The problem itself.
        floor: int32 [G], plan of the best classical planner; None when none is feasible.
        reference_step_time_s: Step time of `floor`, or the lower bound where there is no floor.
        order: int32 [G], groups in topological order, branches kept together.
        edge_source, edge_target: int32 [E], groups that exchange forward or backward data, by direction.
        edge_bytes: float64 [E].
        neighbour_ptr, neighbour, neighbour_bytes: Symmetric adjacency as CSR: int64 [G + 1], int32 [A], float64 [A].
        time_s: float64 [G, D], inf where the group may not sit.
        mean_time_s: float64 [G], over the devices that are allowed.
        allowed: bool [G, D].
        pinned_bytes: float64 [G], resident bytes plus saved activations that are provably live at one instant.
        footprint_bytes: float64 [G], the largest amount that one op of the group needs beside resident bytes.
        limit_bytes: float64 [D], memory minus reserved bytes; inf without limit.
        seconds_per_byte, latency_s: float64 [D, D]; inf without link, 0 on the diagonal.
        ideal_s: Sum of mean times over the number of devices: the unit of all time features.
        criticality: float64 [G] in 0..1, longest path through the group over the longest path of all.
        depth: float64 [G] in 0..1, where in the step the group's forward starts.
    """

    problem: Problem
    floor: NDArray[np.int32] | None
    reference_step_time_s: float
    order: NDArray[np.int32]
    edge_source: NDArray[np.int32]
    edge_target: NDArray[np.int32]
    edge_bytes: NDArray[np.float64]
    neighbour_ptr: NDArray[np.int64]
    neighbour: NDArray[np.int32]
    neighbour_bytes: NDArray[np.float64]
    time_s: NDArray[np.float64]
    mean_time_s: NDArray[np.float64]
    allowed: NDArray[np.bool_]
    pinned_bytes: NDArray[np.float64]
    footprint_bytes: NDArray[np.float64]
    limit_bytes: NDArray[np.float64]
    seconds_per_byte: NDArray[np.float64]
    latency_s: NDArray[np.float64]
    ideal_s: float
    criticality: NDArray[np.float64]
    depth: NDArray[np.float64]


def make_instance(
    problem: Problem,
    *,
    floor: NDArray[np.int32] | None = None,
    compute_floor: bool = True,
    order: str = "topological",
) -> Instance:
    """Prepares a problem for the environments.

    Args:
        problem: Any problem.
        floor: Plan of the best classical planner.
        compute_floor: Compute it with `best` when it is not given.
        order: One of `ORDERS`: in which order Placement-v0 asks for groups.
    """
    if order not in ORDERS:
        raise InputError(f"unknown group order {order!r}; known: {', '.join(ORDERS)}")
    step_time = None
    if floor is None and compute_floor:
        try:
            plan = get_planner("best")(problem)
            floor, step_time = plan.device_of_group, plan.predicted["step_time_s"]
        except InfeasibleError:
            floor = None
    if floor is not None and step_time is None:
        from rlplace.simulator import simulate

        step_time = simulate(problem, floor).step_time_s
    source, target, size = _group_edges(problem)
    ptr, neighbour, neighbour_bytes = _symmetric(source, target, size, problem.num_groups)
    time_s, allowed = problem.group_time_s, problem.group_allowed
    mean = np.where(allowed, time_s, 0.0).sum(axis=1) / np.maximum(allowed.sum(axis=1), 1)
    top, bottom = _levels(problem)
    through = np.zeros(problem.num_groups)
    np.maximum.at(through, problem.op_group, top + bottom)
    start = np.full(problem.num_groups, np.inf)
    np.minimum.at(start, problem.op_group, top)
    longest = max(float(through.max()), 1e-30)
    bandwidth = problem.links.bandwidth_bytes_per_s
    seconds_per_byte = np.divide(1.0, bandwidth, out=np.full_like(bandwidth, np.inf), where=bandwidth > 0)
    np.fill_diagonal(seconds_per_byte, 0.0)
    latency = problem.links.latency_s.copy()
    np.fill_diagonal(latency, 0.0)
    return Instance(
        problem=problem,
        floor=None if floor is None else np.asarray(floor, dtype=np.int32),
        reference_step_time_s=float(step_time) if step_time else lower_bounds(problem).step_time_s,
        order=ORDERS[order](problem, source, target, through),
        edge_source=source,
        edge_target=target,
        edge_bytes=size,
        neighbour_ptr=ptr,
        neighbour=neighbour,
        neighbour_bytes=neighbour_bytes,
        time_s=time_s,
        mean_time_s=mean,
        allowed=allowed,
        pinned_bytes=group_pinned_bytes(problem),
        footprint_bytes=group_footprint_bytes(problem),
        limit_bytes=problem.memory_limit_bytes,
        seconds_per_byte=seconds_per_byte,
        latency_s=latency,
        ideal_s=max(float(mean.sum()) / problem.num_devices, 1e-30),
        criticality=through / longest,
        depth=np.where(np.isfinite(start), start, 0.0) / longest,
    )


def make_instances(problems: Iterable[Problem]) -> list[Instance]:
    """Prepares several problems."""
    return [make_instance(problem) for problem in problems]


def _group_edges(problem: Problem) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.float64]]:
    """Directed group pairs and the bytes between them; a tensor counts once per receiving group."""
    tensor = problem.edge_tensor
    producer, owner = problem.tensor_producer[tensor], problem.tensor_owner[tensor]
    source = np.where(producer >= 0, problem.op_group[np.maximum(producer, 0)], owner).astype(np.int64)
    target = problem.op_group[problem.consumers].astype(np.int64)
    cross = source != target
    groups = max(problem.num_groups, 1)
    once = np.unique(tensor[cross].astype(np.int64) * groups + target[cross])
    tensor_once, target_once = once // groups, once % groups
    made = problem.tensor_producer[tensor_once]
    source_once = np.where(made >= 0, problem.op_group[np.maximum(made, 0)], problem.tensor_owner[tensor_once])
    pair, index = np.unique(source_once.astype(np.int64) * groups + target_once, return_inverse=True)
    size = np.bincount(index, weights=problem.tensor_bytes[tensor_once], minlength=len(pair)).astype(np.float64)
    return (pair // groups).astype(np.int32), (pair % groups).astype(np.int32), size


def _symmetric(
    source: NDArray[np.int32], target: NDArray[np.int32], size: NDArray[np.float64], groups: int
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.float64]]:
    one = np.concatenate([source, target]).astype(np.int64)
    other = np.concatenate([target, source]).astype(np.int64)
    pair, index = np.unique(one * max(groups, 1) + other, return_inverse=True)
    total = np.bincount(index, weights=np.concatenate([size, size]), minlength=len(pair)).astype(np.float64)
    ptr = np.searchsorted(pair // max(groups, 1), np.arange(groups + 1)).astype(np.int64)
    return ptr, (pair % max(groups, 1)).astype(np.int32), total


def _levels(problem: Problem) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Top level (longest path before) and bottom level (longest path from the start) of every op, without communication."""
    from rlplace.simulator import default_priority

    bottom = default_priority(problem)
    top = np.zeros(problem.num_ops)
    mean = np.nanmean(problem.time_s, axis=1)
    outputs: list[list[int]] = [[] for _ in range(problem.num_ops)]
    for tensor, consumer in zip(problem.edge_tensor.tolist(), problem.consumers.tolist(), strict=True):
        producer = int(problem.tensor_producer[tensor])
        if producer >= 0:
            outputs[producer].append(consumer)
    for op in problem.topological_order.tolist():
        done = top[op] + mean[op]
        for consumer in outputs[op]:
            if done > top[consumer]:
                top[consumer] = done
    return top, bottom


Order = Callable[[Problem, NDArray[np.int32], NDArray[np.int32], NDArray[np.float64]], NDArray[np.int32]]


def _topological(
    problem: Problem, source: NDArray[np.int32], target: NDArray[np.int32], through: NDArray[np.float64]
) -> NDArray[np.int32]:
    """Reverse postorder of a depth-first search over forward data: topological, and a branch stays in one piece."""
    forward = problem.op_phase == FORWARD
    first = np.full(problem.num_groups, problem.num_ops, dtype=np.int64)
    position = np.empty(problem.num_ops, dtype=np.int64)
    position[problem.topological_order] = np.arange(problem.num_ops)
    np.minimum.at(first, problem.op_group[forward], position[forward])
    later = first[source] < first[target]
    children: list[list[int]] = [[] for _ in range(problem.num_groups)]
    for parent, child in zip(source[later].tolist(), target[later].tolist(), strict=True):
        children[parent].append(child)
    roots = np.argsort(first, kind="stable").tolist()
    rank = {group: index for index, group in enumerate(roots)}
    for row in children:
        row.sort(key=lambda group: -rank[group])
    seen = np.zeros(problem.num_groups, dtype=bool)
    postorder: list[int] = []
    for root in reversed(roots):
        stack = [(root, 0)] if not seen[root] else []
        seen[root] = True
        while stack:
            group, index = stack.pop()
            if index < len(children[group]):
                stack.append((group, index + 1))
                child = children[group][index]
                if not seen[child]:
                    seen[child] = True
                    stack.append((child, 0))
            else:
                postorder.append(group)
    return np.array(postorder[::-1], dtype=np.int32)


def _by_criticality(
    problem: Problem, source: NDArray[np.int32], target: NDArray[np.int32], through: NDArray[np.float64]
) -> NDArray[np.int32]:
    return np.argsort(-through, kind="stable").astype(np.int32)


def _by_time(
    problem: Problem, source: NDArray[np.int32], target: NDArray[np.int32], through: NDArray[np.float64]
) -> NDArray[np.int32]:
    work = np.where(problem.group_allowed, problem.group_time_s, 0.0).sum(axis=1)
    return np.argsort(-work, kind="stable").astype(np.int32)


ORDERS: dict[str, Order] = {"topological": _topological, "criticality": _by_criticality, "time": _by_time}
"""Named orders in which Placement-v0 asks for groups."""
