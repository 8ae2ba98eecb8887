"""``rlplace simulate``: step time, peaks and feasibility of a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from rlplace.cli.options import Options, argument, option
from rlplace.cli.output import print_json, print_table, say
from rlplace.cli.plan_tables import show_devices, show_step
from rlplace.errors import InputError
from rlplace.text import gb, ms

if TYPE_CHECKING:
    from rlplace.planned import Planned

HELP = "simulate a plan: of groups on its problem, a whole strategy on its model"
EXAMPLE = "example: rlplace simulate bert.problem.json bert.plan.json --trace bert.trace.json; rlplace simulate gpt2.plan.json"


@dataclass(frozen=True, kw_only=True)
class SimulateOptions(Options):
    """Options of the verb."""

    problem: str | None = argument("X.problem.json", "problem of a plan that places groups", "?")
    plan: str = argument("P.plan.json", "plan file for that problem, or with a whole strategy")
    cluster: str | None = option("for a whole strategy: another cluster of as many devices", None, "C")
    trace: str | None = option("write a trace for Perfetto", None, "T.json")


def run(options: SimulateOptions) -> int:
    """Runs the verb; an infeasible plan is a result, not a failure."""
    from rlplace.files import check_output
    from rlplace.plan.plan import PlacementPlan
    from rlplace.problem import Problem
    from rlplace.simulator import simulate

    if options.trace:
        check_output(options.trace)
    if options.problem is None:
        return _simulate_strategy(options)
    if options.cluster is not None:
        raise InputError(f"{options.problem} has its own devices; leave --cluster out")
    problem = Problem.load(options.problem)
    plan = PlacementPlan.load(options.plan, problem)
    timeline = simulate(problem, plan)
    if options.trace:
        from rlplace.simulator.trace import write_trace

        write_trace(problem, timeline, options.trace)
        say(f"wrote {options.trace}")
    predicted = timeline.predicted(problem)
    if options.json:
        print_json({**predicted.to_dict(), "busy_s": timeline.busy_s.tolist(), "violations": list(timeline.violations)})
        return 0
    rows = [
        [device.name, ms(busy), gb(peak), gb(device.memory_bytes)]
        for device, busy, peak in zip(problem.devices, timeline.busy_s, timeline.peak_memory_bytes, strict=True)
    ]
    print_table(["device", "busy ms", "peak GB", "memory GB"], rows)
    print()
    print(f"step time {ms(timeline.step_time_s)} ms, {timeline.samples} samples, executor {predicted.executor}")
    print("feasible" if timeline.feasible else "infeasible: " + "; ".join(timeline.violations))
    return 0


def _simulate_strategy(options: SimulateOptions) -> int:
    """Returns a whole strategy, op by op where that is affordable."""
    from rlplace.plan.plan import PlacementPlan
    from rlplace.planned import Planned
    from rlplace.strategy.search.plan import prediction

    plan = PlacementPlan.load(options.plan)
    if plan.strategy is None:
        raise InputError(f"{options.plan} places groups; name its problem file before it")
    say(f"capturing and pricing the model of {options.plan} again")
    planned = Planned(plan) if options.cluster is None else Planned(plan).on(options.cluster)
    predicted = prediction(planned.evaluate(), plan.strategy.batch, planned.cluster)
    if options.trace:
        _trace(planned, options.trace)
    if options.json:
        print_json(predicted.to_dict())
        return 0
    show_step(plan.strategy, predicted)
    print()
    show_devices(predicted, planned.cluster)
    print(f"executor {predicted.executor}")
    return 0


def _trace(planned: Planned, path: str) -> None:
    """Writes a trace of the ops; one device represents all that do the same."""
    from rlplace.simulator.trace import write_trace
    from rlplace.strategy.blocks.op_costs import OpCosts
    from rlplace.strategy.op_level.expand import tasks_of
    from rlplace.strategy.search.op_level import MOST_TASKS, simulate_ops

    draft, costs = planned.draft(), cast(OpCosts, planned.search_problem.costs)
    if draft.beside or tasks_of(draft, costs) > MOST_TASKS:
        raise InputError(f"--trace holds {MOST_TASKS} ops of one pipeline, this step has more; leave it out")
    expanded, line = simulate_ops(draft, costs, planned.cluster, named=True)
    write_trace(expanded.problem, line, path)
    say(f"wrote {path}")
