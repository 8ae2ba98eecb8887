"""Schedules for chains of stages as explicit orders: every device runs its pipeline actions in torch's sequence.

In a chain, forward ops read from earlier stages only and gradients flow back.
An action (`rlplace.actions`) runs all tasks of one stage, one kind and one micro-batch; within it, ops run in the
topological order that takes the op of highest priority first. Update ops come after all actions. A device waits when its next
task is not ready, as torch does. Whole strategies are scheduled so; here it is for problems whose groups are stages, so that
the executor of placements, given an `order`, shows what the lists do.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.actions import chain_actions
from rlplace.errors import InputError
from rlplace.problem import BACKWARD, BACKWARD_WEIGHT, FORWARD, UPDATE, Problem
from rlplace.problem.order import topological_order
from rlplace.schedule import LIST, ONE_F_ONE_B, SCHEDULES
from rlplace.simulator.stages import forward_stage_links, stage_numbers

_PHASES = {"F": (FORWARD,), "B": (BACKWARD, BACKWARD_WEIGHT), "I": (BACKWARD,), "W": (BACKWARD_WEIGHT,)}


def schedule_order(
    problem: Problem,
    devices: NDArray[np.int32],
    schedule: str,
    microbatches: int,
    stage_of_group: NDArray[np.int32] | None,
    priority: NDArray[np.float64],
) -> list[list[Any]]:
    """The `order` of a plan that stands for a schedule that is for chains.

    Args:
        problem: The priced graph.
        devices: int [G].
        schedule: One that is not free.
        microbatches: Micro-batches of a step.
        stage_of_group: int [G], default the device.
        priority: float [N], decides between the ops of one action.

    Raises:
        InputError: The stages are no chain, a stage sits on several devices, or torch cannot run the schedule like this.
    """
    stage = stage_numbers(devices, stage_of_group)
    if SCHEDULES[schedule].splits_backward and not (problem.op_phase == BACKWARD_WEIGHT).any():
        raise InputError(
            f"schedule {schedule} needs backward_weight ops to fill its bubbles; price the graph with weight_gradients=True, "
            f"or use the schedule {ONE_F_ONE_B}"
        )
    chain = _chain(problem, stage, schedule)
    device_of_stage = np.full(len(chain), -1, dtype=np.int64)
    device_of_stage[stage] = devices
    split = np.flatnonzero(device_of_stage[stage] != devices)
    if len(split):
        name = problem.group_names[split[0]]
        raise InputError(f"schedule {schedule}: group {name!r} sits on another device than the rest of its stage")
    actions = chain_actions(device_of_stage[chain].tolist(), schedule, microbatches)
    member = {op for collective in problem.collectives for op in collective.ops}
    ops: dict[tuple[int, int], list[int]] = {}
    for op in _priority_order(problem, priority):
        if op not in member:
            ops.setdefault((int(stage[problem.op_group[op]]), int(problem.op_phase[op])), []).append(op)
    order: list[list[Any]] = []
    for device in range(problem.num_devices):
        row = [
            (op, action.microbatch)
            for action in actions.get(device, ())
            for phase in _PHASES[action.kind]
            for op in ops.get((chain[action.stage], phase), ())
        ]
        for at in chain:
            if device_of_stage[at] == device:
                row += [(op, 0) for op in ops.get((at, UPDATE), ())]
        order.append([op for op, _ in row] if microbatches == 1 else row)
    return order


def _chain(problem: Problem, stage: NDArray[np.int32], schedule: str) -> list[int]:
    """The stages in a row; earlier ones feed later ones, and of two that could come next the lower number does.

    Raises:
        InputError: Forward ops of two stages feed each other, or a gradient flows forward.
    """
    links = forward_stage_links(problem, stage)
    earlier, later = np.nonzero(links)
    chain, stuck = topological_order(earlier, later, len(links), key=np.arange(len(links)))
    advice = f"use the schedule {LIST}, or cut the model into stages that follow one another"
    if stuck is not None:
        raise InputError(f"schedule {schedule}: stages feed each other, so they are no chain; {advice}")
    position = np.argsort(chain)[stage[problem.op_group]]
    (source, reader), phase = problem.op_edges, problem.op_phase
    ahead = (phase[reader] != UPDATE) & (phase[source] != FORWARD) & (position[source] < position[reader])
    if ahead.any():
        op = problem.op_names[source[np.flatnonzero(ahead)[0]]]
        raise InputError(f"schedule {schedule}: {op!r} sends a gradient to a later stage; {advice}")
    return chain


def _priority_order(problem: Problem, priority: NDArray[np.float64]) -> list[int]:
    """All ops, producers before consumers, of those that could come next the one of highest priority."""
    order, _ = topological_order(*problem.op_edges, problem.num_ops, key=-priority)
    return order
