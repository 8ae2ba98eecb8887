"""Planners on generated problems: step time, simulator calls and seconds.

    python -m benchmarks.planners [--planners a b c] [--groups N] [--calls N] [--large | --rates]

The tables are those of `rlplace compare`, on generated costs. Search planners start from the floor.
`--large` times every one-shot planner on steps of 5,000 ops, and the floor on larger ones; `--rates` counts the simulations a
second of search planners on steps of 201 ops (67 groups, three phases), floor left out.
"""

from __future__ import annotations

import time
from typing import Any

from benchmarks.harness import arguments
from rlplace.cli.compare_table import print_comparison
from rlplace.errors import InfeasibleError
from rlplace.explanation.compare import Case, Settings, Store, compare, gather
from rlplace.placement import ONE_SHOT, run_planner
from rlplace.placement.common.bounds import lower_bounds
from rlplace.problem import Problem
from rlplace.problem.generate import random_problem

SEARCH = ("annealing", "local_search")
"""One-shot planners that are not part of the floor."""


def problems(groups: int) -> list[Problem]:
    """Makes problems whose shapes, links, memory and speeds pull in different directions."""
    settings: list[dict[str, Any]] = [
        {"shape": shape, **more}
        for shape in ("layered", "branchy", "chain")
        for more in (
            {"num_devices": 2, "memory_factor": 1.15},
            {"num_devices": 4, "memory_factor": 1.3},
            {"num_devices": 4, "comm_ratio": 3.0, "memory_factor": 1.6},
            {"num_devices": 4, "unlike": True},
            {"num_devices": 8, "hosts": 2, "memory_factor": 2.0},
        )
    ]
    return [random_problem(index, groups, **setting) for index, setting in enumerate(settings)]


def rates() -> None:
    """Counts simulations a second of process time, so that other work on the machine counts little."""
    calls = {"annealing": 20_000, "local_search": 4_000}
    for name in SEARCH:
        run_planner(name, random_problem(0, 8), calls=8)  # compiles
    found: dict[str, list[float]] = {name: [] for name in SEARCH}
    for problem in problems(67):
        try:
            start = run_planner("best", problem).plan
        except InfeasibleError:
            continue
        for name in SEARCH:
            began_s = time.process_time()
            run = run_planner(name, problem, calls=calls[name], start=start)
            found[name].append(run.simulator_calls / (time.process_time() - began_s))
        print(
            f"{problem.name:28s} {problem.num_ops} ops  " + "  ".join(f"{name} {row[-1]:7.0f}/s" for name, row in found.items())
        )
    print(f"{'least':28s}          " + "  ".join(f"{name} {min(row):7.0f}/s" for name, row in found.items()))


def large() -> None:
    """Times one-shot planners on 5,000 ops, and `best` on up to 100,000."""
    run_planner("best", random_problem(0, 8))  # compiles
    for devices in (4, 8):
        problem = random_problem(1, 1_667, devices, memory_factor=1.6)
        for name in (*ONE_SHOT, "best"):
            began_s = time.process_time()
            try:
                run_planner(name, problem)
                said = ""
            except InfeasibleError:
                said = "  infeasible"
            print(f"{problem.num_ops} ops, {devices} devices: {name:14s} {time.process_time() - began_s:7.3f} s{said}")
    for groups, limit in ((5_000, None), (33_400, 20.0)):
        for factor in (None, 1.3):
            problem = random_problem(1, groups, 8, memory_factor=factor)
            run = run_planner("best", problem, time_limit_s=limit)
            step = float(run.plan.predicted.step_time_s)
            print(
                f"{problem.num_ops} ops, {groups} groups, memory factor {factor}: {1e3 * step:.1f} ms, "
                f"{step / lower_bounds(problem).step_time_s:.3f} x bound, {run.simulator_calls} calls, {run.seconds:.2f} s"
            )


def main() -> None:
    """Compares planners, or times them."""
    options = arguments(
        __doc__,
        planners=(("random", *ONE_SHOT, "best", *SEARCH), "names"),
        groups=(200, "of every problem"),
        calls=(1024, "simulator calls of search planners after the floor"),
        large="seconds on 5,000 ops, and of best on up to 100,000 ops",
        rates="simulations a second of search planners on 201 ops",
    )
    if options.large or options.rates:
        return large() if options.large else rates()
    cases = [Case(problem.name, "", lambda same=problem: same) for problem in problems(options.groups)]
    store = Store(Settings(calls=options.calls, seeds=1))
    compare(cases, options.planners, store)
    print_comparison(gather(store, cases, options.planners))


if __name__ == "__main__":
    main()
