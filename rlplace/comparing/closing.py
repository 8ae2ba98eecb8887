"""An agent on unseen cases: the closing table of a training, and what fine-tuning has made it forget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlplace.agents.cases import Case
from rlplace.agents.checkpoint import Checkpoint
from rlplace.agents.planner import Agent
from rlplace.comparing import run
from rlplace.comparing.measure import ROLLOUT
from rlplace.comparing.records import Comparison, Settings
from rlplace.comparing.store import Store
from rlplace.means import geometric_mean, wins_ties_losses
from rlplace.planners import get_planner
from rlplace.planners.attempt import attempt

DEFAULT_PLANNERS = ("single", "round_robin", "balanced", "heft", "m_etf", "metis", "best", "annealing", "local_search")


@dataclass(frozen=True)
class Skills:
    """Two agents compared on cases that neither has seen.

    Attributes:
        cases: Number of cases with a plan that fits.
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


def compare_agent(
    agent: str | Path,
    cases: Sequence[Case],
    *,
    planners: Sequence[str] = DEFAULT_PLANNERS,
    calls: int = 256,
    seeds: int = 3,
) -> tuple[Comparison, Comparison]:
    """Compares planners, the agent and its first rollout alone.

    Args:
        agent: Folder of the agent.
        cases: Cases to solve.
        planners: Names of the classical planners.
        calls: Simulator calls after the floor for every search and for the agent.
        seeds: Runs of every planner that uses its seed.

    Returns:
        All cases, and the branchy ones alone.
    """
    names = [*planners, ROLLOUT, "agent"]
    store = Store(Settings(calls=calls, seeds=seeds, agent=str(Path(agent).resolve())))
    shown = {f"{number} {case.name}": case for number, case in enumerate(cases)}
    known = [run.Case(name, "", lambda case=case: case.problem) for name, case in shown.items()]  # type: ignore[misc]
    run.compare(known, names, store, strict=True)
    branchy = [case for case in known if shown[case.model].branchy]
    return run.gather(store, known, names), run.gather(store, branchy, names)


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
        before: The agent before fine-tuning.
        after: The agent after fine-tuning.
        cases: Cases to place.
        calls: Simulator calls after the floor.
        progress: Called with the number of cases done.
    """
    best, agents = get_planner("best"), (Agent(before), Agent(after))
    pairs: list[list[float]] = []
    for done, case in enumerate(cases, 1):
        floor = attempt(best, case.problem).answer
        if floor is not None:
            options: dict[str, Any] = {"calls": calls, "start": floor.device_of_group}
            plans = [attempt(agent.place, case.problem, **options).answer for agent in agents]
            steps = [plan.predicted.step_s / floor.predicted.step_s for plan in plans if plan is not None]
            pairs += [steps] if len(steps) == len(agents) else []
        progress(done)
    change = [now / then for then, now in pairs]
    better, _, worse = wins_ties_losses(change, 0.01)
    means = [geometric_mean([row[which] for row in pairs]) for which in range(len(agents))]
    return Skills(len(pairs), means[0], means[1], worse, better, max(change, default=1.0), calls)
