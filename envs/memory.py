"""Proven lower bounds of the live memory that a group brings to its device, wherever everything else sits.

Two facts hold for every plan. (1) When an op runs, its outputs, its temporaries and copies of all its inputs are on its
device; inputs owned by the op's own group are resident already, inputs owned by others are counted only when produced,
since an owner may share the device. (2) A tensor whose producer and one consumer are in the same group stays on that
group's device from the start of the producer to the end of the consumer; all such tensors whose producer is an ancestor of
one pivot op and whose consumer is a descendant of it are live while the pivot runs. So for a device holding a set S of groups

    peak >= reserved + sum over S of resident + max(sum over S of saved at the pivot, max over S of footprint).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlplace.planners.common.bounds import largest_op_bytes
from rlplace.problem import BACKWARD, FORWARD, Problem
from rlplace.problem.reach import reach

_PIVOT_CANDIDATES = 4


def group_footprint_bytes(problem: Problem) -> NDArray[np.float64]:
    """float64 [G], fact (1): the largest sum of outputs, temporaries and produced inputs over the ops of each group."""
    return largest_op_bytes(problem)


def group_saved_bytes(problem: Problem) -> NDArray[np.float64]:
    """float64 [G], fact (2) at the pivot that gives the largest total."""
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
    """float64 [G], resident bytes plus `group_saved_bytes`."""
    return problem.resident_bytes + group_saved_bytes(problem)


def _pivots(problem: Problem) -> list[int]:
    """Last forward and first backward ops in topological order: where most saved activations are live."""
    phase = problem.op_phase[problem.topological_order]
    forward = problem.topological_order[phase == FORWARD][-_PIVOT_CANDIDATES:]
    backward = problem.topological_order[phase == BACKWARD][:_PIVOT_CANDIDATES]
    return [*forward.tolist(), *backward.tolist()]
