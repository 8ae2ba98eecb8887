"""One planner on one problem: the runs over seeds, their plans simulated anew, and the row that comes of it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from rlplace.comparing.records import MAKESPAN, VIEWS, ComparisonRow, Settings
from rlplace.errors import InfeasibleError, RlplaceError
from rlplace.placements import Priced, plan_priced
from rlplace.plan import PlacementPlan
from rlplace.planners import PLANNERS, get_planner
from rlplace.planners.attempt import FAILED, MISSING, OK, Attempt, attempt
from rlplace.planners.common.bounds import largest_bound
from rlplace.problem import Problem
from rlplace.problem.generate import random_problem
from rlplace.problem.problem import fullest_share
from rlplace.simulator import simulate

SEEDED = frozenset({"random", "metis"})
"""Planners without a budget of calls whose plan depends on the seed; a test holds this list."""


@dataclass(frozen=True, eq=False)
class Target:
    """A problem of the comparison, ready to plan.

    Attributes:
        model, cluster, view: As in its `ProblemInfo`.
        priced: What planners are given.
        bounds: `largest_bound` by fingerprint.
    """

    model: str
    cluster: str
    view: str
    priced: Priced
    bounds: dict[str, tuple[float, str]] = field(default_factory=dict)

    def bound(self, problem: Problem) -> tuple[float, str]:
        """`largest_bound`, computed once."""
        if problem.fingerprint not in self.bounds:
            self.bounds[problem.fingerprint] = largest_bound(problem)
        return self.bounds[problem.fingerprint]


@dataclass(frozen=True, eq=False)
class Measured:
    """A plan as the simulator sees it.

    Attributes:
        metric: What it may be compared by.
        plan: The plan.
        problem: What it solves.
        samples: Samples of a step.
        step_time_s: Simulated step time.
        memory_share: See `ComparisonRow`.
        remark: The planner's own prediction, where it differs.
    """

    metric: str
    plan: PlacementPlan
    problem: Problem
    samples: int
    step_time_s: float
    memory_share: float | None
    remark: str | None


def takes_calls(name: str) -> bool:
    """Whether the planner is a search with a budget of simulator calls."""
    return "calls" in inspect.signature(get_planner(name)).parameters


def is_random(name: str) -> bool:
    """Whether the planner's plan depends on its seed; of another package's planner that is not known."""
    return name in SEEDED or name not in PLANNERS or takes_calls(name)


def warm_up(name: str, settings: Settings) -> None:
    """Plans a small problem, so that imports and compilation are on nobody's clock; what goes wrong shows in the rows."""
    options = _options(name, replace(settings, calls=4))
    try:
        get_planner(name)(random_problem(0, 6, 2), seed=0, time_limit_s=1.0, **options)
    except Exception:
        return


def run_row(name: str, target: Target, settings: Settings, *, strict: bool = False) -> ComparisonRow:
    """Runs a planner on a problem, once or once a seed; errors become the row's reason, bugs as well unless `strict`."""
    shuffled = is_random(name)
    runs: list[Attempt] = []
    for seed in range(settings.seeds if shuffled else 1):
        runs.append(_run(name, target, settings, seed, strict=strict))
        if runs[-1].status in (MISSING, FAILED):
            break
    measured = [run.judged for run in runs if run.status == OK]
    bad = next((run for run in runs if run.status != OK), None)
    row = ComparisonRow(
        model=target.model,
        cluster=target.cluster,
        view=target.view,
        planner=name,
        metric=MAKESPAN + VIEWS[target.view],
        status=OK if bad is None else bad.status,
        reason=next((item.remark for item in measured if item.remark), None) if bad is None else bad.reason,
        random=shuffled,
        seeds=len(runs),
        feasible_seeds=len(measured),
        simulator_calls=sum(run.simulator_calls for run in runs) / len(runs),
        seconds=sum(run.seconds for run in runs) / len(runs),
    )
    return _with_plans(row, measured, target) if measured else row


def _run(name: str, target: Target, settings: Settings, seed: int, *, strict: bool) -> Attempt:
    solved: list[Problem] = []

    def place(problem: Problem, **options: Any) -> PlacementPlan:
        problem, plan = plan_priced(target.priced, planner=name, **options)
        solved.append(problem)
        return plan

    limit = None if settings.calls is not None and takes_calls(name) else settings.time_limit_s
    return attempt(
        place,
        target.priced.first,
        seed=seed,
        judge=lambda plan: measure(plan, solved[-1], view=target.view),
        catch=(RlplaceError,) if strict else (Exception,),  # a planner's bug is that planner's row, not the comparison's end
        time_limit_s=limit,
        **_options(name, settings),
    )


def _options(name: str, settings: Settings) -> dict[str, Any]:
    options: dict[str, Any] = {"agent": settings.agent} if name == "agent" else {}
    if settings.calls is not None and takes_calls(name):
        options["calls"] = settings.calls
    return options


def measure(plan: PlacementPlan, problem: Problem, *, view: str) -> Measured:
    """Simulates a plan anew and says by what it may be compared.

    Raises:
        InfeasibleError: It does not fit, whatever its planner says.
        InputError: It is for another problem.
    """
    line = simulate(problem, plan)
    if not line.feasible or line.step_time_s is None:
        raise InfeasibleError(f"the plan does not fit when it is simulated again: {line.violations[0]}")
    share = fullest_share(line.peak_memory_bytes.tolist(), problem.devices)
    said = plan.predicted.step_time_s
    remark = None
    if said is not None and not math.isclose(said, line.step_time_s, rel_tol=1e-9):
        remark = f"the planner said {1e3 * said:.3f} ms"
    return Measured(MAKESPAN + VIEWS[view], plan, problem, line.samples, line.step_time_s, share, remark)


def _with_plans(row: ComparisonRow, measured: Sequence[Measured], target: Target) -> ComparisonRow:
    """The row with the figures of its plans, which must be of one kind."""
    kinds = {(item.metric, item.samples) for item in measured}
    if len(kinds) > 1:
        return replace(row, status=FAILED, reason="plans of different seeds are of different kinds; run one seed")
    metric, samples = kinds.pop()
    steps = [item.step_time_s for item in measured]
    best = min(measured, key=lambda item: item.step_time_s)
    mean = sum(steps) / len(steps)
    bound, binding = target.bound(best.problem)
    shares = [item.memory_share for item in measured if item.memory_share is not None]
    return replace(
        row,
        metric=metric,
        samples=samples,
        step_time_s=mean,
        spread_s=max(steps) - min(steps) if len(steps) > 1 else None,
        samples_per_s=sum(samples / step for step in steps) / len(steps),
        memory_share=max(shares, default=None),
        bound_s=bound,
        binding=binding,
        gap=mean / bound - 1.0 if bound > 0 else None,
    )
