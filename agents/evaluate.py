"""The closing table of a training: the agent against the classical planners on problems it has not seen.

Executor: ``list``. Metric: step time of one step, as the geometric mean over problems of step time / step time of ``best``.
Searches get the same number of simulator calls after the floor.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlplace.agents.planner import Agent
from rlplace.errors import InfeasibleError
from rlplace.planners import Planner, get_planner
from rlplace.problem import Problem

DEFAULT_PLANNERS = ("single", "round_robin", "balanced", "heft", "m_etf", "metis", "best", "annealing", "local_search")
_SEARCHES = ("annealing", "local_search", "brkga")


@dataclass(frozen=True)
class Row:
    """One planner's results.

    Attributes:
        planner: Name; ``agent, one rollout`` is the floor or the first greedy rollout, whichever is faster.
        ratio: Geometric mean of step time over that of ``best``, on the problems where both are feasible.
        feasible: Number of problems with a feasible plan. problems: Number of problems.
        better, worse: Problems where it is at least 0.1 % faster or slower than ``best``.
        seconds: Mean wall time of a plan.
    """

    planner: str
    ratio: float
    feasible: int
    problems: int
    better: int
    worse: int
    seconds: float


def compare_agent(
    trained: Agent,
    problems: Sequence[Problem],
    *,
    planners: Sequence[str] = DEFAULT_PLANNERS,
    calls: int = 256,
    seeds: int = 3,
) -> list[Row]:
    """Runs every planner and the agent on every problem; searches run once a seed and count with the geometric mean.

    Args:
        trained: The agent.
        problems: What to solve.
        planners: Names of the classical planners.
        calls: Simulator calls after the floor for every search and for the agent.
        seeds: Runs of whatever is random.
    """
    floor = [_solve(get_planner("best"), problem, 1) for problem in problems]
    rows = []
    for name in planners:
        if name in _SEARCHES:
            runs = [_solve(get_planner(name), problem, seeds, calls=calls) for problem in problems]
            rows.append(_row(f"{name} ({calls} calls)", runs, floor))
        else:
            runs = floor if name == "best" else [_solve(get_planner(name), problem, 1) for problem in problems]
            rows.append(_row(name, runs, floor))
    runs = [_solve(trained.place, problem, seeds, calls=calls) for problem in problems]
    rows.append(_row("agent, one rollout", [Solved(run.single_s, None, math.nan) for run in runs], floor))
    rows.append(_row(f"agent ({calls} calls)", runs, floor))
    return rows


def format_rows(rows: Sequence[Row], title: str) -> str:
    """The table as text."""
    lines = [title, f"{'planner':28s} {'vs best':>8s} {'feasible':>9s} {'better':>7s} {'worse':>6s} {'seconds':>8s}"]
    for row in rows:
        seconds = "" if math.isnan(row.seconds) else f"{row.seconds:8.2f}"
        ratio = "" if math.isnan(row.ratio) else f"{row.ratio:8.3f}"
        feasible = f"{row.feasible}/{row.problems}"
        lines.append(f"{row.planner:28s} {ratio:>8s} {feasible:>9s} {row.better:7d} {row.worse:6d} {seconds:>8s}")
    lines.append("step time / that of best, geometric mean, below 1 is faster; searches over several seeds")
    lines.append("executor list, simulated, one micro-batch")
    return "\n".join(lines)


@dataclass(frozen=True)
class Solved:
    """One planner on one problem.

    Attributes:
        step_s: Geometric mean over seeds; None when a seed found no feasible plan.
        single_s: The same after the agent's first rollout alone, the floor counted in.
        seconds: Mean wall time of a plan.
    """

    step_s: float | None
    single_s: float | None
    seconds: float


def _solve(planner: Planner, problem: Problem, seeds: int, **options: Any) -> Solved:
    steps, single, begin = [], [], time.perf_counter()
    for seed in range(seeds):
        try:
            predicted = planner(problem, seed=seed, **options).predicted
        except InfeasibleError:
            continue
        steps.append(predicted["step_time_s"])
        rolled = [predicted.get("floor_step_time_s"), predicted.get("single_rollout_step_time_s")]
        single.append(min((value for value in rolled if value is not None), default=None))
    seconds = (time.perf_counter() - begin) / seeds
    found = [value for value in single if value is not None]
    return Solved(
        _mean(steps) if len(steps) == seeds else None, _mean(found) if found and len(found) == seeds else None, seconds
    )


def _mean(values: Sequence[float]) -> float:
    return float(np.exp(np.mean(np.log(values))))


def _row(name: str, runs: Sequence[Solved], floor: Sequence[Solved]) -> Row:
    ratios = [
        run.step_s / best.step_s
        for run, best in zip(runs, floor, strict=True)
        if run.step_s is not None and best.step_s is not None
    ]
    return Row(
        planner=name,
        ratio=_mean(ratios) if ratios else math.nan,
        feasible=sum(run.step_s is not None for run in runs),
        problems=len(runs),
        better=sum(ratio < 0.999 for ratio in ratios),
        worse=sum(ratio > 1.001 for ratio in ratios),
        seconds=float(np.mean([run.seconds for run in runs])) if runs else math.nan,
    )
