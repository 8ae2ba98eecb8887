"""More micro-batches in flight under `1f1b` than there are stages with forward ops.

The executor lets a stage have as many micro-batches in flight as there are forward stages from it to the last. That is what a
layer-wise pipeline needs. Where the backward pass of a layer runs elsewhere, its way back is longer, and a worker without
forward ops is no forward stage at all: workers would wait. Making stages of their own out of the last layers, on the same
device, gives every stage before them one more micro-batch in flight for each.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rlplace.plan import PlacementPlan, make_plan
from rlplace.planners.bipartition.layers import Layers
from rlplace.planners.common.evaluate import Assignment, Deadline, Evaluator
from rlplace.planners.common.repair import legalize
from rlplace.problem import Problem

EXTRA = (1, 2)
"""Additional stages that are tried."""

MOST = 12
"""Pipelines for which they are tried, those with the smallest bottleneck."""


def deep_stages(layers: Layers, devices: Assignment, extra: int) -> NDArray[np.int32]:
    """int32 [G], the stage of every group: its device, and for the forward ops of the last `extra` layers one each."""
    count = layers.chain.num_layers
    first = max(1, count - extra)
    own = (layers.layer_of_group >= first) & ~layers.follows_backward
    stages = np.where(own, int(devices.max()) + 1 + layers.layer_of_group - first, devices)
    return stages.astype(np.int32)


def deepen(
    problem: Problem,
    plan: PlacementPlan,
    pipelines: Sequence[tuple[float, Layers, Assignment]],
    evaluator: Evaluator,
    deadline: Deadline,
) -> PlacementPlan:
    """The plan, or a quicker one that fits with additional stages.

    Args:
        problem: A split problem.
        plan: The best so far, under a schedule that limits the micro-batches in flight.
        pipelines: Bottleneck, layers and devices of those that were tried.
        evaluator: Runs the schedule of the plan and counts the simulations.
        deadline: Ends the search.
    """
    seen: set[bytes] = set()
    for _, layers, assignment in sorted(pipelines, key=lambda item: item[0]):
        devices = legalize(problem, assignment)
        if devices.tobytes() in seen:
            continue
        if len(seen) == MOST:
            break
        seen.add(devices.tobytes())
        for extra in EXTRA:
            if deadline.passed():
                return plan
            stages = deep_stages(layers, devices, extra)
            line = evaluator.timeline(devices, stage_of_group=stages)
            if line.feasible and line.step_time_s is not None and line.step_time_s < plan.predicted.step_s:
                plan = make_plan(
                    problem,
                    devices,
                    planner=plan.planner,
                    seed=plan.seed,
                    stage_of_group=stages,
                    predicted=line.predicted(problem),
                    **evaluator.execution.arguments,
                )
    return plan
