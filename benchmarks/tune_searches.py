"""Settings of the search planners against budgets, on the validation split of the agent's problem sets.

Usage: python benchmarks/tune_searches.py PLANNER [--vary NAME=VALUE,VALUE,...]... [--budgets 64,1024,1s] [--seeds N]

    python benchmarks/tune_searches.py annealing --vary start_temperature=0,0.001,0.01,0.03 --vary cooling=0.1,0.01
    python benchmarks/tune_searches.py local_search --vary tries=12,24,48 --one-by-one
    python benchmarks/tune_searches.py annealing --budgets 1s,5s

Rows are the planner's defaults and every combination of the values that are varied; columns are budgets: simulator calls, or
seconds with an s. An entry is the geometric mean over cases of step time / that of the floor, which every search starts from,
with the standard error over seeds. Compiling and the floor are in no budget. The tables behind the defaults are in
docs/planners/annealing.md, brkga.md and local_search.md. The test split is never read.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlplace.agents.cases import Case
from rlplace.agents.problems import validation_cases
from rlplace.errors import InfeasibleError
from rlplace.plan import PlacementPlan
from rlplace.planners import get_planner, run_planner
from rlplace.problem.generate import random_problem

PLANNERS = ("annealing", "local_search", "brkga")
CALLS = "64,256,1024,4096,16384"


@dataclass(frozen=True, eq=False)
class Started:
    """A case with its floor."""

    case: Case
    floor: PlacementPlan

    @property
    def floor_s(self) -> float:
        return float(self.floor.predicted.step_time_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("planner", choices=PLANNERS)
    parser.add_argument(
        "--vary", action="append", default=[], metavar="NAME=VALUE,...", help="values of an option of the planner"
    )
    parser.add_argument("--one-by-one", action="store_true", help="vary one option at a time instead of all combinations")
    parser.add_argument("--budgets", default=CALLS, help=f"default {CALLS}")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--match", default="", help="only cases with this text in their names")
    parser.add_argument("--folder", default=None, help="where the validation split is kept; default the cache folder")
    args = parser.parse_args()
    budgets = args.budgets.split(",")
    settings = [{}, *combinations(args.vary, one_by_one=args.one_by_one)]
    run_planner(args.planner, random_problem(0, 8), calls=8)  # compiles
    cases = with_floors([case for case in validation_cases(args.folder, progress=tell) if args.match in case.name])
    tell(
        f"{len(cases)} cases, {args.seeds} seeds; step time relative to the floor, geometric mean, +- standard error over seeds"
    )
    print("| " + " | ".join([args.planner, *(name if name.endswith("s") else f"{name} calls" for name in budgets)]) + " |")
    print("|" + "---|" * (1 + len(budgets)))
    for setting in settings:
        label = ", ".join(f"{name} {value}" for name, value in setting.items()) or "defaults"
        print(f"| {label} |", end="", flush=True)
        for budget in budgets:
            logs = measure(args.planner, cases, limits(budget), setting, args.seeds)
            print(f" {entry(logs)} |", end="", flush=True)
        print(flush=True)


def combinations(vary: Sequence[str], *, one_by_one: bool) -> list[dict[str, Any]]:
    """Settings from texts ``name=value,value``."""
    options = []
    for text in vary:
        name, equals, values = text.partition("=")
        if not equals or not name.isidentifier():
            sys.exit(f"--vary {text}: expected NAME=VALUE,VALUE,...")
        try:
            options.append([(name, ast.literal_eval(value)) for value in values.split(",")])
        except (ValueError, SyntaxError):
            sys.exit(f"--vary {text}: values must be numbers")
    if one_by_one:
        return [{name: value} for option in options for name, value in option]
    return [dict(row) for row in itertools.product(*options)] if options else []


def limits(budget: str) -> dict[str, Any]:
    """A budget as options of a planner."""
    try:
        return {"time_limit_s": float(budget[:-1])} if budget.endswith("s") else {"calls": int(budget)}
    except ValueError:
        sys.exit(f"--budgets {budget}: expected simulator calls, or seconds with an s")


def with_floors(cases: Sequence[Case]) -> list[Started]:
    """The cases that have a floor, with it."""
    started = []
    for case in cases:
        try:
            started.append(Started(case, get_planner("best")(case.problem, **case.execution.arguments)))
        except InfeasibleError:
            tell(f"{case.name} is left out: no one-shot planner has a plan that fits")
    return started


def measure(
    planner: str, cases: Sequence[Started], budget: Mapping[str, Any], setting: Mapping[str, Any], seeds: int
) -> np.ndarray:
    """Log of step time / floor, float64 [cases, seeds]."""
    place = get_planner(planner)
    logs = np.empty((len(cases), seeds))
    for row, started in enumerate(cases):
        case = started.case
        for seed in range(seeds):
            plan = place(case.problem, seed=seed, start=started.floor, **budget, **setting, **case.execution.arguments)
            logs[row, seed] = math.log(float(plan.predicted.step_time_s) / started.floor_s)
    return logs


def entry(logs: np.ndarray) -> str:
    """Geometric mean, with the standard error that the seeds give."""
    seeds = logs.shape[1]
    mean = math.exp(float(logs.mean()))
    if seeds == 1:
        return f"{mean:.4f}"
    error = math.sqrt(float((logs.var(axis=1, ddof=1) / seeds).sum())) / len(logs)
    return f"{mean:.4f} +- {mean * error:.4f}"


def tell(line: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
