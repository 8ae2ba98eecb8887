"""One planner on one problem: its runs over seeds, their plans simulated anew, and the resulting row."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from msgspec.structs import replace

from rlplace.cluster.links import Device, fullest_share
from rlplace.errors import InfeasibleError, InputError, RlplaceError
from rlplace.explanation.compare.records import ComparisonRow, ProblemInfo, Settings, Status
from rlplace.placement import OF_STRATEGIES, PLANNERS, get_planner
from rlplace.placement.ask import FAILED, MISSING, OK, Attempt, attempt
from rlplace.plan.plan import PlacementPlan
from rlplace.plan.prediction import Prediction
from rlplace.plan.strategy import uniform_words
from rlplace.problem import Problem
from rlplace.problem.generate import random_problem
from rlplace.simulator import simulate
from rlplace.strategy.drafts import KINDS
from rlplace.strategy.search.plan import prediction
from rlplace.strategy.search.search import search
from rlplace.strategy.search.space import Space
from rlplace.strategy.search.tries import SearchProblem, Tried

SEEDED = frozenset({"random", "metis"})
"""Planners without a budget of calls whose plan depends on the seed; a test holds this list."""

BEST, UNIFORM = "strategy", "best uniform"
STRATEGIES = (BEST, UNIFORM, *KINDS, *OF_STRATEGIES)
"""Names of rows of whole strategies."""

_AXES = ("replicate", "shard", "tensor", "pipeline")
"""Dimensions of the kinds after the first, which is one device."""


def takes_calls(name: str) -> bool:
    """Returns whether the planner is a search with a budget of simulator calls."""
    return "calls" in inspect.signature(get_planner(name)).parameters


def is_random(name: str) -> bool:
    """Returns whether the planner's plan depends on its seed; planners of other packages count as if it did."""
    return name in SEEDED or name not in PLANNERS or takes_calls(name)


def warm_up(name: str, settings: Settings) -> None:
    """Plans a small problem, so that no timing includes imports and compilation; errors show in the rows."""
    with contextlib.suppress(Exception):
        get_planner(name)(random_problem(0, 6, 2), seed=0, time_limit_s=1.0, **_options(name, replace(settings, calls=4)))


def warm_up_strategies(problem: SearchProblem) -> None:
    """Evaluates one strategy, so that no timing includes compilation; errors show in the rows."""
    with contextlib.suppress(RlplaceError):
        search(problem, calls=1)


def run_row(name: str, info: ProblemInfo, problem: Problem, settings: Settings, *, strict: bool = False) -> ComparisonRow:
    """Runs a planner on a problem, once or once a seed; errors become the row's reason, bugs too unless `strict`."""
    shuffled, limited = is_random(name), settings.calls is not None and takes_calls(name)
    runs: list[Attempt] = []
    for seed in range(settings.seeds if shuffled else 1):
        run = attempt(
            get_planner(name),
            problem,
            seed=seed,
            judge=lambda plan: predict(plan, problem),
            catch=(RlplaceError,) if strict else (Exception,),  # a planner's bug is its row, not the comparison's end
            time_limit_s=None if limited else settings.time_limit_s,
            **_options(name, settings),
        )
        runs.append(run)
        if run.status in (MISSING, FAILED):
            break
    row = _row_of(name, info, runs, problem.devices, random=shuffled)
    if row.step_time_s is None:
        return row
    bound, binding = info.bound
    gap = row.step_time_s / bound - 1.0 if bound > 0 else None
    remark = next((remark for run in runs if run.judged is not None and (remark := _remark(run))), None)
    return replace(row, reason=row.reason or remark, bound_s=bound, binding=binding, gap=gap)


def strategy_row(
    name: str, info: ProblemInfo, problem: Problem, whole: SearchProblem, settings: Settings, *, strict: bool = False
) -> ComparisonRow:
    """Searches for one of `STRATEGIES` under the budget of the comparison.

    Args:
        name: One of `STRATEGIES`.
        info: Sizes and bounds of the problem of the other rows.
        problem: The problem of the other rows.
        whole: The search problem of whole strategies.
        settings: Budget.
        strict: A bug is raised instead of being the row's reason.
    """

    def place(problem: Problem, **_: Any) -> PlacementPlan:
        try:
            best, calls = _searched(name, whole, settings)
        except InputError as error:  # the kind, or the runtime, leaves nothing
            raise InfeasibleError(str(error)) from None
        step = whole.scores.evaluate(best.draft)
        return PlacementPlan(
            problem=problem.fingerprint,
            planner=name,
            seed=0,
            device_of_group=np.zeros(0, dtype=np.int32),
            strategy=whole.strategy(best.draft),
            predicted=prediction(step, whole.batch, whole.cluster).replace(search_calls=calls),
        )

    run = attempt(place, problem, judge=lambda plan: plan.predicted, catch=(RlplaceError,) if strict else (Exception,))
    row = _row_of(name, info, [run], whole.cluster.devices, random=False)
    if run.answer is None or run.answer.strategy is None:
        return row
    pipelines, words = run.answer.strategy.pipelines, uniform_words(run.answer.strategy)
    most = max(count for one in pipelines for count in one.microbatches)
    counts = {"replicas": sum(one.data_degree for one in pipelines), "microbatches": most}
    return replace(row, reason=words, schedule=pipelines[0].schedule, **counts)


def _searched(name: str, problem: SearchProblem, settings: Settings) -> tuple[Tried, int]:
    """Returns the best strategy of a name, and the evaluations that it took."""
    time_limit_s = None if settings.calls is not None else settings.time_limit_s
    if name not in (BEST, UNIFORM):
        problem = dataclasses.replace(problem, space=_space(name, problem.cluster.num_devices))
    answer = search(problem, calls=settings.calls, time_limit_s=time_limit_s)
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
    one: dict[str, Any] = dict.fromkeys((*_AXES, "context", "expert", "tables"), (1,))
    if kind != KINDS[0]:
        if devices == 1:
            raise InputError(f"{kind} needs two devices")
        one[_AXES[KINDS.index(kind) - 1]] = tuple(range(2, devices + 1))
    return Space(**one)


def _row_of(name: str, info: ProblemInfo, runs: Sequence[Attempt], devices: Sequence[Device], *, random: bool) -> ComparisonRow:
    """Returns the row of these runs, whose plans were judged by a `Prediction`, without bounds."""
    bad = next((run for run in runs if run.status != OK), None)
    figures: dict[str, Any] = {}
    if found := [run.judged for run in runs if run.judged is not None]:
        steps = [predicted.step_s for predicted in found]
        shares = [fullest_share(predicted.peak_memory_bytes, devices) for predicted in found]
        figures = {
            "step_time_s": sum(steps) / len(steps),
            "spread_s": max(steps) - min(steps) if len(steps) > 1 else None,
            "samples_per_s": sum(predicted.samples_per_s for predicted in found) / len(steps),
            "memory_share": max((share for share in shares if share is not None), default=None),
        }
    return ComparisonRow(
        *info.key,
        planner=name,
        status=cast(Status, OK if bad is None else bad.status),
        reason=None if bad is None else bad.reason,
        random=random,
        seeds=len(runs),
        feasible_seeds=sum(run.status == OK for run in runs),
        simulator_calls=sum(run.simulator_calls for run in runs) / len(runs),
        seconds=sum(run.seconds for run in runs) / len(runs),
        **figures,
    )


def _remark(run: Attempt) -> str | None:
    """Returns the planner's own prediction, where it differs."""
    own_s = run.plan.predicted.step_time_s
    if own_s is None or math.isclose(own_s, run.judged.step_s, rel_tol=1e-9):
        return None
    return f"the planner said {1e3 * own_s:.3f} ms"


def _options(name: str, settings: Settings) -> dict[str, Any]:
    options: dict[str, Any] = {"agent": settings.agent} if name == "agent" else {}
    if settings.calls is not None and takes_calls(name):
        options["calls"] = settings.calls
    return options


def predict(plan: PlacementPlan, problem: Problem) -> Prediction:
    """Simulates a plan anew.

    Raises:
        InfeasibleError: It does not fit, whatever its planner says.
        InputError: It is for another problem.
    """
    line = simulate(problem, plan)
    if not line.feasible:
        raise InfeasibleError(f"the plan does not fit when it is simulated again: {line.violations[0]}")
    return line.predicted(problem)
