"""The agent as a planner: the floor, plans that one policy builds, and a search from the best of them that another guides.

Problem: any. Algorithm: take the plan of `best` and a few that the graph network builds; spend the budget on the guided search;
answer with the best feasible plan seen. By construction the answer is never worse than `best`, which has two fifths of a time
limit.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from numbers import Real
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rlplace.agents import graph_network, search
from rlplace.agents.checkpoint import Checkpoint, load_checkpoint
from rlplace.agents.compile_ahead import compile_ahead
from rlplace.agents.graph_network import built
from rlplace.agents.policies import Policy
from rlplace.agents.search import GuidedSearch
from rlplace.budget import Budget
from rlplace.envs.base import PLACEMENT, REFINEMENT
from rlplace.envs.instance import PlacementInstance, make_instance
from rlplace.errors import InputError, show, whole_number
from rlplace.placement.common.evaluate import PlanEvaluator, Score
from rlplace.placement.common.repair import repair_answer
from rlplace.placement.common.shortage import check_possible, raise_infeasible
from rlplace.placement.search import PlacementSearch, Start
from rlplace.plan.plan import PlacementPlan, make_plan
from rlplace.problem import Problem
from rlplace.simulator import simulate

_BUILT_TIME, _FEW = (0.5, 0.9), 512
"""Share of the time after the floor that the builder may take; the second where fewer than `_FEW` simulations fit into the time
limit, with which no search finds much."""

_BUILT, _MENDING, _BUILT_CALLS = 8, 48, 0.25
"""Plans that the builder makes at most, simulations that may make one of them fit, and the share of the calls that is for both.
A quarter of these calls is for plans, the others for what does not fit."""


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
        start: Plan or assignment to start from instead of `best`; a built plan that is quicker takes its place.

    Raises:
        InputError: An argument is out of its range.
        InfeasibleError: Neither the classical planners nor the search find a plan that fits.
    """
    return load_agent(agent).place(problem, seed=seed, time_limit_s=time_limit_s, calls=calls, start=start)


def warm_up() -> None:
    """Compiles, or loads from the cache, all kernels of the agent, once a process; time limits do not include it."""
    search.warm_up()
    graph_network.warm_up()


@dataclass(frozen=True, eq=False)
class Agent:
    """A loaded checkpoint that places problems.

    Attributes:
        checkpoint: The network and facts of its training; it builds plans or ranks moves, by its environment.
        builder: Policy of `rlplace/Placement-v0` that builds plans to start from; a shipped one where the checkpoint is none.
            None builds nothing.
        guide: Policy of `rlplace/Refinement-v0` that guides the search; likewise.
    """

    checkpoint: Checkpoint
    builder: Policy | None
    guide: Policy

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
        whole_number(seed, "agent: seed")
        number = isinstance(time_limit_s, Real) and not isinstance(time_limit_s, bool)
        if time_limit_s is not None and not (number and 0.0 <= float(time_limit_s) < math.inf):
            raise InputError(f"agent: time_limit_s must be a finite number of seconds from 0 up, found {show(time_limit_s)}")
        if time_limit_s is None and calls is None:
            time_limit_s = 5.0
        check_possible(problem)  # no search finds what a bound rules out
        compile_ahead()
        warm_up()
        floor = PlacementSearch(problem, "agent", start, calls=calls, time_limit_s=time_limit_s)
        devices, score, priority, used = floor.best_devices, floor.best_score, None, 0
        if isinstance(start, PlacementPlan) and np.array_equal(devices, start.device_of_group):
            line = simulate(problem, devices, priority=start.priority)
            if line.feasible:
                score, priority = Score(line.step_time_s or 0.0, 0.0), start.priority
        if problem.num_devices > 1 and calls != 0:
            instance = make_instance(problem, floor=devices if score.feasible else None, compute_floor=False)
            begin_s = time.perf_counter()
            floor.evaluator.simulator.evaluate(devices)
            few = time_limit_s is not None and _FEW * (time.perf_counter() - begin_s) > time_limit_s
            left_s = _BUILT_TIME[few] * floor.budget.left_s()
            quickest, used = self._best_built(instance, devices, score, calls, seed, left_s)
            if quickest is not devices:
                devices, priority = quickest, None
            looking = GuidedSearch(instance, self.guide, devices, seed=seed)
            looking.run(calls=None if calls is None else calls - used, deadline_s=floor.budget.end_s)
            floor.evaluator.count(looking.calls)
            used += looking.calls
            if looking.best.objective_s < score.objective_s:
                devices, priority = looking.best_plan, None
        line = simulate(problem, devices, priority=priority)
        if not line.feasible:
            raise_infeasible(problem, line, planner="agent")
        told = {"floor_step_time_s": score.step_time_s if score.feasible else None, "search_calls": used}
        predicted = line.predicted(problem).replace(agent=self.checkpoint.name, **told)
        return make_plan(problem, devices, planner="agent", seed=seed, predicted=predicted, priority=priority)

    def _best_built(
        self, instance: PlacementInstance, devices: NDArray[np.int32], score: Score, calls: int | None, seed: int, left_s: float
    ) -> tuple[NDArray[np.int32], int]:
        """Returns the best of the plan that is known and of some that the builder makes, and the simulations that took."""
        most = int(_BUILT_CALLS * calls) if calls is not None else _BUILT * (1 + _MENDING)
        if most < 2 or self.builder is None:
            return devices, 0
        budget = Budget(seconds=left_s)
        budget.secured = score.feasible
        plans = built(self.builder, instance, min(_BUILT, max(2, most // 4)), seed=seed, deadline_s=budget.end_s)
        best_s, evaluator = score.objective_s, PlanEvaluator(instance.problem, budget)
        answers = map(evaluator.answer, {plan.tobytes(): plan for plan in plans}.values())
        for answer in sorted(answers, key=lambda answer: answer.score.step_time_s):
            left = min(_MENDING, most - budget.used)
            if not answer.score.feasible and answer.score.step_time_s < best_s and left > 0:
                answer = repair_answer(evaluator, answer.devices, max_calls=left)
            if answer.score.objective_s < best_s:
                devices, best_s = answer.devices, answer.score.objective_s
        return devices, budget.used


def load_agent(name: str | Path = "default") -> Agent:
    """Loads a trained agent: the name of a shipped checkpoint, or a checkpoint folder."""
    named = load_checkpoint(name)
    if named.environment == PLACEMENT:
        return Agent(named, named.network, load_checkpoint("default").network)
    if named.environment != REFINEMENT:
        raise InputError(
            f"agent {show(str(name))} was trained in {named.environment}; agents that place are of {PLACEMENT} or {REFINEMENT}"
        )
    return Agent(named, load_checkpoint("graph").network, named.network)
