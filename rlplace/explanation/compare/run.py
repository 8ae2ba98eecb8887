"""The comparison itself: every planner on every problem, each row stored as soon as it is there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlplace.cost.contract import split_backward
from rlplace.errors import RlplaceError
from rlplace.explanation.compare.records import REFERENCE, SPLIT, TASKS, Comparison, ProblemInfo, Settings, View, summarize
from rlplace.explanation.compare.rows import STRATEGIES, run_row, strategy_row, warm_up, warm_up_strategies
from rlplace.explanation.compare.store import Store
from rlplace.placement import NEEDS_SPLIT, get_planner
from rlplace.placement.common.bounds import device_time_s, finite, least_devices, lower_bounds, memory_forced
from rlplace.problem import Problem
from rlplace.strategy.search.tries import SearchProblem

if TYPE_CHECKING:
    from rlplace.agents.problems.cases import ProblemCase

AGAINST = ("single", "round_robin", "balanced", "heft", "m_etf", "metis", "best", "annealing", "local_search")
"""Planners that an agent is compared with."""

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
        ask: Builds the search problem of whole strategies for the same samples a step; None where there is no model.
    """

    model: str
    cluster: str
    load: Callable[[], Problem]
    ask: Callable[[], SearchProblem] | None = None


def _requested(case: Case, planners: Sequence[str], views: Collection[str]) -> dict[View, list[str]]:
    """Returns planners by view, the reference first where any other is run.

    Args:
        case: The model on its cluster.
        planners: Names.
        views: Views for all planners, beside the one that each needs.
    """
    requested: dict[View, list[str]] = {}
    for view in (TASKS, SPLIT):
        whole = view == TASKS and case.ask is not None
        names = [n for n in planners if (whole if n in STRATEGIES else view in views or VIEW_OF.get(n, TASKS) == view)]
        if names:
            requested[view] = [REFERENCE, *(name for name in names if name != REFERENCE)]
    return requested


def count_rows(cases: Iterable[Case], planners: Sequence[str], views: Collection[str] = ()) -> int:
    """Returns the number of rows that `compare` makes."""
    return sum(len(names) for case in cases for names in _requested(case, planners, views).values())


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
        for view, names in _requested(case, planners, views).items():
            problem = split_backward(whole) if view == SPLIT else whole
            info = problem_info(problem, case.model, case.cluster, view=view)
            store.add_problem(info)
            whole_problem: SearchProblem | None = None
            for name in names:
                if (*info.key, name) in store.rows:
                    tell("", True)
                    continue
                tell(f"{case.model} on {case.cluster or 'its devices'}{'' if view == TASKS else f', {view}'}: {name}", False)
                if name in STRATEGIES:
                    assert case.ask is not None  # else the row is not asked for
                    whole_problem = whole_problem or case.ask()
                    warm_up_strategies(whole_problem)
                    row = strategy_row(name, info, problem, whole_problem, store.settings, strict=strict)
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
        for view, names in _requested(case, planners, views).items():
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


def compare_agent(
    agent: str | Path, cases: Sequence[ProblemCase], *, planners: Sequence[str] = AGAINST, calls: int = 256, seeds: int = 3
) -> tuple[Comparison, Comparison]:
    """Compares an agent with planners on unseen cases.

    Args:
        agent: Folder of the agent.
        cases: Cases to solve.
        planners: Names of the classical planners.
        calls: Simulator calls after the floor for every search and for the agent.
        seeds: Runs of every planner that uses its seed.

    Returns:
        All cases, and the branchy ones alone.
    """
    names = [*planners, "agent"]
    store = Store(Settings(calls=calls, seeds=seeds, agent=str(Path(agent).resolve())))
    known = [Case(f"{number} {case.name}", "", lambda case=case: case.problem) for number, case in enumerate(cases)]  # type: ignore[misc]
    compare(known, names, store, strict=True)
    branchy = [one for one, case in zip(known, cases, strict=True) if case.branchy]
    return gather(store, known, names), gather(store, branchy, names)
