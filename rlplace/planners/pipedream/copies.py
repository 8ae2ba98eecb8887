"""Copies of a pipeline: the problem of one, and its plan as a plan for all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from rlplace.errors import InfeasibleError
from rlplace.plan import PlacementPlan
from rlplace.problem import Links, Problem
from rlplace.simulator import simulate
from rlplace.simulator.replicas import gradient_edges


def exchanges_gradients(problem: Problem) -> bool:
    """Whether replicas of the problem could exchange gradients: it says how large those are, or updates nothing."""
    updated = problem.op_group[problem.consumers[gradient_edges(problem)]]
    return bool((problem.gradient_bytes[updated] >= 0).all())


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
