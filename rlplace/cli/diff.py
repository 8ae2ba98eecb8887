"""``rlplace diff``: two plans side by side, and which blocks of groups, or words of strategies, make the difference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlplace.cli.options import Options, argument, option
from rlplace.cli.output import show
from rlplace.cli.plans import placement_of, strategy_of
from rlplace.errors import InputError

if TYPE_CHECKING:
    from rlplace.explanation.comparison import Difference
    from rlplace.planned import Planned

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
        first = placement_of(options.first, problems[0] if problems else None, options.cluster)
        second = _second(options, first, problems)
        other = None if second.plan.problem == first.plan.problem else second.problem
        difference = diff(first.problem, first.plan, second.plan, other=other)
    show(difference, options)
    return 0


def _strategies(options: DiffOptions, problems: list[str]) -> Difference | None:
    """Returns the difference where at least one plan is a whole strategy; None where both place groups."""
    from rlplace.explanation.comparison import Difference
    from rlplace.explanation.difference import diff_strategies, placement_side, strategy_side
    from rlplace.plan.plan import PlacementPlan
    from rlplace.planned import same_model
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
        planned = strategy_of(first, paths[0], options.cluster)
        other = None if same_model(first, second) else strategy_of(second, paths[1], options.cluster)
        return diff_strategies(planned, first, second, other)
    sides = []
    for path, plan, strategy in zip(paths, plans, whole, strict=True):
        if strategy:
            sides.append(strategy_side(strategy_of(plan, path, options.cluster), plan))
        else:
            placed = placement_of(path, problems[0] if problems else None, options.cluster)
            sides.append(placement_side(run_plan(placed.problem, placed.plan)))
    before, after = sides
    return Difference(before, after, notes=("strategies are simulated block by block, placements task by task",))


def _second(options: DiffOptions, first: Planned, problems: list[str]) -> Planned:
    """Returns the second plan, with the first's problem where both plans are for it."""
    from rlplace.plan.plan import PlacementPlan
    from rlplace.planned import Planned

    plan = PlacementPlan.load(options.second)
    if plan.problem == first.plan.problem:
        return Planned(PlacementPlan.load(options.second, first.problem), problem=first.problem)
    if len(problems) == 1:
        raise InputError(
            f"{options.second} is for problem {plan.problem[:12]}, {options.first} for {first.plan.problem[:12]}; "
            "give --problem twice, the first plan's problem first"
        )
    return placement_of(options.second, problems[1] if problems else None, options.cluster)
