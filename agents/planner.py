"""The agent as a planner: the floor, and a search from it that the policy guides.

Problem: any. Algorithm: start from the plan of `best`; spend the budget on the guided search; answer with the best feasible
plan seen. By construction the answer is never worse than `best`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rlplace.agents.checkpoint import Checkpoint, load_checkpoint
from rlplace.agents.first_use import compile_ahead
from rlplace.agents.search import Search, warm_up
from rlplace.agents.setup import check_counts, set_up
from rlplace.plan.plan import PlacementPlan
from rlplace.planners.common.search import Start
from rlplace.problem import Problem


def agent(
    problem: Problem,
    *,
    seed: int = 0,
    time_limit_s: float | None = None,
    agent: str = "default",
    calls: int | None = None,
    start: Start = None,
) -> PlacementPlan:
    """Places with a trained agent.

    Args:
        problem: The problem.
        seed: Seed of the search.
        time_limit_s: Wall time for floor and search; default 5 when `calls` is not given, else no limit.
        agent: Name of a shipped checkpoint, or a checkpoint folder.
        calls: Simulator calls after the floor; default no limit. With `calls` and no time limit the answer is deterministic.
        start: Plan or assignment to start from instead of `best`.

    Raises:
        InputError: An argument is out of its range.
        InfeasibleError: Neither the classical planners nor the search find a plan that fits.
    """
    return load_agent(agent).place(problem, seed=seed, time_limit_s=time_limit_s, calls=calls, start=start)


@dataclass(frozen=True, eq=False)
class Agent:
    """A loaded checkpoint that places problems.

    Attributes:
        checkpoint: The network and facts of its training.
    """

    checkpoint: Checkpoint

    def place(
        self,
        problem: Problem,
        *,
        seed: int = 0,
        time_limit_s: float | None = None,
        calls: int | None = None,
        start: Start = None,
    ) -> PlacementPlan:
        """Places one problem; see `agent` for the arguments."""
        check_counts(seed=seed, calls=calls)
        if time_limit_s is None and calls is None:
            time_limit_s = 5.0
        setup = set_up(problem, start, seed=seed, time_limit_s=time_limit_s, warm=_warm_up)
        if problem.num_devices == 1 or calls == 0:
            return setup.answer(setup.first, agent=self.checkpoint.name, search_calls=0)
        search = Search(setup.instance, self.checkpoint.network, setup.first, seed=seed)
        search.run(calls=calls, deadline_s=setup.deadline_s)
        better = search.best.objective_s < setup.score.objective_s
        plan = search.best_plan if better else setup.first
        return setup.answer(plan, agent=self.checkpoint.name, search_calls=search.calls)


def _warm_up() -> None:
    compile_ahead()
    warm_up()


def load_agent(name: str | Path = "default") -> Agent:
    """Loads a trained agent: the name of a shipped checkpoint, or a checkpoint folder."""
    return Agent(load_checkpoint(name))
