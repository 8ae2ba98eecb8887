"""From a plan file to its problem, for the verbs that take a PLAN."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from rlplace.cli.output import say
from rlplace.errors import InputError

if TYPE_CHECKING:
    from rlplace.explanation.timeline.again import Asked
    from rlplace.plan.plan import PlacementPlan
    from rlplace.problem import Problem


def plan_and_problem(path: str, problem: str | None, cluster: str | None = None) -> tuple[PlacementPlan, Problem]:
    """Returns a plan, and its problem: read from a file, or captured and priced again from the plan's source.

    Args:
        path: Plan file.
        problem: Problem file, or None.
        cluster: The plan's cluster, where its source does not name one that can be read.

    Raises:
        InputError: The plan is for another problem, or does not say how to build it.
    """
    from rlplace.plan.plan import PlacementPlan
    from rlplace.problem import Problem

    if problem is not None:
        if cluster is not None:
            raise InputError(f"{problem} has its own devices; leave --cluster or --problem out")
        known = Problem.load(problem)
        return PlacementPlan.load(path, known), known
    plan = PlacementPlan.load(path)
    if not plan.source:
        raise InputError(f"{path}: says nothing of where its problem came from; name the problem file with --problem")
    from rlplace.planned import problem_of_plan

    say(f"building the problem of {path} again; --problem X.problem.json would read it")
    return plan, problem_of_plan(plan, cluster)


def asked_of(plan: PlacementPlan, path: str, cluster: str | None = None) -> Asked:
    """Returns the model and cluster of a whole strategy, captured and priced again; see `plan_and_problem`."""
    from rlplace.explanation.timeline.again import ask_again
    from rlplace.planned import cluster_of_plan

    machine = cluster_of_plan(plan, cluster)
    say(f"capturing and pricing the model of {path} again")
    return ask_again(plan, machine)


def problem_at(plan: PlacementPlan, cluster: str | None) -> Callable[[int], Problem]:
    """Captures and prices a plan's model again for a number of samples a micro-batch; results are cached."""
    from rlplace.planned import cluster_of_plan, rebuild_problem

    own = plan.source or {}

    @functools.cache
    def at(samples: int) -> Problem:
        say(f"capturing one training step of {samples} samples")
        source = {**own, "graph": {**own["graph"], "batch": samples}}
        return rebuild_problem(dataclasses.replace(plan, source=source), cluster_of_plan(plan, cluster))

    return at
