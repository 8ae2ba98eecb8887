"""One run for each row, from the floor, with its answer simulated anew; in this process or in one process a core."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.agent.methods import place_of
from benchmarks.agent.race import starts_of
from benchmarks.agent.records import BenchmarkRow, Budget, CaseInfo, Method
from rlplace.agents.problems.cases import ProblemCase
from rlplace.placement import get_planner, run_planner
from rlplace.placement.ask import INFEASIBLE, attempt
from rlplace.placement.common.groupgraph import group_graph
from rlplace.placement.common.oparrays import op_arrays
from rlplace.plan import PlacementPlan
from rlplace.problem import Problem
from rlplace.problem.generate import random_problem
from rlplace.simulator import simulate

SAME = 1e-9
"""Relative difference up to which a stated and a simulated step time are the same."""


@dataclass(frozen=True, eq=False)
class Job:
    """One row to make.

    Attributes:
        info, problem: The case.
        method, budget, seed: Of the row.
    """

    info: CaseInfo
    problem: Problem
    method: Method
    budget: Budget
    seed: int


def floor_of(case: ProblemCase) -> CaseInfo:
    """Returns the case with the plan of `best`."""
    _warm_floor()
    run = attempt(get_planner("best"), case.problem, judge=lambda plan: check(case.problem, plan))
    floor_s, floor = None, None
    if run.answer is not None:
        floor_s, violation = run.judged
        if violation is not None:
            raise RuntimeError(f"{case.name}: the floor is wrong: {violation}")
        floor = run.answer.device_of_group.tolist()
    fingerprint = case.problem.fingerprint
    return CaseInfo(case.name, case.family, fingerprint, case.branchy, case.unseen_cluster, floor_s, floor, run.seconds)


def run_row(job: Job) -> BenchmarkRow:
    """Makes a row; whatever goes wrong in a method is a fact about it and stands in the row."""
    start = None if job.info.floor is None else np.array(job.info.floor, dtype=np.int32)
    place = _warm(job.method)
    problem = after_floor(job.problem, start)
    if start is not None and job.method.name.partition(" ")[0] == "race":
        starts_of(problem)  # the plans of which `best` took one are known when the clock begins
    run = attempt(
        place,
        problem,
        seed=job.seed,
        judge=lambda plan: check(problem, plan),
        catch=(Exception,),
        start=start,
        **job.budget.arguments,
    )
    reason = f"no plan: {run.reason}" if run.status == INFEASIBLE else run.reason
    step_s, violation = run.judged or (None, reason)
    return BenchmarkRow(
        case=job.info.name,
        method=job.method.name,
        budget=str(job.budget),
        seed=job.seed,
        status=run.status,
        step_time_s=step_s,
        violation=violation,
        calls=run.simulator_calls,
        seconds=run.seconds,
        load=os.getloadavg()[0],
    )


def after_floor(problem: Problem, start: NDArray[np.int32] | None) -> Problem:
    """Returns the problem as it is right after the floor: what `best` has derived from it is kept with it, nothing else is.

    Every row has a copy of its own, so that no method profits from what an earlier row has derived.
    """
    copy = dataclasses.replace(problem)
    vars(copy)["fingerprint"] = problem.fingerprint
    group_graph(copy)
    op_arrays(copy)
    simulate(copy, np.zeros(copy.num_groups, dtype=np.int32) if start is None else start)
    return copy


def check(problem: Problem, plan: PlacementPlan) -> tuple[float | None, str | None]:
    """Simulates a plan anew: its step time, and what is wrong with it."""
    line = simulate(problem, plan)
    step_s = None if line.step_time_s is None or not np.isfinite(line.step_time_s) else float(line.step_time_s)
    if not line.feasible or step_s is None:
        return step_s, f"not feasible: {'; '.join(line.violations)[:300]}"
    stated = plan.predicted.step_time_s
    if stated is None or abs(stated - step_s) > SAME * step_s:
        return step_s, f"states a step of {stated} s, it takes {step_s} s"
    return step_s, None


@contextmanager
def workers(processes: int) -> Iterator[Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]]:
    """Yields a `map` over so many processes with one thread each; results come as they are made."""
    torch.set_num_threads(1)
    if processes == 1:
        yield map
    else:
        with get_context("spawn").Pool(processes, torch.set_num_threads, (1,)) as pool:
            yield pool.imap_unordered


@cache
def _warm_floor() -> None:
    run_planner("best", random_problem(0, 8, 2))


_ready: dict[str, Any] = {}


def _warm(method: Method) -> Any:
    """Returns the function of a method, which has placed a small problem before, so that nothing is left to compile."""
    if method.name not in _ready:
        _ready[method.name] = place_of(method)
        _ready[method.name](random_problem(0, 8, 2), seed=0, start=np.zeros(8, dtype=np.int32), calls=8)
    return _ready[method.name]
