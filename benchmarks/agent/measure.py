"""The sets of cases, which rows are asked for, and making those that are not there.

Every row is one run from the floor, with its answer simulated anew; in this process or in one process a core.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.agent.methods import place_of
from benchmarks.agent.race import starts_of
from benchmarks.agent.records import BenchmarkRow, Budget, CaseInfo, Method, Store
from rlplace.agents.problems import split_cases
from rlplace.agents.problems.cases import ProblemCase, is_branchy
from rlplace.errors import InputError
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


Ask = tuple[ProblemCase, Method, Budget, int]
"""Case, method, budget and seed of a row that is asked for."""


def tell(line: str) -> None:
    """Prints a line about progress; results alone go to stdout."""
    print(line, file=sys.stderr, flush=True)


def random_cases(count: int = 6, seed: int = 700_000) -> list[ProblemCase]:
    """Returns small random graphs, to try the benchmark itself; no result is claimed on them."""
    cases = []
    for number in range(count):
        shape = ("branchy", "chain", "layered")[number % 3]
        problem = random_problem(seed + number, 20 + 5 * number, 2 + number % 3, shape=shape, unlike=number % 2 == 1)
        cases.append(ProblemCase(f"random-{number}", f"random:{shape}", problem, is_branchy(problem), number % 2 == 1))
    return cases


SHAPES = ("branchy", "layered", "towers", "wavefront")
CLUSTERS: tuple[tuple[int, dict[str, Any]], ...] = (
    (8, {}),
    (16, {"hosts": 4, "unlike": True, "memory_factor": 1.4}),
    (64, {"hosts": 8}),
)


def large_case(name: str, groups: int, shape: int, cluster: int) -> ProblemCase:
    """Makes a random graph of three ops a group that nothing is tuned on; with 20,000 groups a simulation takes 8 to 19 ms."""
    devices, more = CLUSTERS[cluster]
    problem = random_problem(900_000 + shape, groups, devices, shape=SHAPES[shape], width=16, **more)
    return ProblemCase(f"{name}-{SHAPES[shape]}-{devices}", f"synthetic:{SHAPES[shape]}", problem, is_branchy(problem), True)


def large_cases(name: str, groups: int) -> list[ProblemCase]:
    """Returns every shape on every cluster."""
    return [large_case(name, groups, shape, cluster) for shape in range(len(SHAPES)) for cluster in range(len(CLUSTERS))]


SETS = {
    "test": partial(split_cases, "test", progress=tell),
    "validation": partial(split_cases, "validation", progress=tell),
    "random": random_cases,
    "large": partial(large_cases, "large", 2_000),
    "larger": partial(large_cases, "larger", 6_667),
    "dear": partial(large_cases, "dear", 20_000),
}


def pick(cases: Sequence[ProblemCase], names: str) -> list[ProblemCase]:
    """Returns the cases whose name holds one of the texts in `names` (all when empty)."""
    wanted = split(names)
    kept = [case for case in cases if not wanted or any(text in case.name for text in wanted)]
    if not kept:
        raise InputError(f"--cases {names}: no case has such a name; for example {cases[0].name}")
    return kept


def split(text: str) -> list[str]:
    """Returns the items of a list with commas."""
    return [item.strip() for item in text.split(",") if item.strip()]


def matrix(cases: Sequence[ProblemCase], methods: Sequence[Method], budgets: str, seeds: int, agent_seeds: int) -> list[Ask]:
    """Returns every method on every case, budget after budget, so that what is cut short is complete for the first ones."""
    return [
        (case, method, budget, seed)
        for budget in [Budget.parse(text) for text in split(budgets)]
        for case in cases
        for method in methods
        for seed in range(agent_seeds if method.checkpoint else seeds)
    ]


def measure(store: Store, asked: Sequence[Ask], processes: int) -> None:
    """Makes the rows that are asked for and not in the file, floors first."""
    cores = len(os.sched_getaffinity(0))
    if not 1 <= processes <= cores:
        raise InputError(f"--processes {processes}: this machine has {cores} cores for it, give 1 to {cores}")
    cases = {case.name: case for case, *_ in asked}
    for name, case in cases.items():
        if name in store.cases and store.cases[name].fingerprint != case.problem.fingerprint:
            raise InputError(f"{name} is another problem than that of the file; use another --out")
    for method in {method.name: method for _, method, *_ in asked}.values():
        store.add(method)
    missing = [ask for ask in asked if not store.done((ask[0].name, ask[1].name, str(ask[2]), ask[3]))]
    if not missing:
        return
    with workers(processes) as run:
        for info in run(floor_of, [case for case in cases.values() if case.name not in store.cases]):
            store.add(info)
            tell(f"floor of {info.name}: {info.floor_s} s, found in {info.floor_seconds:.2f} s")
        jobs = (Job(store.cases[case.name], case.problem, method, budget, seed) for case, method, budget, seed in missing)
        begin = told = time.monotonic()
        for number, row in enumerate(run(run_row, jobs), start=1):
            store.add(row)
            if row.violation is not None and store.cases[row.case].floor_s is not None:
                tell(f"{row.method} on {row.case} with {row.budget}: {row.violation}")
            if time.monotonic() - told > 10 or number == len(missing):
                told = time.monotonic()
                tell(f"row {number}/{len(missing)}, {row.budget}, {told - begin:.0f} s")
