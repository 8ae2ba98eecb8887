"""An agent on unseen cases: the closing table of a training, and what fine-tuning has made it forget."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlplace.agents.problems.cases import ProblemCase
from rlplace.explanation.compare import run
from rlplace.explanation.compare.records import Comparison, Settings
from rlplace.explanation.compare.store import Store

DEFAULT_PLANNERS = ("single", "round_robin", "balanced", "heft", "m_etf", "metis", "best", "annealing", "local_search")


def compare_agent(
    agent: str | Path,
    cases: Sequence[ProblemCase],
    *,
    planners: Sequence[str] = DEFAULT_PLANNERS,
    calls: int = 256,
    seeds: int = 3,
) -> tuple[Comparison, Comparison]:
    """Compares planners and the agent.

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
    shown = {f"{number} {case.name}": case for number, case in enumerate(cases)}
    known = [run.Case(name, "", lambda case=case: case.problem) for name, case in shown.items()]  # type: ignore[misc]
    run.compare(known, names, store, strict=True)
    branchy = [case for case in known if shown[case.model].branchy]
    return run.gather(store, known, names), run.gather(store, branchy, names)
