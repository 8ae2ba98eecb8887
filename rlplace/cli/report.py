"""``rlplace report``: a plan as an HTML page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlplace.cli.options import Options, argument, natural, option, seconds
from rlplace.cli.output import print_json, say
from rlplace.cli.plans import placement_of, strategy_of
from rlplace.errors import InputError
from rlplace.explanation.report import DEFAULT_PLANNERS
from rlplace.text import ms

if TYPE_CHECKING:
    from rlplace.cost.timings import PlanTiming
    from rlplace.explanation.report.data import ReportData
    from rlplace.plan import PlacementPlan

HELP = "write an HTML report of a plan"
EXAMPLE = "example: rlplace report bert.plan.json --out report.html"
NONE = "none"


@dataclass(frozen=True, kw_only=True)
class ReportOptions(Options):
    """Options of the verb."""

    plan: str = argument("PLAN", "plan file")
    problem: str | None = option("the plan's problem; default: built again from the plan's source", None, "X.problem.json")
    cluster: str | None = option("the plan's cluster, where the plan does not say it", None, "C")
    out: str = option("the page", None, "FILE.html", required=True)
    planners: str = option(
        f"planners to compare with, or {NONE} ({','.join(DEFAULT_PLANNERS)})", None, "A,B", default=",".join(DEFAULT_PLANNERS)
    )
    seed: int = option("seed of the planners (0)", natural, "N", default=0)
    time_limit: float = option("seconds per planner (2)", seconds, "S", default=2.0)
    measurements: list[str] | None = option(
        "measured step times: a *.timings.json of rlplace measure --plans", None, "FILE", action="append"
    )


def run(options: ReportOptions) -> int:
    """Runs the verb; an infeasible plan has a report too."""
    from rlplace.explanation.report.report import report
    from rlplace.files import check_output
    from rlplace.plan import PlacementPlan

    check_output(options.out)
    whole = PlacementPlan.load(options.plan)
    if whole.strategy is not None:
        return _show(options, _strategy(whole, options))
    planned = placement_of(options.plan, options.problem, options.cluster)
    names = [name.strip() for name in options.planners.split(",") if name.strip()]
    data = report(
        planned.problem,
        planned.plan,
        options.out,
        planners=[] if names == [NONE] else names,
        measurements=_measured(options),
        seed=options.seed,
        time_limit_s=options.time_limit,
        progress=lambda name: say(f"planning with {name}"),
    )
    return _show(options, data)


def _strategy(plan: PlacementPlan, options: ReportOptions) -> ReportData:
    """Returns the report of a whole strategy."""
    from rlplace.explanation.report.report import render
    from rlplace.explanation.timeline import strategy_page
    from rlplace.files import write_text

    if options.problem:
        raise InputError(f"{options.plan} is a whole strategy, which places no ops of a problem; leave --problem out")
    data = strategy_page(strategy_of(plan, options.plan, options.cluster), measured=_measured(options))
    write_text(options.out, render(data))
    return data


def _show(options: ReportOptions, data: ReportData) -> int:
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


def _measured(options: ReportOptions) -> list[PlanTiming]:
    """Returns the plans of timings files, in the order given."""
    from rlplace.cost.timings import PlanTimings

    return [timing for path in options.measurements or () for timing in PlanTimings.load(path).plans]
