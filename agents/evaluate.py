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
from rlplace.planners import get_planner
from rlplace.problem import Problem

DEFAULT_PLANNERS = ("single", "round_robin", "balanced", "heft", "m_etf", "metis", "best", "annealing", "local_search")
_SEARCHES = ("annealing", "local_search")


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
    seed: int = 0,
) -> list[Row]:
    """Runs every planner and the agent on every problem."""
    floor = [_run("best", problem, seed, None) for problem in problems]
    rows = []
    for name in planners:
        runs = floor if name == "best" else [_run(name, p, seed, calls if name in _SEARCHES else None) for p in problems]
        rows.append(_row(f"{name} ({calls} calls)" if name in _SEARCHES else name, runs, floor))
    runs, single = [], []
    for problem, (best, _) in zip(problems, floor, strict=True):
        begin = time.perf_counter()
        try:
            plan = trained.place(problem, seed=seed, calls=calls)
            runs.append((plan.predicted["step_time_s"], time.perf_counter() - begin))
            one = plan.predicted["single_rollout_step_time_s"]
            single.append((min(x for x in (one, best) if x is not None) if one or best else None, math.nan))
        except InfeasibleError:
            runs.append((None, time.perf_counter() - begin))
            single.append((None, math.nan))
    rows.append(_row("agent, one rollout", single, floor))
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
    lines.append("step time / step time of best, geometric mean; executor list, simulated, one micro-batch; below 1 is faster")
    return "\n".join(lines)


def _run(name: str, problem: Problem, seed: int, calls: int | None) -> tuple[float | None, float]:
    options: dict[str, Any] = {} if calls is None else {"calls": calls}
    begin = time.perf_counter()
    try:
        step = get_planner(name)(problem, seed=seed, **options).predicted["step_time_s"]
    except InfeasibleError:
        step = None
    return step, time.perf_counter() - begin


def _row(name: str, runs: Sequence[tuple[float | None, float]], floor: Sequence[tuple[float | None, float]]) -> Row:
    ratios = [run / best for (run, _), (best, _) in zip(runs, floor, strict=True) if run is not None and best is not None]
    return Row(
        planner=name,
        ratio=float(np.exp(np.mean(np.log(ratios)))) if ratios else math.nan,
        feasible=sum(run is not None for run, _ in runs),
        problems=len(runs),
        better=sum(ratio < 0.999 for ratio in ratios),
        worse=sum(ratio > 1.001 for ratio in ratios),
        seconds=float(np.mean([seconds for _, seconds in runs])) if runs else math.nan,
    )
