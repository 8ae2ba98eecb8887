"""Counted simulator calls, and the score that ranks assignments while planners search.

Every planner simulates through a `PlanEvaluator`, so that `count_calls` can state how many calls a plan has cost.

The one objective of plans, by which searches, repair and rewards compare them, and the slope that searches walk on.

A plan that fits beats every plan that does not. Among plans that fit the faster one is better, among others the one that
is short of less memory. A step that cannot complete is worst. Compiled loops compile these functions too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.budget import Budget
from rlplace.problem import Problem
from rlplace.simulator import Simulator, Timeline, simulate

UNFIT_S = 1e12
"""Seconds that count as the step of a plan that does not fit: longer than any step."""

_SLOPE, _BASE = 3.0, 0.02


def objective_s(step_s: float, overflow: float) -> float:
    """Returns the objective: the step time of a plan that fits; for any other plan `UNFIT_S` times 1 + overflow.

    Args:
        step_s: Step time; inf when the step cannot complete.
        overflow: Bytes over the limit relative to the device's memory, summed over devices.
    """
    if overflow == 0.0 or step_s > UNFIT_S:
        return step_s
    return UNFIT_S * (1.0 + overflow)


def descent_s(step_s: float, overflow: float) -> float:
    """Returns the value by which a search weighs its next move: step time, raised where memory overflows.

    The way to a better plan that fits often leads through plans that do not, which the objective would bar. The answer of a
    search is chosen by the objective.

    Args:
        step_s: Step time; inf when the step cannot complete.
        overflow: Bytes over the limit relative to the device's memory, summed over devices.
    """
    if overflow == 0.0:
        return step_s
    return step_s * (1.0 + _SLOPE * (overflow + _BASE))


Assignment = NDArray[np.int32]
"""int32 [G], the device of every group."""


@dataclass(frozen=True, slots=True)
class Score:
    """Outcome of one simulation.

    Attributes:
        step_time_s: Step time; inf when the step cannot complete.
        overflow: Bytes over the limit, relative to the device's memory, summed over devices; 0 when everything fits.
    """

    step_time_s: float
    overflow: float

    @property
    def feasible(self) -> bool:
        """The step completes and fits."""
        return self.overflow == 0.0 and self.step_time_s != float("inf")

    @property
    def objective_s(self) -> float:
        """The objective of planners; see `rlplace.placement.common.evaluate`."""
        return objective_s(self.step_time_s, self.overflow)

    @property
    def descent_s(self) -> float:
        """The value by which searches weigh their moves; see `rlplace.placement.common.evaluate`."""
        return descent_s(self.step_time_s, self.overflow)


class CallCounter:
    """Simulator calls made while a `count_calls` block is open."""

    def __init__(self) -> None:
        self.calls = 0


_counters: list[CallCounter] = []


@contextmanager
def count_calls() -> Iterator[CallCounter]:
    """Counts the simulator calls that planners make inside the block."""
    counter = CallCounter()
    _counters.append(counter)
    try:
        yield counter
    finally:
        _counters.remove(counter)


@contextmanager
def uncounted() -> Iterator[None]:
    """Hides the calls of a warm-up, which do not count towards any plan."""
    hidden, _counters[:] = _counters[:], []
    try:
        yield
    finally:
        _counters[:] = hidden


@dataclass(frozen=True, eq=False)
class ScoredAssignment:
    """An assignment with its simulated score and peaks.

    Attributes:
        devices: int32 [G], device of each group.
        score: Step time and overflow.
        peaks: int64 [D], peak memory with resident and reserved bytes.
    """

    devices: Assignment
    score: Score
    peaks: NDArray[np.int64]


class PlanEvaluator:
    """Simulates assignments of one problem within a budget; loops that use its `simulator` report their calls to `count`."""

    def __init__(self, problem: Problem, budget: Budget | None = None, *, simulator: Simulator | None = None) -> None:
        self.problem = problem
        self.budget = Budget() if budget is None else budget
        self.simulator = Simulator(problem) if simulator is None else simulator

    def score(self, devices: Assignment) -> Score:
        """Returns step time and memory overflow of an assignment."""
        self.count()
        return Score(*self.simulator.evaluate(devices))

    def answer(self, devices: Assignment) -> ScoredAssignment:
        """Returns an assignment with its score and peaks; `devices` must not change afterwards."""
        score = self.score(devices)
        self.budget.secured |= score.feasible
        return ScoredAssignment(devices, score, self.simulator.peak_memory_bytes.copy())

    def timeline(self, devices: Assignment, **order: Any) -> Timeline:
        """Returns the timeline of an assignment, counted as one call. `order` holds a `priority` or an `order`, if any."""
        self.count()
        return simulate(self.problem, devices, **order)

    def count(self, calls: int = 1) -> None:
        """Adds simulator calls to the budget and to all open counters."""
        self.budget.used += calls
        for counter in _counters:
            counter.calls += calls
