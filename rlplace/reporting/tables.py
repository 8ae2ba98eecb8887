"""Rows of the report's tables: other planners on the same problem, and measured step times beside predicted ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rlplace.cost.timings import PlanTiming, PlanTimings
from rlplace.errors import InputError, MissingError, RlplaceError
from rlplace.plan import PlacementPlan
from rlplace.planners import NEEDS_SPLIT, get_planner, run_planner
from rlplace.problem import Problem
from rlplace.problem.problem import fullest_share
from rlplace.reporting.defaults import DEFAULT_PLANNERS
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


@dataclass(frozen=True)
class MeasuredRow:
    """A plan that ran on real devices.

    Attributes:
        name: Name for display.
        this: Whether it is the plan of the report.
        timing: Measured and predicted times.
    """

    name: str
    this: bool
    timing: PlanTiming


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
    """The plan of the report and those of other planners, quickest first, those that do not fit last.

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
    rows = [_row(problem, plan.planner, timeline, True, len(np.unique(plan.device_of_group)), None)]
    for name in dict.fromkeys(names):
        if report is not None:
            report(name)
        try:
            run = run_planner(name, problem, seed=seed, time_limit_s=time_limit_s)
        except InputError:
            raise
        except RlplaceError as error:
            reason = " ".join(str(error).split())
            what = "cannot run" if isinstance(error, MissingError) else "no plan"
            rows.append(PlannerRow(name, False, None, None, False, None, 0, None, f"{what}: {reason}"))
            continue
        used = len(np.unique(run.plan.device_of_group))
        rows.append(_row(problem, name, simulate(problem, run.plan), False, used, run.seconds))
    return tuple(sorted(rows, key=lambda row: (not row.feasible, row.samples_per_s is None, -(row.samples_per_s or 0.0))))


def _row(problem: Problem, name: str, timeline: Timeline, this: bool, used: int, seconds: float | None) -> PlannerRow:
    step = timeline.step_time_s
    return PlannerRow(
        planner=name,
        this=this,
        step_time_s=step,
        samples_per_s=timeline.samples / step if step else None,
        feasible=timeline.feasible,
        memory_share=fullest_share(timeline.peak_memory_bytes.tolist(), problem.devices),
        devices_used=used,
        seconds=seconds,
        note="" if timeline.feasible else timeline.violations[0],
    )


def measured_rows(timings: PlanTimings, plan: PlacementPlan) -> tuple[MeasuredRow, ...]:
    """The plans of a timings file; the report's own one is known by its fingerprint."""
    fingerprint = plan.fingerprint
    return tuple(MeasuredRow(row.name, row.plan == fingerprint, row) for row in timings.plans)
