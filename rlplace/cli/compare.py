"""``rlplace compare``: planners side by side, one row a planner and problem."""

from __future__ import annotations

import argparse
import inspect
import time
from typing import Any

from rlplace.cli.common import (
    add_model_options,
    check_agent,
    load,
    milliseconds,
    positive,
    print_json,
    print_table,
    say,
    seconds,
)
from rlplace.errors import InfeasibleError, InputError
from rlplace.problem import Problem

HELP = "compare planners on models"
EXAMPLE = "example: rlplace compare hf:gpt2 zoo:inception --cluster a100-80g:4 --planners best,annealing,agent"
DEFAULT = "single,round_robin,balanced,heft,m_etf,metis,best,annealing,local_search,agent"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument("models", metavar="MODEL", nargs="+", help="models or *.problem.json files")
    parser.add_argument("--cluster", metavar="C", help="cluster (this machine)")
    parser.add_argument("--planners", default=DEFAULT, metavar="A,B", help=f"planners ({DEFAULT})")
    parser.add_argument("--seeds", type=positive, default=1, metavar="N", help="seeds of random planners (1)")
    parser.add_argument("--agent", default="default", metavar="NAME", help="checkpoint name or folder (default)")
    parser.add_argument("--time-limit", type=seconds, default=5.0, metavar="S", help="seconds per plan (5)")
    parser.add_argument(
        "--calls", type=positive, metavar="N", help="simulator calls after the floor for every search, instead of time"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_model_options(parser)


def run(options: argparse.Namespace) -> int:
    """Runs the verb."""
    from rlplace.planners import get_planner

    names = [name.strip() for name in options.planners.split(",") if name.strip()]
    if not names:
        raise InputError("--planners names no planner, for example best,agent")
    for name in names:
        get_planner(name)
    if "agent" in names:
        check_agent(options.agent)
    rows: list[dict[str, Any]] = []
    for model in options.models:
        problem = load(model, None if model.endswith(".problem.json") else options.cluster, options).problem
        for name in names:
            say(f"{model}: {name}")
            rows.append(_row(name, model, problem, options))
    if options.json:
        print_json({"executor": "list", "metric": "makespan of one step", "microbatches": 1, "rows": rows})
        return 0
    table = []
    for row in rows:
        spread = "" if row["spread_s"] is None else f"{row['spread_s'] * 1e3:.3f}"
        note = "" if row["feasible"] else "no feasible plan"
        table.append([row["model"], row["planner"], milliseconds(row["step_time_s"]), spread, f"{row['seconds']:.2f}", note])
    print_table(["problem", "planner", "step ms", "spread ms", "seconds", ""], table)
    print(
        "\nmakespan of one step, executor list, one micro-batch, simulated; spread is the largest minus the smallest over seeds"
    )
    return 0


def _row(name: str, model: str, problem: Problem, options: argparse.Namespace) -> dict[str, Any]:
    from rlplace.planners import get_planner

    planner = get_planner(name)
    accepted = inspect.signature(planner).parameters
    extra: dict[str, Any] = {"agent": options.agent} if name == "agent" else {}
    if options.calls is not None and "calls" in accepted:
        extra["calls"] = options.calls
    limit = None if "calls" in extra else options.time_limit
    steps, begin, reason = [], time.perf_counter(), None
    for seed in range(options.seeds):
        try:
            steps.append(planner(problem, seed=seed, time_limit_s=limit, **extra).predicted["step_time_s"])
        except InfeasibleError as error:
            reason = str(error)
    return {
        "model": model,
        "planner": name,
        "feasible": len(steps) == options.seeds,
        "step_time_s": sum(steps) / len(steps) if steps else None,
        "spread_s": max(steps) - min(steps) if len(steps) > 1 else None,
        "seeds": options.seeds,
        "seconds": (time.perf_counter() - begin) / options.seeds,
        "reason": reason,
    }
