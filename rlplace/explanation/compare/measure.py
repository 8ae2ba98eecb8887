"""One planner on one problem: its runs over seeds, their plans simulated anew, and the resulting row."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any, cast

from msgspec.structs import replace

from rlplace.cluster.links import Device, fullest_share
from rlplace.errors import InfeasibleError, RlplaceError
from rlplace.explanation.compare.records import ComparisonRow, ProblemInfo, Settings, Status
from rlplace.placement import PLANNERS, get_planner
from rlplace.placement.ask import FAILED, MISSING, OK, Attempt, attempt
from rlplace.plan import PlacementPlan
from rlplace.plan.prediction import Prediction
from rlplace.problem import Problem
from rlplace.problem.generate import random_problem
from rlplace.simulator import simulate

SEEDED = frozenset({"random", "metis"})
"""Planners without a budget of calls whose plan depends on the seed; a test holds this list."""


def takes_calls(name: str) -> bool:
    """Returns whether the planner is a search with a budget of simulator calls."""
    return "calls" in inspect.signature(get_planner(name)).parameters


def is_random(name: str) -> bool:
    """Returns whether the planner's plan depends on its seed; planners of other packages count as if it did."""
    return name in SEEDED or name not in PLANNERS or takes_calls(name)


def warm_up(name: str, settings: Settings) -> None:
    """Plans a small problem, so that no timing includes imports and compilation; errors show in the rows."""
    options = _options(name, replace(settings, calls=4))
    try:
        get_planner(name)(random_problem(0, 6, 2), seed=0, time_limit_s=1.0, **options)
    except Exception:
        return


def run_row(name: str, info: ProblemInfo, problem: Problem, settings: Settings, *, strict: bool = False) -> ComparisonRow:
    """Runs a planner on a problem, once or once a seed; errors become the row's reason, bugs too unless `strict`."""
    shuffled, limited = is_random(name), settings.calls is not None and takes_calls(name)
    runs: list[Attempt] = []
    for seed in range(settings.seeds if shuffled else 1):
        run = attempt(
            get_planner(name),
            problem,
            seed=seed,
            judge=lambda plan: measure(plan, problem),
            catch=(RlplaceError,) if strict else (Exception,),  # a planner's bug is its row, not the comparison's end
            time_limit_s=None if limited else settings.time_limit_s,
            **_options(name, settings),
        )
        runs.append(run)
        if run.status in (MISSING, FAILED):
            break
    row = row_of(name, info, runs, problem.devices, random=shuffled)
    if row.step_time_s is None:
        return row
    bound, binding = info.bound
    gap = row.step_time_s / bound - 1.0 if bound > 0 else None
    remark = next((told for run in runs if run.judged is not None and (told := _remark(run))), None)
    return replace(row, reason=row.reason or remark, bound_s=bound, binding=binding, gap=gap)


def row_of(name: str, info: ProblemInfo, runs: Sequence[Attempt], devices: Sequence[Device], *, random: bool) -> ComparisonRow:
    """Returns the row of these runs, whose plans were judged by a `Prediction`, without bounds."""
    bad = next((run for run in runs if run.status != OK), None)
    figures: dict[str, Any] = {}
    if found := [run.judged for run in runs if run.judged is not None]:
        steps = [predicted.step_s for predicted in found]
        shares = [fullest_share(predicted.peak_memory_bytes, devices) for predicted in found]
        figures = {
            "step_time_s": sum(steps) / len(steps),
            "spread_s": max(steps) - min(steps) if len(steps) > 1 else None,
            "samples_per_s": sum(predicted.samples_per_s for predicted in found) / len(steps),
            "memory_share": max((share for share in shares if share is not None), default=None),
        }
    return ComparisonRow(
        model=info.model,
        cluster=info.cluster,
        view=info.view,
        planner=name,
        status=cast(Status, OK if bad is None else bad.status),
        reason=None if bad is None else bad.reason,
        random=random,
        seeds=len(runs),
        feasible_seeds=sum(run.status == OK for run in runs),
        simulator_calls=sum(run.simulator_calls for run in runs) / len(runs),
        seconds=sum(run.seconds for run in runs) / len(runs),
        **figures,
    )


def _remark(run: Attempt) -> str | None:
    """Returns the planner's own prediction, where it differs."""
    said_s = run.plan.predicted.step_time_s
    if said_s is None or math.isclose(said_s, run.judged.step_s, rel_tol=1e-9):
        return None
    return f"the planner said {1e3 * said_s:.3f} ms"


def _options(name: str, settings: Settings) -> dict[str, Any]:
    options: dict[str, Any] = {"agent": settings.agent} if name == "agent" else {}
    if settings.calls is not None and takes_calls(name):
        options["calls"] = settings.calls
    return options


def measure(plan: PlacementPlan, problem: Problem) -> Prediction:
    """Simulates a plan anew.

    Raises:
        InfeasibleError: It does not fit, whatever its planner says.
        InputError: It is for another problem.
    """
    line = simulate(problem, plan)
    if not line.feasible:
        raise InfeasibleError(f"the plan does not fit when it is simulated again: {line.violations[0]}")
    return line.predicted(problem)
