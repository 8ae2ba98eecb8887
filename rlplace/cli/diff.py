"""``rlplace diff``: two plans side by side, and which blocks of groups, or words of strategies, make the difference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlplace.cli.options import Options, argument, option
from rlplace.cli.output import show
from rlplace.cli.plans import placement_of, strategy_of
from rlplace.errors import InputError

if TYPE_CHECKING:
    from rlplace.explanation.placements import PlacementStep
    from rlplace.explanation.strategies import StrategyStep
    from rlplace.plan.plan import PlacementPlan

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
    from rlplace.explanation.explain import diff_steps
    from rlplace.explanation.placements import PlacementStep
    from rlplace.explanation.strategies import StrategyStep
    from rlplace.plan.plan import PlacementPlan
    from rlplace.planned import same_model
    from rlplace.simulator.simulated_plan import run_plan

    problems = options.problem or []
    if len(problems) > 2:
        raise InputError("diff: --problem is given at most twice, for the first and the second plan")
    one, two = (PlacementPlan.load(path) for path in (options.first, options.second))
    if len(problems) > (one.strategy is None) + (two.strategy is None):
        raise InputError("diff: a whole strategy has no problem file; give --problem for the plan that places groups only")
    files = iter(problems)
    first = _step(one, options.first, files, options)
    if isinstance(first, StrategyStep) and two.strategy is not None and same_model(one, two):
        second: PlacementStep | StrategyStep = StrategyStep(first.planned, two)
    elif isinstance(first, PlacementStep) and two.strategy is None and two.problem == one.problem:
        second = PlacementStep(run_plan(first.run.problem, PlacementPlan.load(options.second, first.run.problem)))
    elif one.strategy is two.strategy is None and len(problems) == 1:
        raise InputError(
            f"{options.second} is for problem {two.problem[:12]}, {options.first} for {one.problem[:12]}; "
            "give --problem twice, the first plan's problem first"
        )
    else:
        second = _step(two, options.second, files, options)
    show(diff_steps(first, second), options)
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
