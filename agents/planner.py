"""The agent as a planner: the floor, rollouts of the policy, and a search that the policy guides.

Problem: any. Algorithm: start from the plan of `best`; roll the policy out from it; spend the budget on the guided search;
answer with the best feasible plan seen. By construction the answer is never worse than `best`. The first, greedy rollout
alone and all rollouts alone are reported in the plan's `predicted`.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlplace.agents.checkpoint import Checkpoint, load_checkpoint
from rlplace.agents.first_use import compile_ahead
from rlplace.agents.search import Search, warm_up
from rlplace.agents.setup import Setup, check_counts, set_up
from rlplace.plan.plan import PlacementPlan
from rlplace.planners.common.evaluate import Score
from rlplace.planners.common.search import Start
from rlplace.problem import Problem

ROLLOUT_LENGTH = 12
_ROLLOUT_SHARE = 0.1  # of the time, after which no further rollout begins


def agent(
    problem: Problem,
    *,
    seed: int = 0,
    time_limit_s: float | None = None,
    agent: str = "default",
    samples: int | None = None,
    search: bool = True,
    calls: int | None = None,
    start: Start = None,
) -> PlacementPlan:
    """Places with a trained agent.

    Args:
        problem: The problem.
        seed: Seed of rollouts and search.
        time_limit_s: Wall time for floor, rollouts and search; default 5 when `calls` is not given, else no limit.
        agent: Name of a shipped checkpoint, or a checkpoint folder.
        samples: Rollouts of the policy before the search, the first one greedy; default 2 with a time limit and none with
            `calls`, where the search makes better use of them.
        search: Whether to search; False answers with the best of floor and rollouts.
        calls: Simulator calls after the floor; default no limit. With `calls` and no time limit the answer is deterministic.
        start: Plan or assignment to start from instead of `best`.

    Raises:
        InputError: An argument is out of its range.
        InfeasibleError: Neither the classical planners nor the search find a plan that fits.
    """
    return load_agent(agent).place(
        problem, seed=seed, time_limit_s=time_limit_s, samples=samples, search=search, calls=calls, start=start
    )


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
        samples: int | None = None,
        search: bool = True,
        calls: int | None = None,
        start: Start = None,
    ) -> PlacementPlan:
        """Places one problem; see `agent` for the arguments."""
        check_counts(seed=seed, samples=samples, calls=calls)
        if time_limit_s is None and calls is None:
            time_limit_s = 5.0
        setup = set_up(problem, start, seed=seed, time_limit_s=time_limit_s, warm=_warm_up)
        rollouts = _Placement(self.checkpoint, setup, calls)
        if problem.num_devices > 1:
            rollouts.sample(samples)
            if search:
                rollouts.search()
        better = rollouts.best.objective_s < setup.score.objective_s
        return setup.answer(rollouts.plan if better else setup.first, agent=self.checkpoint.name, **rollouts.figures)


def _warm_up() -> None:
    compile_ahead()
    warm_up()


class _Placement:
    """Rollouts and search of one call of `place`."""

    def __init__(self, checkpoint: Checkpoint, setup: Setup, calls: int | None) -> None:
        self.checkpoint, self.setup = checkpoint, setup
        self._calls, self._begin_s = calls, time.monotonic()
        self.plan, self.best = setup.first, Score(math.inf, 0.0)
        self.figures: dict[str, Any] = {"single_rollout_step_time_s": None, "samples_step_time_s": None, "search_calls": 0}
        self._search: Search | None = None

    def sample(self, samples: int | None) -> None:
        """Rollouts, the first one greedy."""
        if samples is None:
            samples = 2 if self._calls is None else 0
        for number in range(samples):
            if self._left() == 0 or self._spent() > (_ROLLOUT_SHARE if number else 1.0):
                break
            search = self._make_search()
            search.roll_out(self.setup.first, min(ROLLOUT_LENGTH, self._left()), number, self.setup.deadline_s)
            self.figures["search_calls"] = search.calls
            if search.best.objective_s < self.best.objective_s:
                self.plan, self.best = search.best_plan, search.best
            step_s = self.best.step_time_s if self.best.feasible else None
            self.figures["samples_step_time_s"] = step_s
            if number == 0:
                self.figures["single_rollout_step_time_s"] = step_s

    def search(self) -> None:
        """The guided search with the rest of the budget."""
        if self._left() == 0:
            return
        search = self._make_search()
        search.set_plan(self.plan if self.best.feasible else self.setup.first)
        search.run(calls=None if self._calls is None else self._left(), deadline_s=self.setup.deadline_s)
        if search.best.objective_s < self.best.objective_s:
            self.plan, self.best = search.best_plan, search.best
        self.figures["search_calls"] = search.calls

    def _make_search(self) -> Search:
        if self._search is None:
            self._search = Search(self.setup.instance, self.checkpoint.network, self.setup.first, seed=self.setup.seed)
        return self._search

    def _left(self) -> int:
        done = 0 if self._search is None else self._search.calls
        return 1 << 60 if self._calls is None else max(0, self._calls - done)

    def _spent(self) -> float:
        if self.setup.deadline_s == math.inf:
            return 0.0
        return (time.monotonic() - self._begin_s) / max(self.setup.deadline_s - self._begin_s, 1e-9)


def load_agent(name: str | Path = "default") -> Agent:
    """Loads a trained agent: the name of a shipped checkpoint, or a checkpoint folder."""
    return Agent(load_checkpoint(name))
