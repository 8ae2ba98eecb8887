"""The plan of one strategy: a planner's plan for a replica, its best schedule, and all replicas simulated together."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlplace.errors import InfeasibleError
from rlplace.plan import PlacementPlan
from rlplace.planners import get_planner
from rlplace.planners.common.evaluate import Execution
from rlplace.planners.strategy.choices import StageLayout, Strategy
from rlplace.planners.strategy.stages import other_schedules
from rlplace.problem import Links, Problem
from rlplace.schedule import LIST, ONE_F_ONE_B
from rlplace.simulator import simulate
from rlplace.text import bytes_text

Placed = tuple[Problem, PlacementPlan]
"""A problem and a plan for it."""


def place_one(
    problem: Problem,
    strategy: Strategy,
    planner: str,
    *,
    seed: int,
    time_limit_s: float | None,
    options: dict[str, Any],
    schedules: tuple[str, ...] = (LIST, ONE_F_ONE_B),
) -> Placed:
    """The plan of one strategy, with all its replicas simulated.

    The planner plans a replica with the first of `schedules` that fits; what else can run the same stages, or a chain of
    smaller ones (`rlplace.planners.strategy.stages`), is simulated, and the quickest that fits stays.

    Args:
        problem: Priced for the micro-batches of the strategy.
        strategy: Replicas and micro-batches.
        planner: Plans a replica; one that may use a single device is put there.
        seed: The seed of the planner.
        time_limit_s: Wall time of the planner.
        options: Options of the planner.
        schedules: With which the planner is run, in this order, when there are several micro-batches.

    Raises:
        InfeasibleError: Nothing fits.
    """
    layout = strategy.layout
    if layout.width == 1 and problem.group_allowed.all():  # else other devices hold some groups
        _check_resident(problem, layout)
    target = problem if layout.replicas == 1 else problem_of_replica(problem, layout.rows[0])
    name, extra = ("single", {}) if layout.width == 1 else (planner, options)
    reason: InfeasibleError | None = None
    for schedule in schedules if strategy.microbatches > 1 and layout.width > 1 else schedules[:1]:
        run = Execution(strategy.microbatches, schedule).arguments
        try:
            plan = get_planner(name)(target, seed=seed, time_limit_s=time_limit_s, **extra, **run)
            plan = _best_schedule(target, plan)
            if layout.replicas > 1:
                plan = replicated_plan(problem, plan, layout.rows, "use fewer samples a replica, or fewer replicas")
            return problem, plan
        except InfeasibleError as error:
            reason = reason or error
    assert reason is not None
    raise reason


def _check_resident(problem: Problem, layout: StageLayout) -> None:
    """Refuses one device a replica where the weights and all that stays with them are too large.

    Raises:
        InfeasibleError: They are larger than every device of the replicas offers.
    """
    devices = list(range(problem.num_devices)) if layout.replicas == 1 else [row[0] for row in layout.rows]
    needed = int(problem.resident_bytes.sum())
    offered = problem.memory_limit_bytes[devices]
    # A single device is any of them; replicas need them all.
    room = float(offered.max() if layout.replicas == 1 else offered.min())
    if needed > room:
        raise InfeasibleError(
            f"groups need {bytes_text(needed)} resident, one device offers {bytes_text(room)}; use several devices a replica",
            short_bytes=needed - int(room),
        )


def _best_schedule(problem: Problem, plan: PlacementPlan) -> PlacementPlan:
    """The plan with the quickest way to run its micro-batches; as it is when nothing that fits is quicker."""
    if plan.microbatches == 1 or plan.order is not None or plan.shards or not _plain(plan):
        return plan
    best = plan
    for way in other_schedules(problem, plan.device_of_group, plan.microbatches, known=plan.schedule):
        step = way.line.step_time_s
        if way.line.feasible and step is not None and step < best.predicted.step_s:
            best = dataclasses.replace(
                plan,
                device_of_group=way.devices,
                schedule=way.schedule,
                stage_of_group=way.stage_of_group,
                predicted=plan.predicted.simulated(way.line.predicted(problem)),
            )
    return best


def _plain(plan: PlacementPlan) -> bool:
    """Whether the plan consists of devices and a schedule alone."""
    return plan.priority is None and plan.recompute is None and plan.replicas is None


def replicated_plan(problem: Problem, plan: PlacementPlan, rows: Sequence[Sequence[int]], advice: str) -> PlacementPlan:
    """The plan of a replica as a plan for all of them, simulated with their gradient exchange.

    Args:
        problem: The problem of all devices.
        plan: A plan for `problem_of_replica`.
        rows: The devices of each replica.
        advice: What to do where that does not fit.

    Raises:
        InfeasibleError: It does not fit.
    """
    plan = dataclasses.replace(plan, problem=problem.fingerprint, replicas=[list(row) for row in rows])
    line = simulate(problem, plan)
    if not line.feasible:
        raise InfeasibleError(f"{line.violations[0]}; {advice}")
    return plan.with_predicted(plan.predicted.simulated(line.predicted(problem)))


def problem_of_replica(problem: Problem, devices: tuple[int, ...]) -> Problem:
    """The problem on some of its devices alone."""
    links, own = problem.links, np.ix_(devices, devices)
    channels = None if links.channels is None else tuple(tuple(links.channels[i][j] for j in devices) for i in devices)
    return dataclasses.replace(
        problem,
        devices=tuple(problem.devices[device] for device in devices),
        links=Links(links.bandwidth_bytes_per_s[own], links.latency_s[own], channels),  # no collectives to price
        time_s=np.ascontiguousarray(problem.time_s[:, list(devices)]),
        tensor_transfer_s={tensor: table[own] for tensor, table in problem.tensor_transfer_s.items()},
    )
