"""A `PlacementInstance`: a problem with all that stays constant while it is solved.

Axes: D devices, G groups.

Proven lower bounds of the live memory that a group brings to its device, wherever everything else sits.

Two facts hold for every plan. (1) When an op runs, its outputs, its temporaries and copies of all its inputs are on its
device; inputs owned by the op's own group are resident already, inputs owned by others are counted only when produced,
since an owner may share the device. (2) A tensor whose producer and one consumer are in the same group stays on that
group's device from the start of the producer to the end of the consumer; all such tensors whose producer is an ancestor of
one pivot op and whose consumer is a descendant of it are live while the pivot runs. So for a device holding a set S of groups

    peak >= reserved + sum over S of resident + max(sum over S of saved at the pivot, max over S of footprint).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InfeasibleError
from rlplace.placement import get_planner
from rlplace.placement.common.bounds import largest_op_bytes, lower_bounds
from rlplace.placement.common.evaluate import UNFIT_S, objective_s
from rlplace.placement.common.groupgraph import GroupGraph, finite_links, group_graph
from rlplace.placement.common.oparrays import upward_rank
from rlplace.placement.common.shortage import check_possible
from rlplace.problem import BACKWARD, FORWARD, Problem
from rlplace.problem.order import longest_ways, reach
from rlplace.simulator import default_priority, simulate


@dataclass(frozen=True, eq=False)
class PlacementInstance:
    """A problem, its classical floor, and static arrays for observations.

    Attributes:
        problem: The problem.
        graph: Its group graph.
        floor: int32 [G], plan of the best classical planner; None when none is feasible.
        reference_step_time_s: Step time of `floor`, or the lower bound where there is no floor.
        order: int32 [G], in which construction places the groups: a branch at a time, see `side_by_side`.
        position: int32 [G], place of each group in the depth-first order of the graph.
        neighbor_bytes: float64, bytes of every entry of ``graph.neighbor``.
        allowed: bool [G, D], allowed devices of each group.
        pinned_bytes: float64 [G], resident bytes plus saved activations that are provably live at one instant.
        footprint_bytes: float64 [G], the largest amount that one op of the group needs beside resident bytes.
        made_bytes: float64 [G], resident bytes and those of all tensors that the group produces.
        limit_bytes: float64 [D], memory minus reserved bytes; inf without limit.
        seconds_per_byte, latency_s: float64 [D, D], 0 on the diagonal; a missing link counts as a very slow one.
        ideal_s: Sum of mean times over the number of devices: the unit of all time features.
        criticality: float64 [G] in 0..1, longest path through the group over the longest path of all.
        depth: float64 [G] in 0..1, where in the step the group's forward starts.
    """

    problem: Problem
    graph: GroupGraph
    floor: NDArray[np.int32] | None
    reference_step_time_s: float
    order: NDArray[np.int32]
    position: NDArray[np.int32]
    neighbor_bytes: NDArray[np.float64]
    allowed: NDArray[np.bool_]
    pinned_bytes: NDArray[np.float64]
    footprint_bytes: NDArray[np.float64]
    made_bytes: NDArray[np.float64]
    limit_bytes: NDArray[np.float64]
    seconds_per_byte: NDArray[np.float64]
    latency_s: NDArray[np.float64]
    ideal_s: float
    criticality: NDArray[np.float64]
    depth: NDArray[np.float64]

    def columns(self) -> dict[str, Any]:
        """Returns the arrays of graph and instance by name, with resident bytes; of those in both, the instance's."""
        return {**vars(self.graph), **vars(self), "resident_bytes": self.problem.resident_bytes}


def make_instance(
    problem: Problem,
    *,
    floor: NDArray[np.int32] | None = None,
    compute_floor: bool = True,
) -> PlacementInstance:
    """Prepares a problem for the environments.

    Args:
        problem: Any problem.
        floor: Plan of the best classical planner.
        compute_floor: Compute it with `best` when it is not given.

    Raises:
        InfeasibleError: A group is allowed nowhere. (Problems without a plan that fits the memory are accepted.)
    """
    if not problem.group_allowed.any(axis=1).all():
        check_possible(problem)
    if floor is None and compute_floor:
        try:
            floor = get_planner("best")(problem).device_of_group
        except InfeasibleError:
            floor = None
    step_time = None if floor is None else simulate(problem, floor).step_time_s
    graph = group_graph(problem)
    through, start = _paths(problem)
    longest = max(float(through.max()), 1e-30)
    latency, seconds_per_byte = finite_links(problem)
    return PlacementInstance(
        problem=problem,
        graph=graph,
        floor=None if floor is None else np.asarray(floor, dtype=np.int32),
        reference_step_time_s=float(step_time) if step_time else max(lower_bounds(problem).step_time_s, SHORTEST_S),
        order=graph.depth_first_order,
        position=np.argsort(graph.depth_first_order, kind="stable").astype(np.int32),
        neighbor_bytes=graph.edge_bytes[graph.neighbor_edge].astype(np.float64),
        allowed=problem.group_allowed,
        pinned_bytes=group_pinned_bytes(problem),
        footprint_bytes=largest_op_bytes(problem),
        made_bytes=group_made_bytes(problem),
        limit_bytes=problem.memory_limit_bytes,
        seconds_per_byte=seconds_per_byte,
        latency_s=latency,
        ideal_s=max(float(graph.mean_time_s.sum()) / problem.num_devices, 1e-30),
        criticality=through / longest,
        depth=np.where(np.isfinite(start), start, 0.0) / longest,
    )


def side_by_side(instance: PlacementInstance) -> PlacementInstance:
    """Returns the same instance, whose groups construction places by falling upward rank, as `heft` does: branches side by
    side.
    """
    rank = np.full(instance.problem.num_groups, -np.inf)
    np.maximum.at(rank, instance.problem.op_group, upward_rank(instance.problem, communication=True))
    return dataclasses.replace(instance, order=np.argsort(-rank, kind="stable").astype(np.int32))


def _paths(problem: Problem) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns per group the longest path through one of its ops and the earliest start of one, without communication."""
    bottom = default_priority(problem)
    top = np.array(longest_ways(problem, np.nanmean(problem.time_s, axis=1).tolist(), backwards=False), dtype=np.float64)
    through, start = np.zeros(problem.num_groups), np.full(problem.num_groups, np.inf)
    np.maximum.at(through, problem.op_group, top + bottom)
    np.minimum.at(start, problem.op_group, top)
    return through, start


def group_made_bytes(problem: Problem) -> NDArray[np.float64]:
    """Returns float64 [G], resident bytes and bytes of all tensors that a group produces."""
    made = problem.resident_bytes.astype(np.float64)
    is_output = problem.tensor_producer >= 0
    np.add.at(made, problem.op_group[problem.tensor_producer[is_output]], problem.tensor_bytes[is_output])
    return made


_PIVOT_CANDIDATES = 4


def group_saved_bytes(problem: Problem) -> NDArray[np.float64]:
    """Returns float64 [G], fact (2) at the pivot that gives the largest total."""
    tensor = problem.edge_tensor
    producer = problem.tensor_producer[tensor]
    inner = (producer >= 0) & (problem.op_group[np.maximum(producer, 0)] == problem.op_group[problem.consumers])
    inner &= problem.tensor_bytes[tensor] > 0
    best = np.zeros(problem.num_groups)
    for pivot in _pivots(problem):
        before, after = reach(problem, pivot, backwards=True), reach(problem, pivot, backwards=False)
        before[pivot] = after[pivot] = True
        live = inner & before[np.maximum(producer, 0)] & after[problem.consumers]
        live_tensor = np.unique(tensor[live])
        saved = np.zeros(problem.num_groups)
        np.add.at(saved, problem.op_group[problem.tensor_producer[live_tensor]], problem.tensor_bytes[live_tensor])
        if saved.sum() > best.sum():
            best = saved
    return best


def group_pinned_bytes(problem: Problem) -> NDArray[np.float64]:
    """Returns float64 [G], resident bytes plus `group_saved_bytes`."""
    return problem.resident_bytes + group_saved_bytes(problem)


def _pivots(problem: Problem) -> list[int]:
    """Returns last forward and first backward ops in topological order: where most saved activations are live."""
    phase = problem.op_phase[problem.topological_order]
    forward = problem.topological_order[phase == FORWARD][-_PIVOT_CANDIDATES:]
    backward = problem.topological_order[phase == BACKWARD][:_PIVOT_CANDIDATES]
    return [*forward.tolist(), *backward.tolist()]


SHORTEST_S = 1e-30
"""Replaces a step time of 0, which has no logarithm."""

UNFIT = 5.0
"""Score from which a plan does not fit; plans that fit and are 148 times slower than the reference count no worse."""

FinalReward = Callable[[float, float], float]
"""Called as ``reward(step_time_s, reference_step_time_s)`` with the step time of a feasible final plan."""


def score(step_time_s: float, relative_overflow: float, reference_step_time_s: float) -> float:
    """Returns the objective of refinement: the order of `objective_s` on a scale that is the same for all problems.

    log(step time / reference) of a plan that fits; of any other `UNFIT` plus log(1 + overflow), the overflow cut at 10 so that
    one bad episode does not drown the others; four times `UNFIT` where the step cannot complete.
    """
    objective = objective_s(step_time_s, relative_overflow)
    if objective < UNFIT_S:
        return min(math.log(max(objective, SHORTEST_S) / reference_step_time_s), UNFIT)
    return UNFIT + math.log(min(objective / UNFIT_S, 11.0)) if math.isfinite(objective) else 4 * UNFIT


def log_ratio(step_time_s: float, reference_step_time_s: float) -> float:
    """Returns log(reference / step time): 0 at the best classical plan, positive when faster."""
    return -score(step_time_s, 0.0, reference_step_time_s)


def infeasible_reward(relative_overflow: float) -> float:
    """Returns the reward of a plan that does not fit or of an illegal action: below that of any plan that fits."""
    return -score(UNFIT_S, relative_overflow, 1.0)
