"""Choosing among candidates: from the assignments of a heuristic to its plan.

A one-shot planner yields a few candidates. They are simulated, the most promising ones that do not fit are repaired, and the
best feasible one becomes the plan. Nothing here searches.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

from rlplace.placement.common.evaluate import Answer, Assignment, Deadline, Evaluator
from rlplace.placement.common.repair import legalize, repair_answer
from rlplace.placement.common.shortage import check_possible, raise_infeasible
from rlplace.plan import PlacementPlan, make_plan
from rlplace.problem import Problem
from rlplace.simulator import simulate

REPAIRS = 3
"""Infeasible candidates that a planner repairs, most promising first."""

Candidates = Callable[[Problem, int], Iterable[Assignment]]


def best_of(
    problem: Problem,
    candidates: Iterable[Assignment],
    evaluator: Evaluator,
    deadline: Deadline,
    *,
    repairs: int = REPAIRS,
    known_s: float = math.inf,
) -> Answer | None:
    """Simulates candidates, repairs the most promising infeasible ones and returns the best answer.

    Args:
        problem: The problem.
        candidates: Assignments; groups on devices that are not allowed are moved first.
        evaluator: Counts the simulations.
        deadline: When passed, or when another candidate would take twice what is left, the candidates known by then are ranked;
            at least one is always simulated.
        repairs: Number of infeasible candidates to repair.
        known_s: Step time of a feasible plan that is known; what is slower is not repaired.

    Returns:
        The best answer, feasible if any is, or None when there was no candidate.
    """
    answers: list[Answer] = []
    seen: set[bytes] = set()
    left_s = deadline.left_s()
    for devices in candidates:
        legal = legalize(problem, devices)
        if legal.tobytes() not in seen:
            seen.add(legal.tobytes())
            answers.append(evaluator.answer(legal))
            deadline.secured |= answers[-1].score.feasible
        before_s, left_s = left_s, deadline.left_s()
        if deadline.passed() or (deadline.secured and before_s - left_s > 2.0 * left_s):
            break
    if not answers:
        return None
    answers.sort(key=lambda a: a.score.objective_s)
    best = answers[0]
    # A repaired plan is rarely faster than it was before, so candidates that are already slower are not worth the calls.
    limit_s = min(known_s, best.score.step_time_s if best.score.feasible else math.inf)
    open_ = [a for a in answers if not a.score.feasible and a.score.step_time_s < limit_s]
    open_.sort(key=lambda a: a.score.descent_s)
    for answer in open_[:repairs]:
        if deadline.passed():
            break
        repaired = repair_answer(problem, answer.devices, evaluator, deadline)
        deadline.secured |= repaired.score.feasible
        if repaired.score.objective_s < best.score.objective_s:
            best = repaired
    return best


def finish(problem: Problem, answer: Answer | None, *, planner: str, seed: int) -> PlacementPlan:
    """Builds the plan of an answer, with the simulator's prediction.

    Raises:
        InfeasibleError: There is no answer, or it does not fit.
    """
    line = None if answer is None else simulate(problem, answer.devices)
    if answer is None or line is None or not line.feasible:
        raise_infeasible(problem, line, planner=planner)
    return make_plan(problem, answer.devices, planner=planner, seed=seed, predicted=line.predicted(problem))


def one_shot_planner(name: str, module: ModuleType) -> Callable[..., PlacementPlan]:
    """The planner of a module that defines `candidates`, and `REPAIRS` in place of the default.

    Options of `candidates` are options of the planner.
    """
    repairs = getattr(module, "REPAIRS", REPAIRS)

    def planner(problem: Problem, *, seed: int = 0, time_limit_s: float | None = None, **options: Any) -> PlacementPlan:
        build = partial(module.candidates, **options)
        return one_shot(problem, name, build, seed=seed, time_limit_s=time_limit_s, repairs=repairs)

    planner.__name__, planner.__doc__ = name, module.__doc__
    return with_options(planner, list(inspect.signature(module.candidates).parameters.values())[2:])


def with_options(planner: Callable[..., PlacementPlan], options: Sequence[inspect.Parameter]) -> Callable[..., PlacementPlan]:
    """A planner whose signature names its options instead of taking any."""
    signature = inspect.signature(planner)
    named = [option.replace(kind=option.KEYWORD_ONLY) for option in options]
    own = [parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
    planner.__signature__ = signature.replace(parameters=[*own, *named])  # type: ignore[attr-defined]
    return planner


def one_shot(
    problem: Problem,
    planner: str,
    candidates: Candidates,
    *,
    seed: int,
    time_limit_s: float | None,
    repairs: int = REPAIRS,
) -> PlacementPlan:
    """Runs a planner that only builds candidates."""
    check_possible(problem)
    answer = best_of(problem, candidates(problem, seed), Evaluator(problem), Deadline(time_limit_s), repairs=repairs)
    return finish(problem, answer, planner=planner, seed=seed)
