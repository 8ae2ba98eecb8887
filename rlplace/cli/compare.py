"""``rlplace compare``: planners side by side, one row a planner and problem."""

from __future__ import annotations

import argparse
import inspect
import time
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from rlplace.placing import Priced

HELP = "compare planners on models"
EXAMPLE = "example: rlplace compare hf:gpt2 zoo:inception --cluster a100-80g:4 --planners best,annealing,agent"
METRIC = "makespan of one step"
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
        priced = load(model, None if model.endswith(".problem.json") else options.cluster, options).priced
        for name in names:
            say(f"{model}: {name}")
            rows.append(_row(name, model, priced, options))
    if options.json:
        print_json({"executor": "list", "metric": METRIC, "global_batch": options.global_batch, "rows": rows})
        return 0
    table = []
    for row in rows:
        spread = "" if row["spread_s"] is None else f"{row['spread_s'] * 1e3:.3f}"
        note = "" if row["feasible"] else "no feasible plan"
        rate = "-" if row["samples_per_s"] is None else f"{row['samples_per_s']:.2f}"
        cells = [row["model"], row["planner"], milliseconds(row["step_time_s"]), spread, rate]
        if options.global_batch is not None:
            cells.append("-" if row["replicas"] is None else f"{row['replicas']} x {row['microbatches']}")
        table.append([*cells, f"{row['seconds']:.2f}", note])
    split = ["replicas x micro-batches"] if options.global_batch is not None else []
    print_table(["problem", "planner", "step ms", "spread ms", "samples/s", *split, "seconds", ""], table)
    print(f"\n{METRIC}, executor list, simulated; spread is the largest minus the smallest over seeds")
    return 0


def _row(name: str, model: str, priced: Priced, options: argparse.Namespace) -> dict[str, Any]:
    from rlplace.placing import plan_priced
    from rlplace.planners import get_planner

    accepted = inspect.signature(get_planner(name)).parameters
    extra: dict[str, Any] = {"agent": options.agent} if name == "agent" else {}
    if options.calls is not None and "calls" in accepted:
        extra["calls"] = options.calls
    limit = None if "calls" in extra else options.time_limit
    plans, begin, reason = [], time.perf_counter(), None
    for seed in range(options.seeds):
        try:
            found = plan_priced(priced, planner=name, seed=seed, time_limit_s=limit, global_batch=options.global_batch, **extra)
        except InfeasibleError as error:
            reason = str(error)
        else:
            plans.append(found[1])
    steps = [plan.predicted["step_time_s"] for plan in plans]
    return {
        "model": model,
        "planner": name,
        "feasible": len(steps) == options.seeds,
        "step_time_s": sum(steps) / len(steps) if steps else None,
        "spread_s": max(steps) - min(steps) if len(steps) > 1 else None,
        "samples_per_s": sum(plan.predicted["samples_per_s"] for plan in plans) / len(plans) if plans else None,
        "replicas": len(plans[0].replicas or [0]) if plans else None,
        "microbatches": plans[0].microbatches if plans else None,
        "seeds": options.seeds,
        "seconds": (time.perf_counter() - begin) / options.seeds,
        "reason": reason,
    }
