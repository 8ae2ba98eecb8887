"""Rows of the report's table of other planners on the same problem."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rlplace.cluster.links import fullest_share
from rlplace.errors import InputError, RlplaceError
from rlplace.explanation.report.defaults import DEFAULT_PLANNERS
from rlplace.placement import NEEDS_SPLIT, get_planner
from rlplace.placement.ask import MISSING, attempt
from rlplace.plan import PlacementPlan
from rlplace.problem import Problem
from rlplace.simulator import Timeline, simulate


@dataclass(frozen=True)
class PlannerRow:
    """A planner's plan for the report's problem.

    Attributes:
        planner: Name of the planner.
        this: Whether it is the plan of the report.
        step_time_s: Simulated step time; None without a plan.
        samples_per_s: Simulated samples per second; None without a plan.
        feasible: Whether the plan fits.
        memory_share: Largest share of a device's memory; None where no device has a limit.
        devices_used: Devices with a group; 0 without a plan.
        seconds: Time of planning; None for the plan of the report.
        note: Reason why there is no plan, or a remark.
    """

    planner: str
    this: bool
    step_time_s: float | None
    samples_per_s: float | None
    feasible: bool
    memory_share: float | None
    devices_used: int
    seconds: float | None
    note: str = ""


def planner_rows(
    problem: Problem,
    plan: PlacementPlan,
    timeline: Timeline,
    names: Sequence[str] = DEFAULT_PLANNERS,
    *,
    seed: int = 0,
    time_limit_s: float | None = 2.0,
    report: Callable[[str], None] | None = None,
) -> tuple[PlannerRow, ...]:
    """Returns the plan of the report and those of other planners, quickest first, those that do not fit last.

    Every planner plans steps with the plan's number of samples.

    Args:
        problem: The priced problem.
        plan: The plan of the report.
        timeline: Timeline of that plan.
        names: Names of planners; none: no table.
        seed: Seed of all planners.
        time_limit_s: Time limit of each planner in seconds.
        report: Called with the name of each planner that begins.

    Raises:
        InputError: Unknown planner, or one that plans another kind of problem.
    """
    for name in names:
        get_planner(name)
        if name in NEEDS_SPLIT:
            raise InputError(f"planner {name} plans another kind of problem, so its step times do not compare; leave it out")
    if not names:
        return ()
    rows = [_row(problem, plan.planner, plan, timeline, True, None)]
    for name in dict.fromkeys(names):
        if report is not None:
            report(name)
        run = attempt(get_planner(name), problem, seed=seed, catch=(RlplaceError,), time_limit_s=time_limit_s)
        if isinstance(run.error, InputError):
            raise run.error
        if run.answer is None:
            note = f"{'cannot run' if run.status == MISSING else 'no plan'}: {run.reason}"
            rows.append(PlannerRow(name, False, None, None, False, None, 0, None, note))
        else:
            rows.append(_row(problem, name, run.answer, simulate(problem, run.answer), False, run.seconds))
    return tuple(sorted(rows, key=lambda row: (not row.feasible, row.samples_per_s is None, -(row.samples_per_s or 0.0))))


def _row(problem: Problem, name: str, plan: PlacementPlan, timeline: Timeline, this: bool, seconds: float | None) -> PlannerRow:
    step = timeline.step_time_s
    return PlannerRow(
        planner=name,
        this=this,
        step_time_s=step,
        samples_per_s=timeline.samples / step if step else None,
        feasible=timeline.feasible,
        memory_share=fullest_share(timeline.peak_memory_bytes.tolist(), problem.devices),
        devices_used=len(np.unique(plan.device_of_group)),
        seconds=seconds,
        note="" if timeline.feasible else timeline.violations[0],
    )
