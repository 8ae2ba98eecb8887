"""The verbs that take a plan and search nothing: ``rlplace simulate``, ``diff`` and ``export``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from rlplace.cli.capture_cache import cached
from rlplace.cli.options import Options, argument, option, print_json, print_table, say, show
from rlplace.cli.plan_tables import show_devices, show_step
from rlplace.errors import InputError
from rlplace.text import gb, ms

if TYPE_CHECKING:
    from rlplace.explanation.placements import PlacementStep
    from rlplace.explanation.strategies import StrategyStep
    from rlplace.plan.plan import PlacementPlan
    from rlplace.planned import Planned


def placement_of(path: str, problem: str | None, cluster: str | None = None) -> Planned:
    """Returns a placement with its problem: read from a file, or captured and priced again from the plan's source.

    Args:
        path: Plan file.
        problem: Problem file, or None.
        cluster: The plan's cluster, where its source does not name one that can be read.

    Raises:
        InputError: The plan is for another problem, or does not say how to build it.
    """
    from rlplace.plan.plan import PlacementPlan
    from rlplace.planned import Planned
    from rlplace.problem import Problem

    if problem is not None:
        if cluster is not None:
            raise InputError(f"{problem} has its own devices; leave --cluster or --problem out")
        known = Problem.load(problem)
        return Planned(PlacementPlan.load(path, known), problem=known)
    planned = Planned(PlacementPlan.load(path), cluster, cached=cached)
    if not planned.plan.source:
        raise InputError(f"{path}: says nothing of where its problem came from; name the problem file with --problem")
    say(f"building the problem of {path} again; --problem X.problem.json would read it")
    _ = planned.problem
    return planned


def strategy_of(plan: PlacementPlan, path: str, cluster: str | None = None) -> Planned:
    """Returns a whole strategy with its model and cluster, captured and priced again; see `placement_of`."""
    from rlplace.planned import Planned

    planned = Planned(plan, cluster, cached=cached)
    _ = planned.cluster
    say(f"capturing and pricing the model of {path} again")
    _ = planned.search_problem
    return planned


@dataclass(frozen=True, kw_only=True)
class SimulateOptions(Options):
    """Options of the verb."""

    HELP = "simulate a plan: of groups on its problem, a whole strategy on its model"
    EXAMPLE = (
        "example: rlplace simulate bert.problem.json bert.plan.json --trace bert.trace.json; rlplace simulate gpt2.plan.json"
    )

    problem: str | None = argument("X.problem.json", "problem of a plan that places groups", "?")
    plan: str = argument("P.plan.json", "plan file for that problem, or with a whole strategy")
    cluster: str | None = option("for a whole strategy: another cluster of as many devices", None, "C")
    trace: str | None = option("write a trace for Perfetto", None, "T.json")

    def run(self) -> int:
        """Runs the verb; an infeasible plan is a result, not a failure."""
        from rlplace.files import check_output
        from rlplace.plan.plan import PlacementPlan
        from rlplace.problem import Problem
        from rlplace.simulator import simulate

        if self.trace:
            check_output(self.trace)
        if self.problem is None:
            return _simulate_strategy(self)
        if self.cluster is not None:
            raise InputError(f"{self.problem} has its own devices; leave --cluster out")
        problem = Problem.load(self.problem)
        plan = PlacementPlan.load(self.plan, problem)
        timeline = simulate(problem, plan)
        if self.trace:
            from rlplace.simulator.trace import write_trace

            write_trace(problem, timeline, self.trace)
            say(f"wrote {self.trace}")
        predicted = timeline.predicted(problem)
        if self.json:
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
    planned = Planned(plan, cached=cached)
    planned = planned if options.cluster is None else planned.on(options.cluster)
    predicted = prediction(planned.evaluate(), plan.strategy.batch, planned.cluster)
    if options.trace:
        _write_trace(planned, options.trace)
    if options.json:
        print_json(predicted.to_dict())
        return 0
    show_step(plan.strategy, predicted)
    print()
    show_devices(predicted, planned.cluster)
    print(f"executor {predicted.executor}")
    return 0


def _write_trace(planned: Planned, path: str) -> None:
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


@dataclass(frozen=True, kw_only=True)
class DiffOptions(Options):
    """Options of the verb."""

    HELP = "two plans side by side, and the groups or words of strategies that make the difference"
    EXAMPLE = "example: rlplace diff gpt2.plan.json other.plan.json"

    first: str = argument("A.plan.json", "a plan")
    second: str = argument("B.plan.json", "another plan")
    problem: list[str] | None = option(
        "problem of the plans (built again from their sources); twice when they are for two",
        None,
        "X.problem.json",
        action="append",
    )
    cluster: str | None = option("the plans' cluster, where their sources do not name it", None, "C")

    def run(self) -> int:
        """Runs the verb."""
        from rlplace.explanation.explain import diff_steps
        from rlplace.explanation.placements import PlacementStep
        from rlplace.explanation.strategies import StrategyStep
        from rlplace.plan.plan import PlacementPlan
        from rlplace.planned import same_model
        from rlplace.simulator.simulated_plan import run_plan

        problems = self.problem or []
        if len(problems) > 2:
            raise InputError("diff: --problem is given at most twice, for the first and the second plan")
        one, two = (PlacementPlan.load(path) for path in (self.first, self.second))
        if len(problems) > (one.strategy is None) + (two.strategy is None):
            raise InputError("diff: a whole strategy has no problem file; give --problem for the plan that places groups only")
        files = iter(problems)
        first = _step(one, self.first, files, self)
        if isinstance(first, StrategyStep) and two.strategy is not None and same_model(one, two):
            second: PlacementStep | StrategyStep = StrategyStep(first.planned, two)
        elif isinstance(first, PlacementStep) and two.strategy is None and two.problem == one.problem:
            second = PlacementStep(run_plan(first.run.problem, PlacementPlan.load(self.second, first.run.problem)))
        elif one.strategy is two.strategy is None and len(problems) == 1:
            raise InputError(
                f"{self.second} is for problem {two.problem[:12]}, {self.first} for {one.problem[:12]}; "
                "give --problem twice, the first plan's problem first"
            )
        else:
            second = _step(two, self.second, files, self)
        show(diff_steps(first, second), self)
        return 0


def _step(plan: PlacementPlan, path: str, problems: Iterator[str], options: DiffOptions) -> PlacementStep | StrategyStep:
    """Returns the step of a plan, on its model or on its problem, which may be the next file."""
    from rlplace.explanation.placements import PlacementStep
    from rlplace.explanation.strategies import StrategyStep
    from rlplace.simulator.simulated_plan import run_plan

    if plan.strategy is not None:
        return StrategyStep(strategy_of(plan, path, options.cluster))
    placed = placement_of(path, next(problems, None), options.cluster)
    return PlacementStep(run_plan(placed.problem, placed.plan))


@dataclass(frozen=True, kw_only=True)
class ExportOptions(Options):
    """Options of the verb."""

    HELP = "write a plan as a training script of plain torch, or as a job file of torchtitan"
    EXAMPLE = "example: rlplace export gpt2.plan.json --to script --out train.py"

    plan: str = argument("PLAN", "plan with a strategy that 'rlplace place MODEL' made")
    to: str = option("what to write", choices=("torchtitan", "script"), required=True)
    out: str | None = option("where to write it (shown)", None, "FILE")

    def run(self) -> int:
        """Runs the verb."""
        from rlplace.files import write_text
        from rlplace.plan.plan import PlacementPlan
        from rlplace.runtime.export.script import export

        plan = PlacementPlan.load(self.plan)
        text = export(plan, self.to)
        for note in plan.predicted.extra.get("notes", ()):
            say(f"note: {note}")
        if plan.strategy is not None and plan.strategy.reduction == "targets":
            say("note: replicas are averaged by samples there: give all as many targets that are not ignored")
        if self.out is not None:
            write_text(self.out, text)
        if self.json:
            print_json({"to": self.to, "text": text})
        elif self.out is None:
            print(text, end="")
        return 0
