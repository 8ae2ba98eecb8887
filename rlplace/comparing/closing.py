"""An agent on cases that it has not seen: the closing table of a training, and what fine-tuning has made it forget.

Metric: step time of the case's schedule, as the geometric mean over cases of step time / step time of ``best``. Searches and
agents start from the plan of ``best`` and get the same number of simulator calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlplace.agents.cases import Case
from rlplace.agents.checkpoint import Checkpoint
from rlplace.agents.planner import Agent
from rlplace.means import geometric_mean, wins_ties_losses
from rlplace.plan import PlacementPlan
from rlplace.planners import get_planner
from rlplace.planners.attempt import attempt
from rlplace.text import table

DEFAULT_PLANNERS = ("single", "round_robin", "balanced", "heft", "m_etf", "metis", "best", "annealing", "local_search")
_SEARCHES = ("annealing", "local_search", "brkga")


@dataclass(frozen=True)
class ClosingRow:
    """One planner's results.

    Attributes:
        planner: Name; ``agent, one rollout`` is the floor or the first greedy rollout, whichever is faster.
        ratio: Geometric mean of step time over that of ``best``, on the cases where both are feasible; None without any.
        branchy: The same on branchy cases alone.
        feasible: Number of cases with a feasible plan. cases: Number of cases.
        better, worse: Cases where it is at least 0.1 % faster or slower than ``best``.
        seconds: Mean wall time of a plan; of searches after ``best``.
    """

    planner: str
    ratio: float | None
    branchy: float | None
    feasible: int
    cases: int
    better: int
    worse: int
    seconds: float | None


@dataclass(frozen=True)
class Skills:
    """Two agents on cases that neither has seen.

    Attributes:
        cases: With a plan that fits.
        before: Geometric mean of step time over that of ``best``, `calls` simulator calls after it; None without cases.
        after: The same of the fine-tuned agent.
        worse: Cases on which the fine-tuned agent is at least 1 % slower.
        better: At least 1 % faster.
        worst: Largest ratio of its step time to that of the agent before.
        calls: Simulator calls.
    """

    cases: int
    before: float | None
    after: float | None
    worse: int
    better: int
    worst: float
    calls: int


@dataclass(frozen=True, eq=False)
class Solved:
    """One planner on one case.

    Attributes:
        step_s: Geometric mean over seeds; None when a seed found no feasible plan.
        seconds: Mean wall time of a plan.
        plan: The last plan found.
    """

    step_s: float | None
    seconds: float
    plan: PlacementPlan | None


def compare_agent(
    trained: Agent,
    cases: Sequence[Case],
    *,
    planners: Sequence[str] = DEFAULT_PLANNERS,
    calls: int = 256,
    seeds: int = 3,
) -> list[ClosingRow]:
    """Runs every planner and the agent on every case; searches run once a seed and count with the geometric mean.

    Args:
        trained: The agent.
        cases: What to solve.
        planners: Names of the classical planners.
        calls: Simulator calls after the floor for every search and for the agent.
        seeds: Runs of whatever is random.
    """
    best = get_planner("best")
    floors = [_solve(best, case) for case in cases]

    def searched(planner: Callable[..., PlacementPlan], seeds: int = seeds, **options: Any) -> list[Solved]:
        return [_solve(planner, *pair, seeds=seeds, calls=calls, **options) for pair in zip(cases, floors, strict=True)]

    runs: dict[str, list[Solved]] = {}
    for name in planners:
        if name in _SEARCHES:
            runs[f"{name} ({calls} calls)"] = searched(get_planner(name))
        else:
            runs[name] = floors if name == "best" else [_solve(get_planner(name), case) for case in cases]
    runs["agent, one rollout"] = searched(trained.place, 1, samples=1, search=False)
    runs[f"agent ({calls} calls)"] = searched(trained.place)
    return [_row(label, solved, floors, cases) for label, solved in runs.items()]


def compare_skills(
    before: Checkpoint,
    after: Checkpoint,
    cases: Sequence[Case],
    *,
    calls: int = 256,
    progress: Callable[[int], None] = lambda done: None,
) -> Skills:
    """Places every case with both agents, from the same floor and with the same calls.

    Args:
        before: The agent that was fine-tuned.
        after: What came of it.
        cases: Cases to place.
        calls: Simulator calls after the floor.
        progress: Called with the number of cases done.
    """
    best, agents = get_planner("best"), (Agent(before), Agent(after))
    rows = []
    for done, case in enumerate(cases, 1):
        floor = _solve(best, case)
        if floor.step_s is not None:
            steps = [_solve(agent.place, case, floor, calls=calls).step_s for agent in agents]
            rows.append([step_s / floor.step_s for step_s in steps if step_s is not None])
        progress(done)
    pairs = [row for row in rows if len(row) == len(agents)]
    change = [now / then for then, now in pairs]
    better, _, worse = wins_ties_losses(change, 0.01)
    means = [geometric_mean([row[which] for row in pairs]) for which in range(len(agents))]
    return Skills(len(pairs), means[0], means[1], worse, better, max(change, default=1.0), calls)


def format_rows(rows: Sequence[ClosingRow], title: str) -> str:
    """The table as text."""
    cells = [
        [
            row.planner, *("" if value is None else f"{value:.4f}" for value in (row.ratio, row.branchy)),
            f"{row.feasible}/{row.cases}", str(row.better), str(row.worse),
            "" if row.seconds is None else f"{row.seconds:.2f}",
        ]
        for row in rows
    ]  # fmt: skip
    return "\n".join(
        [
            title,
            *table(["planner", "vs best", "branchy", "feasible", "better", "worse", "seconds"], cells),
            "step time / that of best, geometric mean, below 1 is faster; searches start from best, over several seeds",
            "simulated",
        ]
    )


def _solve(
    planner: Callable[..., PlacementPlan],
    case: Case,
    floor: Solved | None = None,
    *,
    seeds: int = 1,
    **options: Any,
) -> Solved:
    if floor is not None and floor.plan is not None:
        options["start"] = floor.plan.device_of_group
    runs = [attempt(planner, case.problem, seed=number, **options) for number in range(seeds)]
    plans = [run.answer for run in runs if run.answer is not None]
    steps = [plan.predicted.step_s for plan in plans]
    return Solved(
        step_s=geometric_mean(steps) if len(steps) == seeds else None,
        seconds=sum(run.seconds for run in runs) / seeds,
        plan=plans[-1] if plans else None,
    )


def _row(name: str, runs: Sequence[Solved], floors: Sequence[Solved], cases: Sequence[Case]) -> ClosingRow:
    ratios = [
        (run.step_s / best.step_s, case.branchy)
        for run, best, case in zip(runs, floors, cases, strict=True)
        if run.step_s is not None and best.step_s is not None
    ]
    better, _, worse = wins_ties_losses([ratio for ratio, _ in ratios])
    return ClosingRow(
        planner=name,
        ratio=geometric_mean([ratio for ratio, _ in ratios]),
        branchy=geometric_mean([ratio for ratio, branchy in ratios if branchy]),
        feasible=sum(run.step_s is not None for run in runs),
        cases=len(runs),
        better=better,
        worse=worse,
        seconds=float(np.mean([run.seconds for run in runs])) if runs else None,
    )
