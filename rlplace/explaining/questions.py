"""The questions about a plan: the same plan on changed hardware, or with more micro-batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InputError
from rlplace.explaining import changes
from rlplace.explaining.bounds import channel_loads, device_loads
from rlplace.explaining.simulated_plan import SimulatedPlan, run_unchecked
from rlplace.plan.plan import PlacementPlan
from rlplace.problem import Problem
from rlplace.schedule import LIST, ONE_F_ONE_B

AS_IS = "as it is"

Change = Callable[[Problem], Problem | None]
"""Changes a problem; None: it cannot be changed so."""


@dataclass(frozen=True, eq=False)
class Question:
    """A change and the plan with it.

    Attributes:
        change: In words.
        same: The plan as it is, there.
    """

    change: str
    same: SimulatedPlan

    @property
    def problem(self) -> Problem:
        """Changed: what is planned anew."""
        return self.same.problem

    def step_s(self, devices: NDArray[np.int32]) -> float:
        """Step time of an assignment; inf when it does not fit."""
        plan = dataclasses.replace(
            self.same.plan, device_of_group=devices, priority=None, order=None, stage_of_group=None
        )  # fmt: skip
        return fitting_s(run_unchecked(self.problem, plan))


def fitting_s(run: SimulatedPlan) -> float:
    """Step time; inf for a plan that does not fit or cannot complete."""
    return run.step_s if run.line.feasible else float("inf")


def questions(run: SimulatedPlan) -> Iterable[Question]:
    """All questions that make sense for a plan, things as they are first."""
    yield Question(AS_IS, run)
    for change, make in _changes(run):
        problem = make(run.problem)
        if problem is not None:
            yield Question(change, run_unchecked(problem, _fitted(run.plan, problem)))
    longer = None if run.plan.order is not None else _more_microbatches(run)
    if longer is not None:
        yield Question(f"{longer.plan.microbatches} micro-batches", longer)


def _changes(run: SimulatedPlan) -> Iterable[tuple[str, Change]]:
    """Name and change of every question about other hardware."""
    problem = run.problem
    loads = device_loads(run)
    busiest = int(np.argmax([load.busy_s for load in loads]))
    yield f"one more device like {problem.devices[busiest].name}", partial(changes.with_device, like=busiest)
    if any(device.memory_bytes is not None for device in problem.devices):
        yield "double the memory", partial(changes.with_memory, factor=2.0)
    yield f"{problem.devices[busiest].name} twice as fast", partial(changes.with_speed, device=busiest, factor=2.0)
    if problem.num_devices == 1:
        return
    yield "all links twice as fast", partial(changes.with_links, factor=2.0)
    used = channel_loads(run)
    if used:
        yield f"link {used[0].name} twice as fast", partial(changes.with_links, factor=2.0, channel=used[0].channel)
    yield "communication for free", changes.with_free_links


def _fitted(plan: PlacementPlan, problem: Problem) -> PlacementPlan:
    """The plan for a problem that may have more devices."""
    if plan.order is None:
        return plan
    empty: list[Any] = [[]] * (problem.num_devices - len(plan.order))
    return dataclasses.replace(plan, order=[*plan.order, *empty])


def _more_microbatches(run: SimulatedPlan) -> SimulatedPlan | None:
    """The plan with 4 micro-batches instead of one, or with twice as many."""
    plan = run.plan
    single = plan.microbatches == 1
    schedule = ONE_F_ONE_B if single and plan.schedule == LIST else plan.schedule
    try:
        return run_unchecked(
            run.problem, dataclasses.replace(plan, microbatches=4 if single else 2 * plan.microbatches, schedule=schedule)
        )
    except InputError:  # too many tasks, or a schedule that cannot run so many
        return None
