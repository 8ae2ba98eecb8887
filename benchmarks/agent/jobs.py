"""The sets of cases, which rows are asked for, and making those that are not there."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from benchmarks.agent.measure import Job, floor_of, run_row, workers
from benchmarks.agent.records import Budget, Method, Store
from rlplace.agents.problems import split_cases
from rlplace.agents.problems.cases import ProblemCase, is_branchy
from rlplace.errors import InputError
from rlplace.problem.generate import random_problem

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
