"""``rlplace diff``: two plans side by side, and which blocks of groups, or words of strategies, make the difference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlplace.cli.options import Options, argument, option
from rlplace.cli.output import show
from rlplace.cli.plans import asked_of, plan_and_problem
from rlplace.errors import InputError

if TYPE_CHECKING:
    from rlplace.explanation.comparison import Difference
    from rlplace.plan.plan import PlacementPlan
    from rlplace.problem import Problem

HELP = "two plans side by side, and the groups or words of strategies that make the difference"
EXAMPLE = "example: rlplace diff gpt2.plan.json other.plan.json"


@dataclass(frozen=True, kw_only=True)
class DiffOptions(Options):
    """Options of the verb."""

    first: str = argument("A.plan.json", "a plan")
    second: str = argument("B.plan.json", "another plan")
    problem: list[str] | None = option(
        "problem of the plans (built again from their sources); twice when they are for two",
        None,
        "X.problem.json",
        action="append",
    )
    cluster: str | None = option("the plans' cluster, where their sources do not name it", None, "C")


def run(options: DiffOptions) -> int:
    """Runs the verb."""
    from rlplace.explanation.difference import diff

    problems = options.problem or []
    if len(problems) > 2:
        raise InputError("diff: --problem is given at most twice, for the first and the second plan")
    difference = _strategies(options, problems)
    if difference is None:
        first, problem = plan_and_problem(options.first, problems[0] if problems else None, options.cluster)
        second, other = _second(options, first, problem, problems)
        difference = diff(problem, first, second, other=other)
    show(difference, options)
    return 0


def _strategies(options: DiffOptions, problems: list[str]) -> Difference | None:
    """Returns the difference where at least one plan is a whole strategy; None where both place groups."""
    from rlplace.explanation.comparison import Difference
    from rlplace.explanation.difference import diff_strategies, placement_side, strategy_side
    from rlplace.explanation.timeline.again import same_model
    from rlplace.plan.plan import PlacementPlan
    from rlplace.simulator.simulated_plan import run_plan

    paths = (options.first, options.second)
    plans = [PlacementPlan.load(path) for path in paths]
    whole = [plan.strategy is not None for plan in plans]
    if not any(whole):
        return None
    if len(problems) > whole.count(False):
        raise InputError("diff: a whole strategy has no problem file; give --problem for the plan that places groups only")
    if all(whole):
        first, second = plans
        asked = asked_of(first, paths[0], options.cluster)
        other = None if same_model(first, second) else asked_of(second, paths[1], options.cluster)
        return diff_strategies(asked, first, second, other)
    sides = []
    for path, plan, strategy in zip(paths, plans, whole, strict=True):
        if strategy:
            sides.append(strategy_side(asked_of(plan, path, options.cluster), plan))
        else:
            placed, problem = plan_and_problem(path, problems[0] if problems else None, options.cluster)
            sides.append(placement_side(run_plan(problem, placed)))
    before, after = sides
    return Difference(before, after, notes=("strategies are simulated block by block, placements task by task",))


def _second(
    options: DiffOptions, first: PlacementPlan, problem: Problem, problems: list[str]
) -> tuple[PlacementPlan, Problem | None]:
    """Returns the second plan, and its problem when it is not the first's."""
    from rlplace.plan.plan import PlacementPlan

    plan = PlacementPlan.load(options.second)
    if plan.problem == first.problem:
        return PlacementPlan.load(options.second, problem), None
    if len(problems) == 1:
        raise InputError(
            f"{options.second} is for problem {plan.problem[:12]}, {options.first} for {first.problem[:12]}; "
            "give --problem twice, the first plan's problem first"
        )
    return plan_and_problem(options.second, problems[1] if problems else None, options.cluster)
