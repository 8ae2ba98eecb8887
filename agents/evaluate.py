"""The closing table of a training: the agent against the classical planners on cases that it has not seen.

Metric: step time of the case's schedule, as the geometric mean over cases of step time / step time of ``best``. Searches and
the agent start from the plan of ``best`` and get the same number of simulator calls.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlplace.agents.cases import Case
from rlplace.agents.planner import Agent
from rlplace.errors import InfeasibleError
from rlplace.planners import get_planner

DEFAULT_PLANNERS = ("single", "round_robin", "balanced", "heft", "m_etf", "metis", "best", "annealing", "local_search")
_SEARCHES = ("annealing", "local_search", "brkga")


@dataclass(frozen=True)
class ClosingRow:
    """One planner's results.

    Attributes:
        planner: Name; ``agent, one rollout`` is the floor or the first greedy rollout, whichever is faster.
        ratio: Geometric mean of step time over that of ``best``, on the cases where both are feasible.
        branchy: The same on branchy cases alone.
        feasible: Number of cases with a feasible plan. cases: Number of cases.
        better, worse: Cases where it is at least 0.1 % faster or slower than ``best``.
        seconds: Mean wall time of a plan; of searches after ``best``.
    """

    planner: str
    ratio: float
    branchy: float
    feasible: int
    cases: int
    better: int
    worse: int
    seconds: float


def compare_agent(
    trained: Agent,
    cases: Sequence[Case],
    *,
    planners: Sequence[str] = DEFAULT_PLANNERS,
    calls: int = 256,
    seeds: int = 3,
) -> list[ClosingRow]:
    """Runs every planner and the agent on every case; searches run once a seed and count with the geometric mean.

    Args:
        trained: The agent.
        cases: What to solve.
        planners: Names of the classical planners.
        calls: Simulator calls after the floor for every search and for the agent.
        seeds: Runs of whatever is random.
    """
    floor = [_solve(get_planner("best"), case, None, 1) for case in cases]
    rows = []
    for name in planners:
        if name in _SEARCHES:
            runs = [
                _solve(get_planner(name), case, best.plan, seeds, calls=calls) for case, best in zip(cases, floor, strict=True)
            ]
            rows.append(_row(f"{name} ({calls} calls)", runs, floor, cases))
        else:
            runs = floor if name == "best" else [_solve(get_planner(name), case, None, 1) for case in cases]
            rows.append(_row(name, runs, floor, cases))
    for label, options in (("agent, one rollout", {"samples": 1, "search": False}), (f"agent ({calls} calls)", {})):
        runs = [
            _solve(trained.place, case, best.plan, seeds if not options else 1, calls=calls, **options)
            for case, best in zip(cases, floor, strict=True)
        ]
        rows.append(_row(label, runs, floor, cases))
    return rows


def format_rows(rows: Sequence[ClosingRow], title: str) -> str:
    """The table as text."""
    head = f"{'planner':28s} {'vs best':>8s} {'branchy':>8s} {'feasible':>9s} {'better':>7s} {'worse':>6s} {'seconds':>8s}"
    lines = [title, head]
    for row in rows:
        values = ["" if math.isnan(value) else f"{value:.4f}" for value in (row.ratio, row.branchy)]
        seconds = "" if math.isnan(row.seconds) else f"{row.seconds:.2f}"
        counts = f"{f'{row.feasible}/{row.cases}':>9s} {row.better:7d} {row.worse:6d}"
        lines.append(f"{row.planner:28s} {values[0]:>8s} {values[1]:>8s} {counts} {seconds:>8s}")
    lines.append("step time / that of best, geometric mean, below 1 is faster; searches start from best, over several seeds")
    lines.append("simulated, under the schedule and micro-batches of each case")
    return "\n".join(lines)


@dataclass(frozen=True)
class Solved:
    """One planner on one case.

    Attributes:
        step_s: Geometric mean over seeds; None when a seed found no feasible plan.
        seconds: Mean wall time of a plan.
        plan: The last plan found.
    """

    step_s: float | None
    seconds: float
    plan: Any


def _solve(planner: Callable[..., Any], case: Case, start: Any, seeds: int, **options: Any) -> Solved:
    steps, plan, begin = [], None, time.perf_counter()
    if start is not None:
        options["start"] = start
    for seed in range(seeds):
        try:
            plan = planner(case.problem, seed=seed, **options, **case.execution.arguments)
        except InfeasibleError:
            continue
        steps.append(plan.predicted.step_time_s)
    seconds = (time.perf_counter() - begin) / seeds
    return Solved(_mean(steps) if len(steps) == seeds else None, seconds, None if plan is None else plan.device_of_group)


def _mean(values: Sequence[float]) -> float:
    return float(np.exp(np.mean(np.log(values)))) if values else math.nan


def _row(name: str, runs: Sequence[Solved], floor: Sequence[Solved], cases: Sequence[Case]) -> ClosingRow:
    ratios = [
        (run.step_s / best.step_s, case.branchy)
        for run, best, case in zip(runs, floor, cases, strict=True)
        if run.step_s is not None and best.step_s is not None
    ]
    return ClosingRow(
        planner=name,
        ratio=_mean([ratio for ratio, _ in ratios]),
        branchy=_mean([ratio for ratio, branchy in ratios if branchy]),
        feasible=sum(run.step_s is not None for run in runs),
        cases=len(runs),
        better=sum(ratio < 0.999 for ratio, _ in ratios),
        worse=sum(ratio > 1.001 for ratio, _ in ratios),
        seconds=float(np.mean([run.seconds for run in runs])) if runs else math.nan,
    )
