"""`expand`: from a plan with replicas, recomputation or a sharded optimizer to a plain problem and a plain plan.

The simulator knows groups on devices, micro-batches and schedules; this module lowers the rest to them.

* Replica r is a copy of all groups, ops and tensors ("NAME@r") on the devices ``replicas[r]``. The gradients of each of the
  plan's devices are averaged over its counterparts in buckets, as DistributedDataParallel does it: groups in the order in which
  their gradients are complete fill a first bucket of 1 MiB, then buckets of 25 MiB. A bucket is a collective: it starts when
  its gradients are there (after the last micro-batch), overlaps with what still runs, and its groups' updates wait for it.
* With `optimizer_sharding` (ZeRO stage 1, Rajbhandari et al. 2020) each replica keeps 1 / R of the optimizer state and updates
  1 / R of the weights: the bucket is a reduce-scatter, and an all-gather of the weights follows the updates.
* Replicas of a plan whose schedule is for chains of stages each follow the order of one.
* `recompute` segments are lowered by `rlplace.plan.recompute`.

Compute that runs under a collective is slowed by `rlplace.problem.collectives.COMPUTE_SLOWDOWN`. How much of it does is
estimated: of the backward time of one micro-batch what all buckets but the last take; backward times grow by that share.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InputError
from rlplace.plan.plan import PlacementPlan, check_plan
from rlplace.plan.prediction import Prediction
from rlplace.problem import Problem
from rlplace.schedule import LIST, SCHEDULES
from rlplace.simulator.schedules import reference_priority, schedule_order


@dataclass(frozen=True, eq=False)
class Expanded:
    """What the simulator runs for a plan; the fields are those of `PlacementPlan`."""

    problem: Problem
    device_of_group: NDArray[np.int32]
    priority: NDArray[np.float64] | None
    order: list[list[Any]] | None
    stage_of_group: NDArray[np.int32] | None


def group_origins(problem: Problem, plan: PlacementPlan, lowered: Problem) -> NDArray[np.int64]:
    """The group that each group of a lowered problem is or is a copy of.

    Args:
        problem: What the plan is for.
        plan: The plan.
        lowered: What `expand` or `lower_plan` made of both.

    Returns:
        int64, one number a group of `lowered`.
    """
    return np.arange(lowered.num_groups) % problem.num_groups


def expand(problem: Problem, plan: PlacementPlan) -> tuple[Problem, PlacementPlan]:
    """Lowers replicas, recomputation and the sharded optimizer.

    Args:
        problem: The priced graph.
        plan: A plan for it.

    Returns:
        A problem and a plan for it that has one replica and nothing else to lower; micro-batches and schedule stay, but
        replicas under schedules for chains get the `order` of each device written out.

    Raises:
        InputError: The plan is for another problem, or asks for what cannot be lowered.
    """
    check_plan(plan, problem)
    lowered = lower_plan(problem, plan)
    plain = dataclasses.replace(
        plan,
        problem=lowered.problem.fingerprint,
        device_of_group=lowered.device_of_group,
        priority=lowered.priority,
        order=lowered.order,
        schedule=plan.schedule if lowered.order is None else LIST,
        stage_of_group=lowered.stage_of_group,
        replicas=None,
        recompute=None,
        optimizer_sharding=False,
        groups=None,
        predicted=Prediction(),
    )
    return lowered.problem, plain


def lower_plan(problem: Problem, plan: PlacementPlan) -> Expanded:
    """`expand` without checks and without a fingerprint."""
    priority, order, stages = plan.priority, plan.order, plan.stage_of_group
    if plan.recompute:
        if priority is not None or order is not None:
            raise InputError("plan: recompute adds ops, so it excludes priority and order; leave them out")
        from rlplace.plan.recompute import recompute

        problem = recompute(problem, plan.recompute)
    devices = plan.device_of_group
    plain = Expanded(problem, devices, priority, None if order is None else [list(row) for row in order], stages)
    if plan.replicas is None:
        return plain
    rows = [list(row) for row in plan.replicas]
    if len(rows) == 1:
        target = np.asarray(rows[0], dtype=np.int32)
        return dataclasses.replace(plain, device_of_group=target[devices], order=_spread(order, rows, 0, problem.num_devices))
    if (problem.group_device >= 0).any():
        raise InputError("plan: a problem with fixed groups cannot be replicated; free the groups, or use one replica")
    if not SCHEDULES[plan.schedule].free:  # a schedule would take the replicas for one chain
        key = reference_priority(problem) if priority is None else priority
        order, priority = schedule_order(problem, devices, plan.schedule, plan.microbatches, stages, key), None
    from rlplace.simulator.replicas import copy_problem, reduce_gradients

    copies = copy_problem(problem, len(rows))
    reduced = reduce_gradients(problem, copies, plan, rows)
    offset = 0 if stages is None else int(stages.max()) + 1
    return Expanded(
        problem=reduced,
        device_of_group=np.concatenate([np.asarray(row, dtype=np.int32)[devices] for row in rows]),
        priority=None if priority is None else _extend(np.tile(priority, len(rows)), reduced.num_ops),
        order=_spread(order, rows, problem.num_ops, problem.num_devices),
        stage_of_group=None
        if stages is None
        else np.concatenate([stages + r * offset for r in range(len(rows))]).astype(np.int32),
    )


def _extend(priority: NDArray[np.float64], count: int) -> NDArray[np.float64]:
    """Collectives do not compete for a device, so their priority does not matter."""
    return np.concatenate([priority, np.zeros(count - len(priority))])


def _spread(order: Any, rows: list[list[int]], num_ops: int, num_devices: int) -> list[list[Any]] | None:
    """The order of every replica's devices, op numbers shifted by `num_ops` from copy to copy."""
    if order is None:
        return None
    spread: list[list[Any]] = [[] for _ in range(num_devices)]
    for copy, row in enumerate(rows):
        for device, items in enumerate(order[: len(row)]):
            shift = copy * num_ops
            spread[row[device]] = [
                (item[0] + shift, item[1]) if isinstance(item, (tuple, list)) else item + shift for item in items
            ]
    return spread
