"""From a plan file to its problem, for the verbs that take a PLAN."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from rlplace.cli.common import say

if TYPE_CHECKING:
    from rlplace.plan.plan import PlacementPlan
    from rlplace.problem import Problem


def add_problem_options(parser: argparse.ArgumentParser) -> None:
    """``--problem`` and ``--cluster`` of a verb that takes a plan."""
    parser.add_argument("--problem", metavar="X.problem.json", help="the plan's problem (built again from the plan's source)")


def plan_and_problem(path: str, problem: str | None, cluster: str | None = None) -> tuple[PlacementPlan, Problem]:
    """A plan, and its problem: read from a file, or captured and priced again from the plan's source.

    Args:
        path: Plan file.
        problem: Problem file, or None.
        cluster: The plan's cluster where its source does not name one that can be read.

    Raises:
        InputError: The plan is for another problem, or does not say how to build it.
    """
    from rlplace.plan.plan import PlacementPlan
    from rlplace.problem import Problem

    if problem is not None:
        known = Problem.load(problem)
        return PlacementPlan.load(path, known), known
    from rlplace.runtime.distributed.recipe import problem_of_plan

    plan = PlacementPlan.load(path)
    say(f"building the problem of {path} again")
    return plan, problem_of_plan(plan, cluster)
