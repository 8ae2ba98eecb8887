"""Trials: a changed problem, planned and simulated, or a changed plan, simulated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rlplace.errors import InfeasibleError
from rlplace.explaining.simulated_plan import SimulatedPlan
from rlplace.planners import get_planner
from rlplace.problem import Problem
from rlplace.schedule import LIST, ONE_F_ONE_B, free_schedule
from rlplace.simulator import simulate


@dataclass(frozen=True)
class Trial:
    """One relaxation, planned and simulated.

    Attributes:
        relaxation: In words.
        fits: A plan was found that completes and fits.
        step_time_s: Step time of that plan, else None.
        samples: Samples of its step.
        peak_bytes: Its fullest device, else 0.
        short_bytes: Still missing when it does not fit: in the closest plan, or proven.
        how: Micro-batches, schedule and planner of the plan that fits, or why none does.
    """

    relaxation: str
    fits: bool
    step_time_s: float | None
    samples: int
    peak_bytes: int
    short_bytes: int
    how: str

    @property
    def sample_s(self) -> float:
        """Seconds a sample; inf when it does not fit."""
        return float("inf") if self.step_time_s is None else self.step_time_s / max(self.samples, 1)


@dataclass(frozen=True)
class Tester:
    """Plans changed problems.

    Attributes:
        calls: Simulations of a search where the classical floor finds nothing; 0: no search.
        time_limit_s: Seconds of each planner.
        seed: Seed of the search.
        microbatches: Micro-batches of the execution that does not fit.
        schedule: Its schedule; one that planners take.
    """

    calls: int
    time_limit_s: float | None
    seed: int
    microbatches: int
    schedule: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "schedule", free_schedule(self.schedule))

    @property
    def execution(self) -> dict[str, Any]:
        """How steps run."""
        return {"microbatches": self.microbatches, "schedule": self.schedule}

    def plan(self, name: str, problem: Problem, *, microbatches: int | None = None) -> Trial:
        """The best plan by the floor, else by a search; several micro-batches also under 1f1b, which keeps fewer of them."""
        count = self.microbatches if microbatches is None else microbatches
        samples = problem.samples_per_microbatch * count
        closest: InfeasibleError | None = None
        for schedule in dict.fromkeys([self.schedule, ONE_F_ONE_B] if count > 1 else [LIST]):
            fixed = {"seed": self.seed, "time_limit_s": self.time_limit_s, "microbatches": count, "schedule": schedule}
            searches: dict[str, dict[str, Any]] = {"annealing": {"calls": self.calls}} if self.calls else {}
            for planner, extra in {"best": {}, **searches}.items():
                try:
                    plan = get_planner(planner)(problem, **fixed, **extra)
                except InfeasibleError as error:
                    if closest is None or 0 < error.short_bytes < closest.short_bytes:
                        closest = error
                    continue
                how = f"planner {planner}"
                if count > 1:
                    how += f", {count} micro-batches of {problem.samples_per_microbatch}, schedule {schedule}"
                peak = max(plan.predicted.peak_memory_bytes)
                return Trial(name, True, plan.predicted.step_s, samples, peak, 0, how)
        assert closest is not None
        only = only_plan_short(problem, {"microbatches": count, "schedule": self.schedule})
        return Trial(name, False, None, samples, 0, only or closest.short_bytes, without_advice(closest))


def simulated(name: str, run: SimulatedPlan) -> Trial:
    """A trial of a plan as it is."""
    line = run.line
    if line.feasible:
        return Trial(name, True, line.step_time_s, line.samples, int(line.peak_memory_bytes.max()), 0, "the same plan")
    return Trial(name, False, None, line.samples, 0, overflow(run)[1], line.violations[0])


def only_plan_short(problem: Problem, execution: dict[str, Any]) -> int | None:
    """Bytes that the only plan of a problem with one device lacks; None with several devices, or where memory is enough."""
    limit = problem.devices[0].memory_bytes
    if problem.num_devices > 1 or limit is None or not problem.group_allowed.all():
        return None
    line = simulate(problem, np.zeros(problem.num_groups, dtype=np.int32), **execution)
    short = int(line.peak_memory_bytes[0]) - limit
    return short if line.step_time_s is not None and short > 0 else None


def overflow(run: SimulatedPlan) -> tuple[int, int]:
    """The device that is short of most bytes, and how many; 0 where memory is not what fails."""
    limits = run.problem.capacity_bytes
    over = np.maximum(run.line.peak_memory_bytes - limits, 0.0)
    return int(over.argmax()), int(over.max())


def without_advice(error: InfeasibleError) -> str:
    """What the message says before it advises: advice here is tested first."""
    return str(error).partition("; ")[0]
