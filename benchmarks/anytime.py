"""Whole answers within a time limit on large graphs: `best`, and the agent with and without built plans.

    python -m benchmarks.anytime --processes 2      the rows that are missing, then the table
    python -m benchmarks.anytime                    the table

The limit holds for everything, floor and start included. Graphs are those of `benchmarks.agent --set larger` and `dear`,
and the same shapes with 100,000 ops. Times count on idle cores alone.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.agent.measure import CLUSTERS, SHAPES, large_case
from benchmarks.harness import Row, arguments, markdown, missing, one_thread, read_rows, spread, timed, with_interval
from rlplace.agents.planner import load_agent, warm_up
from rlplace.placement import get_planner
from rlplace.simulator import simulate

ROWS = Path(__file__).with_suffix(".rows.jsonl.gz")
GROUPS = {"larger": 6_667, "dear": 20_000, "huge": 33_334}
LIMITS_S, METHODS, SEEDS = (5, 10), ("best", "unbuilt", "agent"), (0, 1, 2)

KEY = ("case", "limit_s", "method", "seed")


@cache
def _methods() -> dict[str, Any]:
    warm_up()
    agent = load_agent()
    unbuilt = dataclasses.replace(agent, builder=None)
    return {"agent": agent.place, "unbuilt": unbuilt.place, "best": get_planner("best")}


def run(job: tuple[str, int, int, list[tuple[int, str, int]]]) -> list[Row]:
    """Makes rows of a case: limits, methods and seeds, each on a problem of its own, of which nothing is derived yet."""
    one_thread()
    name, shape, cluster, asked = job
    case, rows = large_case(name, GROUPS[name], shape, cluster), []
    for limit_s, method, seed in asked:
        place, problem = _methods()[method], dataclasses.replace(case.problem)
        plan, seconds = timed(lambda place=place, p=problem, seed=seed, t=limit_s: place(p, seed=seed, time_limit_s=float(t)))
        line = simulate(problem, plan)
        if not line.feasible:
            raise RuntimeError(f"{case.name}: the plan of {method} does not fit")
        facts = {"case": case.name, "limit_s": limit_s, "method": method, "seed": seed}
        rows.append(facts | {"step_s": line.step_time_s, "seconds": round(seconds, 2), "load": os.getloadavg()[0]})
    return rows


def jobs() -> list[tuple[str, int, int, list[tuple[int, str, int]]]]:
    """Lists the cases that lack rows, with what they lack; `best` knows no seeds."""
    found = []
    for name, shape, cluster in product(GROUPS, range(len(SHAPES)), range(len(CLUSTERS))):
        case = f"{name}-{SHAPES[shape]}-{CLUSTERS[cluster][0]}"
        cells = [(case, *cell) for cell in product(LIMITS_S, METHODS, SEEDS) if cell[1] != "best" or cell[2] == 0]
        if asked := [cell[1:] for cell in missing(ROWS, cells, *KEY)]:
            found.append((name, shape, cluster, asked))
    return found


def ratios(name: str, limit_s: int, over: str) -> Iterator[float]:
    """Yields the logarithm of the agent's step time over that of another method, by case, means over seeds."""
    logs: dict[str, dict[Any, list[float]]] = {}
    for row in read_rows(ROWS):
        if row["case"].partition("-")[0] == name and row["limit_s"] == limit_s:
            logs.setdefault(row["case"], {}).setdefault(row["method"], []).append(np.log(row["step_s"]))
    for cells in logs.values():
        yield float(np.mean(cells["agent"]) - np.mean(cells[over]))


def table() -> str:
    """Makes the table: the agent over the others with the same limit, a set and limit a row; intervals over cases."""
    lines = []
    for (name, groups), limit_s in product(GROUPS.items(), LIMITS_S):
        cells = [with_interval(list(ratios(name, limit_s, other))) for other in METHODS[:-1]]
        lines.append([f"{3 * groups // 1000 * 1000:,} ops, {limit_s} s", *cells])
    return markdown(["", *(f"over {name}" for name in METHODS[:-1])], lines).replace("|  |", "| |", 1)


if __name__ == "__main__":
    if processes := arguments(__doc__, processes=(0, "make the rows that are missing in so many processes")).processes:
        spread(run, jobs(), ROWS, processes)
    print(table())
