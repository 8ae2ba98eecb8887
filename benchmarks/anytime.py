"""Whole answers within a time limit on large graphs: `best`, and the agent with and without built plans.

    python -m benchmarks.anytime --processes 2      the rows that are missing, then the table
    python -m benchmarks.anytime                    the table

The limit holds for everything, floor and start included. Graphs are those of `benchmarks.agent --set larger` and `dear`,
and the same shapes with 100,000 ops. Times count on idle cores alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import json
import os
import time
from collections.abc import Iterator
from functools import cache
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from benchmarks.agent.jobs import CLUSTERS, SHAPES, large_case
from benchmarks.built import interval
from rlplace.agents.planner import load_agent, warm_up
from rlplace.placement import get_planner
from rlplace.simulator import simulate

ROWS = Path(__file__).with_suffix(".rows.jsonl.gz")
GROUPS = {"larger": 6_667, "dear": 20_000, "huge": 33_334}
LIMITS_S, METHODS, SEEDS = (5, 10), ("best", "unbuilt", "agent"), (0, 1, 2)

Key = tuple[str, int, str, int]
"""Case, limit, method and seed."""


@cache
def _methods() -> dict[str, Any]:
    warm_up()
    agent = load_agent()
    unbuilt = dataclasses.replace(agent, builder=None)
    return {"agent": agent.place, "unbuilt": unbuilt.place, "best": get_planner("best")}


def run(job: tuple[str, int, int, list[tuple[int, str, int]]]) -> list[dict[str, Any]]:
    """Rows of a case: limits, methods and seeds; every row has a problem of its own, of which nothing is derived yet."""
    torch.set_num_threads(1)
    name, shape, cluster, asked = job
    case, rows = large_case(name, GROUPS[name], shape, cluster), []
    for limit_s, method, seed in asked:
        place, problem = _methods()[method], dataclasses.replace(case.problem)
        begin_s = time.perf_counter()
        plan = place(problem, seed=seed, time_limit_s=float(limit_s))
        seconds = time.perf_counter() - begin_s
        line = simulate(problem, plan)
        if not line.feasible:
            raise RuntimeError(f"{case.name}: the plan of {method} does not fit")
        facts = {"case": case.name, "limit_s": limit_s, "method": method, "seed": seed}
        rows.append(facts | {"step_s": line.step_time_s, "seconds": round(seconds, 2), "load": os.getloadavg()[0]})
    return rows


def key_of(row: dict[str, Any]) -> Key:
    """What makes a row unique."""
    return row["case"], row["limit_s"], row["method"], row["seed"]


def rows() -> list[dict[str, Any]]:
    """The rows that are there."""
    if not ROWS.exists():
        return []
    with gzip.open(ROWS, "rt") as lines:
        return [json.loads(line) for line in lines]


def make(processes: int) -> None:
    """Makes the rows that are missing and writes all of them; `best` knows no seeds."""
    found = {key_of(row): row for row in rows()}
    jobs = []
    for name, shape, cluster in product(GROUPS, range(len(SHAPES)), range(len(CLUSTERS))):
        case = f"{name}-{SHAPES[shape]}-{CLUSTERS[cluster][0]}"
        asked = [cell for cell in product(LIMITS_S, METHODS, SEEDS) if (case, *cell) not in found]
        if asked := [cell for cell in asked if cell[1] != "best" or cell[2] == 0]:
            jobs.append((name, shape, cluster, asked))
    with get_context("spawn").Pool(processes) as pool:
        for done in pool.imap_unordered(run, jobs):
            found.update((key_of(row), row) for row in done)
            with gzip.open(ROWS, "wt") as out:
                out.writelines(json.dumps(row) + "\n" for row in found.values())
            print(f"{len(found)} rows, {done[0]['case']}", flush=True)


def ratios(name: str, limit_s: int, over: tuple[str, int]) -> Iterator[float]:
    """Step time of the agent over that of another method and limit, by case, geometric means over seeds."""
    logs: dict[str, dict[Any, list[float]]] = {}
    for row in rows():
        if row["case"].partition("-")[0] == name:
            logs.setdefault(row["case"], {}).setdefault((row["method"], row["limit_s"]), []).append(np.log(row["step_s"]))
    for cells in logs.values():
        yield float(np.mean(cells["agent", limit_s]) - np.mean(cells[over]))


def table() -> str:
    """Markdown: the agent over the others with the same limit, a set and limit a row; intervals of 95 % over cases."""
    others = METHODS[:-1]
    lines = [f"| | {' | '.join(f'over {name}' for name in others)} |", "|---|" + "---|" * len(others)]
    for name, groups in GROUPS.items():
        for limit_s in LIMITS_S:
            cells = [interval(np.array(list(ratios(name, limit_s, (other, limit_s))))) for other in others]
            lines.append(f"| {3 * groups // 1000 * 1000:,} ops, {limit_s} s | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=0, help="make the rows that are missing in so many processes")
    if processes := parser.parse_args().processes:
        make(processes)
    print(table())
