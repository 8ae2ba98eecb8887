"""``rlplace report``: a plan as an HTML page."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from rlplace.cli.common import natural, print_json, say, seconds
from rlplace.cli.plans import asked_of, plan_and_problem
from rlplace.errors import InputError
from rlplace.text import ms

if TYPE_CHECKING:
    from rlplace.cost.timings import PlanTiming
    from rlplace.explanation.report.data import ReportData
    from rlplace.plan import PlacementPlan

HELP = "write an HTML report of a plan"
EXAMPLE = "example: rlplace report bert.plan.json --out report.html"
NONE = "none"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    from rlplace.explanation.report.defaults import DEFAULT_PLANNERS

    parser.add_argument("plan", metavar="PLAN", help="plan file")
    parser.add_argument(
        "--problem", metavar="X.problem.json", help="the plan's problem; default: built again from the plan's source"
    )
    parser.add_argument("--cluster", metavar="C", help="the plan's cluster, where the plan does not say it")
    parser.add_argument("--out", metavar="FILE.html", required=True, help="the page")
    parser.add_argument(
        "--planners", default=",".join(DEFAULT_PLANNERS), metavar="A,B",
        help=f"planners to compare with, or {NONE} ({','.join(DEFAULT_PLANNERS)})",
    )  # fmt: skip
    parser.add_argument("--seed", type=natural, default=0, metavar="N", help="seed of the planners (0)")
    parser.add_argument("--time-limit", type=seconds, default=2.0, metavar="S", help="seconds per planner (2)")
    parser.add_argument(
        "--measurements", metavar="FILE", action="append",
        help="measured step times: a *.timings.json of rlplace measure --plans",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Runs the verb; an infeasible plan has a report too."""
    from rlplace.explanation.report.report import report
    from rlplace.files import check_output
    from rlplace.plan import PlacementPlan

    check_output(options.out)
    whole = PlacementPlan.load(options.plan)
    if whole.strategy is not None:
        return _show(options, _strategy(whole, options))
    plan, problem = plan_and_problem(options.plan, options.problem, options.cluster)
    names = [name.strip() for name in options.planners.split(",") if name.strip()]
    data = report(
        problem,
        plan,
        options.out,
        planners=[] if names == [NONE] else names,
        measurements=_measured(options),
        seed=options.seed,
        time_limit_s=options.time_limit,
        progress=lambda name: say(f"planning with {name}"),
    )
    return _show(options, data)


def _strategy(plan: PlacementPlan, options: argparse.Namespace) -> ReportData:
    """Returns the report of a whole strategy."""
    from rlplace.explanation.report.report import render
    from rlplace.explanation.timeline.page import strategy_page
    from rlplace.files import write_text

    if options.problem:
        raise InputError(f"{options.plan} is a whole strategy, which places no ops of a problem; leave --problem out")
    data = strategy_page(asked_of(plan, options.plan, options.cluster), measured=_measured(options))
    write_text(options.out, render(data))
    return data


def _show(options: argparse.Namespace, data: ReportData) -> int:
    """Says what was written."""
    line = data.timeline
    if options.json:
        print_json(
            {
                "written": [options.out],
                "step_time_s": line.step_time_s,
                "feasible": line.feasible,
                "violations": list(line.violations),
            }
        )
        return 0
    print(f"wrote {options.out}")
    verdict = "feasible" if line.feasible else "infeasible: " + "; ".join(line.violations)
    print(f"step time {ms(line.step_time_s)} ms, {line.samples} samples, {verdict}")
    return 0


def _measured(options: argparse.Namespace) -> list[PlanTiming]:
    """Returns the plans of timings files, in the order given."""
    from rlplace.cost.timings import PlanTimings

    return [timing for path in options.measurements or () for timing in PlanTimings.load(path).plans]
