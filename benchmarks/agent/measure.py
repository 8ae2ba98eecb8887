"""Runs rows: each once, from the floor, with its answer simulated anew; in this process or in one process a core."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray

from benchmarks.agent.methods import place_of
from benchmarks.agent.records import BenchmarkRow, Budget, CaseInfo, Method
from rlplace.agents.cases import Case
from rlplace.plan import PlacementPlan
from rlplace.plan.prediction import Prediction
from rlplace.planners import get_planner, run_planner
from rlplace.planners.attempt import INFEASIBLE, attempt
from rlplace.planners.common.groupgraph import group_graph
from rlplace.planners.common.oparrays import op_arrays
from rlplace.problem import Problem
from rlplace.problem.generate import random_problem
from rlplace.simulator import simulate

SAME = 1e-9
"""Relative difference up to which a stated and a simulated step time are the same."""


@dataclass(frozen=True, eq=False)
class Job:
    """One row to make, or the floor of a case when there is no method.

    Attributes:
        info: The case.
        method, budget, seed: Of the row.
    """

    info: CaseInfo
    method: Method | None = None
    budget: Budget | None = None
    seed: int = 0

    @property
    def key(self) -> tuple[str, str, str, int]:
        """Of the row."""
        assert self.method is not None
        return self.info.name, self.method.name, str(self.budget), self.seed


def floor_of(info: CaseInfo, problem: Problem) -> CaseInfo:
    """The case with the plan of `best`."""
    _warm_floor()
    run = attempt(get_planner("best"), problem, judge=lambda plan: check(problem, plan))
    info = replace(info, floor_seconds=run.seconds, floor_calls=run.simulator_calls)
    if run.answer is None:
        return info
    step_s, violation = run.judged
    if violation is not None or step_s is None:
        raise RuntimeError(f"{info.name}: the floor is wrong: {violation}")
    return replace(info, floor_s=step_s, floor=run.answer.device_of_group.tolist())


def run_row(job: Job, problem: Problem) -> BenchmarkRow:
    """Makes a row; whatever goes wrong in a method is a fact about it and stands in the row."""
    assert job.method is not None and job.budget is not None
    start = None if job.info.floor is None else np.array(job.info.floor, dtype=np.int32)
    place = _warm(job.method)
    problem = after_floor(problem, start)
    run = attempt(
        place,
        problem,
        seed=job.seed,
        judge=lambda plan: (*check(problem, plan), plan.predicted),
        catch=(Exception,),
        start=start,
        **job.budget.arguments,
    )
    step_s, violation, predicted = run.judged or (
        None,
        f"no plan: {run.reason}" if run.status == INFEASIBLE else run.reason,
        Prediction(),
    )
    ending = "_step_time_s"
    return BenchmarkRow(
        case=job.info.name,
        method=job.method.name,
        budget=str(job.budget),
        seed=job.seed,
        status=run.status,
        step_time_s=step_s,
        violation=violation,
        stated_s=None if predicted.step_time_s is None else float(predicted.step_time_s),
        calls=run.simulator_calls,
        seconds=run.seconds,
        load=os.getloadavg()[0],
        stages={
            key.removesuffix(ending): float(value)
            for key, value in predicted.to_dict().items()
            if key.endswith(ending) and isinstance(value, (int, float))
        },
    )


def after_floor(problem: Problem, start: NDArray[np.int32] | None) -> Problem:
    """The problem as it is right after the floor: what `best` has derived from it is kept with it, nothing else is.

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
def workers(cases: Sequence[Case], processes: int) -> Iterator[Callable[[Iterable[Job]], Iterator[BenchmarkRow | CaseInfo]]]:
    """Runs jobs in so many processes, each with one thread; yields a function from jobs to their results as they come."""
    torch.set_num_threads(1)
    problems = {case.name: case.problem for case in cases}
    if processes == 1:
        yield lambda jobs: (_result(job, problems[job.info.name]) for job in jobs)
        return
    with tempfile.TemporaryDirectory() as folder:
        paths = {case.name: Path(folder) / f"{number}.problem.json" for number, case in enumerate(cases)}
        for case in cases:
            case.problem.save(paths[case.name])
        pool = ProcessPoolExecutor(processes, mp_context=get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,))
        try:
            yield lambda jobs: _spread(pool, jobs, paths, 2 * processes)
        finally:
            pool.shutdown(cancel_futures=True)


def _spread(
    pool: ProcessPoolExecutor, jobs: Iterable[Job], paths: dict[str, Path], most: int
) -> Iterator[BenchmarkRow | CaseInfo]:
    """Few jobs are on their way at a time, so that an interruption waits for few."""
    queue, running = iter(jobs), set[Future[BenchmarkRow | CaseInfo]]()
    while True:
        for job in queue:
            running.add(pool.submit(_remote, job, str(paths[job.info.name])))
            if len(running) >= most:
                break
        if not running:
            return
        finished, running = wait(running, return_when=FIRST_COMPLETED)
        for future in finished:
            yield future.result()


def _remote(job: Job, path: str) -> BenchmarkRow | CaseInfo:
    return _result(job, _problem(path, job.info.fingerprint))


@cache
def _problem(path: str, fingerprint: str) -> Problem:
    problem = Problem.load(path)
    if problem.fingerprint != fingerprint:
        raise RuntimeError(f"{path}: the problem {problem.name} changed on its way through the file")
    return problem


def _result(job: Job, problem: Problem) -> BenchmarkRow | CaseInfo:
    return floor_of(job.info, problem) if job.method is None else run_row(job, problem)


@cache
def _warm_floor() -> None:
    run_planner("best", random_problem(0, 8, 2))


_ready: dict[str, Any] = {}


def _warm(method: Method) -> Any:
    """The function of a method, which has placed a small problem before so that nothing is compiled while time counts."""
    if method.name not in _ready:
        place = place_of(method)
        problem = random_problem(0, 8, 2)
        try:
            place(problem, seed=0, start=np.zeros(8, dtype=np.int32), calls=8)
        except TypeError as error:  # a method without `calls`
            if "calls" not in str(error):
                raise
            place(problem, seed=0, start=np.zeros(8, dtype=np.int32), time_limit_s=0.5)
        _ready[method.name] = place
    return _ready[method.name]
