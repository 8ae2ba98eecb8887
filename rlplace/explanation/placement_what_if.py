"""What other hardware would bring a placement of groups."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from rlplace.errors import InfeasibleError
from rlplace.explanation import changes
from rlplace.explanation.bounds import channel_loads, device_loads
from rlplace.explanation.what_if import AS_IS, CALLS, Question, WhatIf, answers
from rlplace.placement import get_planner
from rlplace.plan.plan import PlacementPlan
from rlplace.problem import Problem
from rlplace.simulator.simulated_plan import SimulatedPlan, run_unchecked


def placement_what_if(
    run: SimulatedPlan, *, calls: int = CALLS, time_limit_s: float | None = None, seed: int = 0
) -> tuple[WhatIf, ...]:
    """Returns the plan on its own hardware, then one change at a time.

    Args:
        run: The plan as it is; it completes.
        calls: Simulations of each search beside the classical floor; 0: nothing is planned anew.
        time_limit_s: Seconds of each search.
        seed: Seed of the search.
    """
    limits: dict[str, Any] = {"time_limit_s": time_limit_s, "seed": seed}
    changed = [
        (change, run_unchecked(problem, _fitted(run.plan, problem)))
        for change, problem in _problems(run)
        if problem is not None
    ]
    return answers(
        Question(
            change=change,
            samples=same.line.samples,
            same=tuple(same.plan.device_of_group.tolist()),
            same_s=same.line.step_time_s,
            same_feasible=same.line.feasible,
            step_s=partial(_step_s, same),
            search=partial(_search, same, calls, limits) if calls else None,
        )
        for change, same in changed
    )


def _problems(run: SimulatedPlan) -> Iterator[tuple[str, Problem | None]]:
    """Yields the problem as it is, then on other hardware; None where it cannot be changed so."""
    problem = run.problem
    yield AS_IS, problem
    busiest = int(np.argmax([load.busy_s for load in device_loads(run)]))
    yield f"one more device like {problem.devices[busiest].name}", changes.with_device(problem, busiest)
    if any(device.memory_bytes is not None for device in problem.devices):
        yield "double the memory", changes.with_memory(problem, 2.0)
    yield f"{problem.devices[busiest].name} twice as fast", changes.with_speed(problem, busiest, 2.0)
    if problem.num_devices == 1:
        return
    yield "all links twice as fast", changes.with_links(problem, 2.0)
    used = channel_loads(run)
    if used:
        yield f"link {used[0].name} twice as fast", changes.with_links(problem, 2.0, channel=used[0].channel)
    yield "communication for free", changes.with_free_links(problem)


def _fitted(plan: PlacementPlan, problem: Problem) -> PlacementPlan:
    """Returns the plan for a problem that may have more devices."""
    if plan.order is None:
        return plan
    empty: list[Any] = [[]] * (problem.num_devices - len(plan.order))
    return dataclasses.replace(plan, order=[*plan.order, *empty])


def _step_s(same: SimulatedPlan, devices: tuple[int, ...]) -> float:
    if max(devices, default=0) >= same.problem.num_devices:
        return math.inf
    plan = dataclasses.replace(same.plan, device_of_group=np.array(devices, dtype=np.int32), priority=None, order=None)
    run = run_unchecked(same.problem, plan)
    return run.step_s if run.line.feasible else math.inf


def _search(same: SimulatedPlan, calls: int, limits: dict[str, Any], known: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Returns the floor's plan, and what a search finds from the best plan that is known."""
    candidates = list(known)
    for planner in ("best", "local_search"):
        extra: dict[str, Any] = {}
        if planner == "local_search":
            extra = {"calls": calls, "start": np.array(min(candidates, key=partial(_step_s, same)), dtype=np.int32)}
        with contextlib.suppress(InfeasibleError):
            candidates.append(tuple(get_planner(planner)(same.problem, **limits, **extra).device_of_group.tolist()))
    return candidates
