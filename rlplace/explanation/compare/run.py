"""The comparison itself: every planner on every problem, each row stored as soon as it is there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec.structs import replace

from rlplace.cost.contract import split_backward
from rlplace.errors import InfeasibleError, InputError, RlplaceError
from rlplace.explanation.compare.measure import row_of, run_row, warm_up
from rlplace.explanation.compare.records import (
    REFERENCE,
    SPLIT,
    TASKS,
    Comparison,
    ComparisonRow,
    ProblemInfo,
    Settings,
    View,
    summarize,
)
from rlplace.explanation.compare.store import Store
from rlplace.placement import NEEDS_SPLIT, OF_STRATEGIES, get_planner
from rlplace.placement.ask import attempt
from rlplace.placement.common.bounds import device_time_s, finite, least_devices, lower_bounds, memory_forced
from rlplace.plan.plan import PlacementPlan
from rlplace.plan.strategy import uniform_words
from rlplace.problem import Problem
from rlplace.strategy.drafts import KINDS
from rlplace.strategy.search.plan import prediction
from rlplace.strategy.search.search import search
from rlplace.strategy.search.space import Space
from rlplace.strategy.search.tries import SearchProblem, Tried

BEST, UNIFORM = "strategy", "best uniform"
STRATEGIES = (BEST, UNIFORM, *KINDS, *OF_STRATEGIES)
"""Names of their rows."""

_AXES = ("replicate", "shard", "tensor", "pipeline")
"""Dimensions of the kinds after the first, which is one device."""


def strategy_row(
    name: str, info: ProblemInfo, problem: Problem, question: SearchProblem, settings: Settings, *, strict: bool = False
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
            predicted=prediction(said, question.batch, question.cluster).replace(search_calls=calls),
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


def warm_up_strategies(question: SearchProblem) -> None:
    """Evaluates one strategy, so that no timing includes compilation; errors show in the rows."""
    try:
        search(question, calls=1)
    except RlplaceError:
        return


def _searched(name: str, question: SearchProblem, settings: Settings) -> tuple[Tried, int]:
    """Returns the best of a name, and the evaluations that it took."""
    limits = {"calls": settings.calls, "time_limit_s": None if settings.calls is not None else settings.time_limit_s}
    if name not in (BEST, UNIFORM):
        question = dataclasses.replace(question, space=_space(name, question.cluster.num_devices))
    answer = search(question, **limits)  # type: ignore[arg-type]
    best = answer.uniform if name == UNIFORM else answer.ranked[0]
    if best is None:
        raise InfeasibleError("no uniform strategy that fits was found under this budget")
    return best, answer.calls


def _space(kind: str, devices: int) -> Space:
    """Returns the strategies of a published planner, or of one kind: all dimensions but its own are 1.

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


VIEW_OF = dict.fromkeys(NEEDS_SPLIT, SPLIT)
"""Planners that need another view than `TASKS`: they place the backward of a group apart from its forward."""

Report = Callable[[str, bool], None]
"""Called with what happens next and whether a row has just been finished."""


@dataclass(frozen=True, eq=False)
class Case:
    """A model on a cluster.

    Attributes:
        model: MODEL, as it stands in the rows.
        cluster: CLUSTER, as it stands in the rows.
        load: Captures and prices it, at task level.
        ask: Builds the question of whole strategies for the same samples a step; None where there is no model.
    """

    model: str
    cluster: str
    load: Callable[[], Problem]
    ask: Callable[[], SearchProblem] | None = None


def _asked(case: Case, planners: Sequence[str], views: Collection[str]) -> dict[View, list[str]]:
    """Returns planners by view, the reference first where any other is run.

    Args:
        case: The model on its cluster.
        planners: Names.
        views: Views for all planners, beside the one that each needs.
    """
    asked: dict[View, list[str]] = {}
    for view in (TASKS, SPLIT):
        whole = view == TASKS and case.ask is not None
        names = [n for n in planners if (whole if n in STRATEGIES else view in views or VIEW_OF.get(n, TASKS) == view)]
        if names:
            asked[view] = [REFERENCE, *(name for name in names if name != REFERENCE)]
    return asked


def count_rows(cases: Iterable[Case], planners: Sequence[str], views: Collection[str] = ()) -> int:
    """Returns rows that `compare` makes."""
    return sum(len(names) for case in cases for names in _asked(case, planners, views).values())


def compare(
    cases: Iterable[Case],
    planners: Sequence[str],
    store: Store,
    *,
    views: Collection[str] = (),
    report: Report | None = None,
    strict: bool = False,
) -> list[tuple[Case, RlplaceError]]:
    """Runs the planners whose rows are not in the store yet.

    Args:
        cases: The problems; each is loaded once, in order.
        planners: Names of planners and of `STRATEGIES`; `REFERENCE` is run in any case, before the others.
        store: Holds settings and rows; `gather` builds the comparison from it, also after an interruption.
        views: Views of the problem for all planners, beside `TASKS` and those that planners need.
        report: Called with progress.
        strict: A planner's bug ends the comparison with its traceback, instead of being a row.

    Returns:
        The cases that could not be loaded, with the reason; the others are compared all the same.

    Raises:
        InputError: An unknown planner, or a problem that differs from the one in the store.
    """
    tell = report or (lambda text, finished: None)
    for name in planners:
        if name not in STRATEGIES:
            get_planner(name)
    warm: set[str] = set()
    failures: list[tuple[Case, RlplaceError]] = []
    for case in cases:
        try:
            whole = case.load()
        except RlplaceError as error:
            failures.append((case, error))
            continue
        for view, names in _asked(case, planners, views).items():
            problem = split_backward(whole) if view == SPLIT else whole
            info = problem_info(problem, case.model, case.cluster, view=view)
            store.add_problem(info)
            question: SearchProblem | None = None
            for name in names:
                if (*info.key, name) in store.rows:
                    tell("", True)
                    continue
                tell(f"{case.model} on {case.cluster or 'its devices'}{'' if view == TASKS else f', {view}'}: {name}", False)
                if name in STRATEGIES:
                    assert case.ask is not None  # else the row is not asked for
                    question = question or case.ask()
                    warm_up_strategies(question)
                    row = strategy_row(name, info, problem, question, store.settings, strict=strict)
                else:
                    if name not in warm:
                        warm_up(name, store.settings)
                        warm.add(name)
                    row = run_row(name, info, problem, store.settings, strict=strict)
                store.add_row(row.against(row if name == REFERENCE else store.rows.get((*info.key, REFERENCE))))
                tell("", True)
    return failures


def gather(store: Store, cases: Sequence[Case], planners: Sequence[str], views: Collection[str] = ()) -> Comparison:
    """Returns the comparison of what is in the store, in the order of `cases` and `planners`; others' rows are left out."""
    order = [REFERENCE, *planners] if REFERENCE not in planners else list(planners)
    problems, rows, complete = [], [], True
    for case in cases:
        for view, names in _asked(case, planners, views).items():
            info = store.problems.get((case.model, case.cluster, view))
            mine = [store.rows.get((case.model, case.cluster, view, name)) for name in sorted(names, key=order.index)]
            complete &= None not in mine
            rows += [row for row in mine if row is not None]
            if info is not None:
                problems.append(info)
    return Comparison(store.settings, tuple(problems), tuple(rows), summarize(rows, order), complete)


def problem_info(problem: Problem, model: str, cluster: str, *, view: View) -> ProblemInfo:
    """Returns the problem's sizes and bounds."""
    bounds = lower_bounds(problem)
    return ProblemInfo(
        model=model,
        cluster=cluster,
        view=view,
        fingerprint=problem.fingerprint,
        samples=problem.samples_per_microbatch,
        groups=problem.num_groups,
        ops=problem.num_ops,
        devices=problem.num_devices,
        critical_path_s=bounds.critical_path_s,
        work_s=finite(bounds.work_s),
        largest_group_s=finite(bounds.largest_group_s),
        memory_forced_s=finite(memory_forced(device_time_s(problem), problem.resident_bytes, problem.memory_limit_bytes)),
        least_devices=least_devices(bounds.resident_bytes + bounds.live_bytes, problem.memory_limit_bytes),
    )
