"""From a plan file to its `Planned`, for the verbs that take a PLAN."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlplace.cli.output import say
from rlplace.errors import InputError

if TYPE_CHECKING:
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
    planned = Planned(PlacementPlan.load(path), cluster)
    if not planned.plan.source:
        raise InputError(f"{path}: says nothing of where its problem came from; name the problem file with --problem")
    say(f"building the problem of {path} again; --problem X.problem.json would read it")
    _ = planned.problem
    return planned


def strategy_of(plan: PlacementPlan, path: str, cluster: str | None = None) -> Planned:
    """Returns a whole strategy with its model and cluster, captured and priced again; see `placement_of`."""
    from rlplace.planned import Planned

    planned = Planned(plan, cluster)
    _ = planned.cluster
    say(f"capturing and pricing the model of {path} again")
    _ = planned.search_problem
    return planned
