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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.agents import graph_network, search
from rlplace.agents.checkpoint import Checkpoint, load_checkpoint
from rlplace.agents.compile_ahead import compile_ahead
from rlplace.agents.graph_network import built
from rlplace.agents.policies import Policy
from rlplace.agents.search import GuidedSearch
from rlplace.budget import Budget
from rlplace.envs.base import PLACEMENT, REFINEMENT, greedy_fit
from rlplace.envs.instance import PlacementInstance, make_instance
from rlplace.errors import InfeasibleError, InputError, show, whole_number
from rlplace.placement import get_planner
from rlplace.placement.common.evaluate import PlanEvaluator, Score
from rlplace.placement.common.repair import legalize, repair_answer
from rlplace.placement.common.shortage import check_possible
from rlplace.placement.search import FLOOR_SHARE, Start, start_devices
from rlplace.plan.plan import PlacementPlan, make_plan
from rlplace.problem import Problem
from rlplace.simulator import Simulator, simulate

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
        _check_arguments(seed, calls, time_limit_s)
        if time_limit_s is None and calls is None:
            time_limit_s = 5.0
        check_possible(problem)  # no search finds what a bound rules out
        compile_ahead()
        warm_up()
        deadline_s = math.inf if time_limit_s is None else time.monotonic() + time_limit_s
        built_share = _BUILT_TIME[time_limit_s is not None and _FEW * _simulation_s(problem) > time_limit_s]
        first, score, priority, reason = _start(problem, start, seed, time_limit_s)
        if problem.num_devices == 1 and not score.feasible:
            raise reason or InfeasibleError("the problem does not fit on its only device; use a device with more memory")
        instance = make_instance(problem, floor=first if score.feasible else None, compute_floor=False)
        devices, used = greedy_fit(instance) if first is None else first, 0
        if problem.num_devices > 1 and calls != 0:
            quickest, used = self._best_built(
                instance, devices, score, calls, seed, built_share * (deadline_s - time.monotonic())
            )
            if quickest is not devices:
                devices, priority = quickest, None
            looking = GuidedSearch(instance, self.guide, devices, seed=seed)
            looking.run(calls=None if calls is None else calls - used, deadline_s=deadline_s)
            PlanEvaluator(problem).count(looking.calls)
            used += looking.calls
            if looking.best.objective_s < score.objective_s:
                devices, priority = looking.best_plan, None
        line = simulate(problem, devices, priority=priority)
        if not line.feasible:
            raise reason or InfeasibleError("no feasible plan found; relax memory, or raise the time limit")
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


def _simulation_s(problem: Problem) -> float:
    """Returns seconds that a simulation takes."""
    simulator, devices = Simulator(problem), np.arange(problem.num_groups, dtype=np.int32) % problem.num_devices
    begin_s = time.perf_counter()
    simulator.evaluate(legalize(problem, devices))
    return time.perf_counter() - begin_s


def _start(
    problem: Problem, start: Start, seed: int, time_limit_s: float | None
) -> tuple[NDArray[np.int32] | None, Score, Any, InfeasibleError | None]:
    """Returns the plan to start from, its score (inf unless it is feasible) and priority, and why no feasible plan is known."""
    unknown = Score(math.inf, 0.0)
    if start is None:
        try:
            limit_s = None if time_limit_s is None else FLOOR_SHARE * time_limit_s
            best = get_planner("best")(problem, seed=seed, time_limit_s=limit_s)
        except InfeasibleError as error:
            return None, unknown, None, error
        return best.device_of_group, Score(best.predicted.step_s, 0.0), None, None
    devices = start_devices(problem, start, "agent")
    first = legalize(problem, devices)
    order = start.priority if isinstance(start, PlacementPlan) and np.array_equal(first, devices) else None
    line = simulate(problem, first, priority=order)
    if line.step_time_s is None or not line.feasible:
        return first, unknown, None, None
    return first, Score(line.step_time_s, 0.0), order, None


def _check_arguments(seed: int, calls: int | None, time_limit_s: float | None) -> None:
    whole_number(seed, "agent: seed")
    if calls is not None:
        whole_number(calls, "agent: calls")
    number = isinstance(time_limit_s, Real) and not isinstance(time_limit_s, bool)
    if time_limit_s is not None and not (number and 0.0 <= float(time_limit_s) < math.inf):
        raise InputError(f"agent: time_limit_s must be a finite number of seconds from 0 up, found {show(time_limit_s)}")


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
