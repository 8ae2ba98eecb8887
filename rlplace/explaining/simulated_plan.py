"""A plan simulated once, with what an explanation needs to know beside the timeline."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rlplace.plan.plan import PlacementPlan, check_plan
from rlplace.problem import Problem
from rlplace.schedule import LIST
from rlplace.simulator import Timeline, simulate
from rlplace.simulator.tasks import TaskGraph, task_graph


@dataclass(frozen=True, eq=False)
class SimulatedPlan:
    """One simulated step of a plan.

    Attributes:
        problem: The problem that the plan is for.
        plan: The plan.
        line: The timeline.
    """

    problem: Problem
    plan: PlacementPlan
    line: Timeline

    @cached_property
    def tasks(self) -> TaskGraph:
        """Tasks and values of the step."""
        return task_graph(self.problem, self.plan.microbatches)

    @cached_property
    def task_device(self) -> NDArray[np.int32]:
        """int32 [K]."""
        return self.plan.device_of_group[self.problem.op_group[self.tasks.op]]

    @property
    def step_s(self) -> float:
        """Step time; inf when the step cannot complete."""
        return float("inf") if self.line.step_time_s is None else self.line.step_time_s


def run_plan(problem: Problem, plan: PlacementPlan) -> SimulatedPlan:
    """Simulates a plan.

    Raises:
        InputError: The plan is for another problem.
    """
    check_plan(plan, problem)
    return run_unchecked(problem, plan)


def run_unchecked(problem: Problem, plan: PlacementPlan) -> SimulatedPlan:
    """`run_plan` for a plan that was derived from a checked one; its fingerprint is not looked at."""
    line = simulate(
        problem,
        plan.device_of_group,
        priority=plan.priority,
        order=plan.order,
        microbatches=plan.microbatches,
        schedule=plan.schedule if plan.order is None else LIST,
        stage_of_group=plan.stage_of_group,
    )
    return SimulatedPlan(problem, plan, line)


def channel_holds(run: SimulatedPlan) -> Iterator[tuple[tuple[int, ...], float, float, int, int]]:
    """What moves: the channels that it holds, its start and end, the op that made it, and its bytes (0 of collectives)."""
    problem, line, tasks = run.problem, run.line, run.tasks
    channels = problem.links.effective_channels
    ends = line.transfer_tensor, line.transfer_source, line.transfer_destination
    columns = [column.tolist() for column in (*ends, line.transfer_start_s, line.transfer_end_s)]
    for tensor, source, destination, start, end in zip(*columns, strict=True):
        producer, size_bytes = problem.tensor_producer[tensor], problem.tensor_bytes[tensor]
        yield channels[source][destination], start, end, int(producer), int(size_bytes)
    for index, which in enumerate(tasks.collective.tolist()):
        task = int(tasks.collective_tasks[tasks.collective_ptr[index]])
        span = float(line.start_s[task]), float(line.end_s[task])
        yield problem.collectives[which].channels, *span, int(tasks.op[task]), 0


def moved(plan: PlacementPlan, groups: NDArray[np.int64] | list[int], device: int) -> PlacementPlan:
    """The plan with some groups on another of its devices, its order left out: moved groups have no place in it.

    Groups whose stage is not their device join, of the stages of the new device, the one whose number is nearest.
    """
    devices = np.array(plan.device_of_group, dtype=np.int32)
    devices[groups] = device
    stages = plan.stage_of_group
    if stages is not None:
        there = np.unique(stages[plan.device_of_group == device])
        stages = stages.copy()
        for group in np.asarray(groups).tolist() if len(there) else []:
            stages[group] = there[np.abs(there - stages[group]).argmin()]
    return dataclasses.replace(plan, device_of_group=devices, stage_of_group=stages, order=None)
