"""A plan simulated once, with what explanations read beside the timeline."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.plan.plan import PlacementPlan
from rlplace.problem import Problem
from rlplace.simulator import Timeline, simulate


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

    @property
    def step_s(self) -> float:
        """Step time; inf when the step cannot complete."""
        return float("inf") if self.line.step_time_s is None else self.line.step_time_s


def run_plan(problem: Problem, plan: PlacementPlan) -> SimulatedPlan:
    """Simulates a plan.

    Raises:
        InputError: The plan is for another problem.
    """
    return SimulatedPlan(problem, plan, simulate(problem, plan))


def run_unchecked(problem: Problem, plan: PlacementPlan) -> SimulatedPlan:
    """Simulates a plan that was derived from a checked one, as `run_plan` without checks."""
    line = simulate(problem, plan.device_of_group, priority=plan.priority, order=plan.order)
    return SimulatedPlan(problem, plan, line)


def channel_holds(run: SimulatedPlan) -> Iterator[tuple[tuple[int, ...], float, float, int, int]]:
    """Yields every transfer and collective: its channels, its start and end, the op behind it, and its bytes (0 for
    collectives).
    """
    problem, line = run.problem, run.line
    channels = problem.links.effective_channels
    ends = line.transfer_tensor, line.transfer_source, line.transfer_destination
    columns = [column.tolist() for column in (*ends, line.transfer_start_s, line.transfer_end_s)]
    for tensor, source, destination, start, end in zip(*columns, strict=True):
        producer, size_bytes = problem.tensor_producer[tensor], problem.tensor_bytes[tensor]
        yield channels[source][destination], start, end, int(producer), int(size_bytes)
    for collective in problem.collectives:
        op = collective.ops[0]
        yield collective.channels, float(line.start_s[op]), float(line.end_s[op]), op, 0


def moved(plan: PlacementPlan, groups: NDArray[np.int64] | list[int], device: int) -> PlacementPlan:
    """Returns the plan with some groups on another of its devices, its order left out: moved groups have no place in it."""
    devices = np.array(plan.device_of_group, dtype=np.int32)
    devices[groups] = device
    return dataclasses.replace(plan, device_of_group=devices, order=None)
