"""Whole strategies beside planners of placements: the best, the best uniform, and that of each kind and published planner."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from msgspec.structs import replace

from rlplace.errors import InfeasibleError, InputError, RlplaceError
from rlplace.explanation.compare.measure import row_of
from rlplace.explanation.compare.records import ComparisonRow, ProblemInfo, Settings
from rlplace.placement import OF_STRATEGIES
from rlplace.placement.attempt import attempt
from rlplace.plan.plan import PlacementPlan
from rlplace.plan.strategy import uniform_words
from rlplace.problem import Problem
from rlplace.strategy.kinds import KINDS
from rlplace.strategy.search.plan import prediction
from rlplace.strategy.search.search import search
from rlplace.strategy.search.space import Space
from rlplace.strategy.search.tries import Question, Tried

BEST, UNIFORM = "strategy", "best uniform"
STRATEGIES = (BEST, UNIFORM, *KINDS, *OF_STRATEGIES)
"""Names of their rows."""

_AXES = ("replicate", "shard", "tensor", "pipeline")
"""Dimensions of the kinds after the first, which is one device."""


def strategy_row(
    name: str, info: ProblemInfo, problem: Problem, question: Question, settings: Settings, *, strict: bool = False
) -> ComparisonRow:
    """Searches for one of `STRATEGIES` under the budget of the comparison.

    Args:
        name: One of `STRATEGIES`.
        info: Sizes and bounds of the problem of the other rows.
        problem: The problem of the other rows.
        question: The question that the strategy answers.
        settings: Budget.
        strict: A bug is raised instead of being the row's reason.
    """

    def place(problem: Problem, **_: Any) -> PlacementPlan:
        try:
            best, calls = _searched(name, question, settings)
        except InputError as error:  # the kind, or the runtime, leaves nothing
            raise InfeasibleError(str(error)) from None
        said = question.scores.evaluate(best.draft)
        return PlacementPlan(
            problem=problem.fingerprint,
            planner=name,
            seed=0,
            device_of_group=np.zeros(0, dtype=np.int32),
            strategy=question.strategy(best.draft),
            predicted=prediction(said, question.batch, question.cluster).told(search_calls=calls),
        )

    run = attempt(place, problem, judge=lambda plan: plan.predicted, catch=(RlplaceError,) if strict else (Exception,))
    row = row_of(name, info, [run], question.cluster.devices, random=False)
    if run.answer is None or run.answer.strategy is None:
        return row
    pipeline = run.answer.strategy.pipelines[0]
    return replace(
        row,
        reason=uniform_words(run.answer.strategy),
        replicas=pipeline.data_degree,
        microbatches=max(pipeline.microbatches),
        schedule=pipeline.schedule,
    )


def warm_up_strategies(question: Question) -> None:
    """Evaluates one strategy, so that no timing includes compilation; errors show in the rows."""
    try:
        search(question, calls=1)
    except RlplaceError:
        return


def _searched(name: str, question: Question, settings: Settings) -> tuple[Tried, int]:
    """The best of a name, and the evaluations that it took."""
    limits = {"calls": settings.calls, "time_limit_s": None if settings.calls is not None else settings.time_limit_s}
    if name not in (BEST, UNIFORM):
        question = dataclasses.replace(question, space=_space(name, question.cluster.num_devices))
    answer = search(question, **limits)  # type: ignore[arg-type]
    best = answer.uniform if name == UNIFORM else answer.ranked[0]
    if best is None:
        raise InfeasibleError("no uniform strategy that fits was found under this budget")
    return best, answer.calls


def _space(kind: str, devices: int) -> Space:
    """The strategies of a published planner, or of one kind: all dimensions but its own are 1.

    Raises:
        InputError: There is one device.
    """
    if kind in OF_STRATEGIES:
        return Space.parse(OF_STRATEGIES[kind])
    one: dict[str, Any] = dict.fromkeys((*_AXES, "context", "expert"), (1,))
    if kind != KINDS[0]:
        if devices == 1:
            raise InputError(f"{kind} needs two devices")
        one[_AXES[KINDS.index(kind) - 1]] = tuple(range(2, devices + 1))
    return Space(**one)
