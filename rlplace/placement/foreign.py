"""Planners of other packages: called like the built-in ones, with their plans checked.

The result of such a planner, a plan or an int [G], is checked against the problem, simulated, and carries the simulator's
prediction, not its own.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any

import numpy as np

from rlplace.errors import InfeasibleError, InputError, RlplaceError, show
from rlplace.plan.plan import PlacementPlan, check_plan, make_plan
from rlplace.plugins import Extension, wrong
from rlplace.problem import Problem


def foreign_planner(extension: Extension) -> Any:
    """Returns the planner behind an extension, wrapped in the checks; it keeps its signature.

    Raises:
        InputError: It cannot be imported, or is not a function of the planner contract.
    """
    function = extension.load()
    _check_signature(extension, function)

    @functools.wraps(function)
    def planner(problem: Problem, *, seed: int = 0, time_limit_s: float | None = None, **options: Any) -> PlacementPlan:
        try:
            answer = function(problem, seed=seed, time_limit_s=time_limit_s, **options)
        except RlplaceError:
            raise
        except Exception as error:  # another package's code may raise anything
            reason = " ".join(str(error).split())[:200]
            raise RlplaceError(f"{extension.label} failed with {type(error).__name__}: {reason}") from error
        return checked(extension, problem, answer, seed=seed)

    return planner


def checked(extension: Extension, problem: Problem, answer: Any, *, seed: int) -> PlacementPlan:
    """Returns the plan, with the simulator's prediction.

    Raises:
        InputError: It is not a plan for this problem.
        InfeasibleError: It does not fit, or its step cannot complete.
    """
    from rlplace.simulator import simulate

    try:
        plan = _as_plan(problem, answer, extension.name, seed)
        check_plan(plan, problem)
    except InputError as error:
        raise wrong(extension, f"what it returned is no plan for this problem: {error}") from error
    line = simulate(problem, plan)
    if not line.feasible:
        raise InfeasibleError(f"{extension.label}: its plan is not feasible: {line.violations[0]}")
    return dataclasses.replace(
        plan,
        planner=extension.name,
        seed=seed,
        predicted=plan.predicted.with_simulation(line.predicted(problem)),
        source=plan.source or problem.source,
    )


def _as_plan(problem: Problem, answer: Any, name: str, seed: int) -> PlacementPlan:
    if isinstance(answer, PlacementPlan):
        return answer
    devices = np.asarray(answer)
    if devices.shape != (problem.num_groups,) or devices.dtype.kind not in "iu":
        raise InputError(f"expected a PlacementPlan, or {problem.num_groups} device numbers, found {show(answer)}")
    return make_plan(problem, devices, planner=name, seed=seed)


def _check_signature(extension: Extension, function: Any) -> None:
    if not callable(function):
        raise wrong(extension, f"expected a function, found {show(function)}")
    try:
        inspect.signature(function).bind(None, seed=0, time_limit_s=None)
    except (TypeError, ValueError) as error:
        raise wrong(extension, f"it must take (problem, *, seed, time_limit_s, ...): {error}") from None
