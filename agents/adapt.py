"""Fine-tuning on one problem: search, learn from moves that were priced around its best plan, search on.

The network is a copy; the checkpoint stays as it is.
"""

from __future__ import annotations

import copy
import time
from functools import cache
from typing import Any

import numpy as np

from rlplace.agents.arguments import check_counts, check_limit
from rlplace.agents.checkpoint import Checkpoint
from rlplace.agents.network import PlacerNetwork
from rlplace.agents.planner import floor_of
from rlplace.agents.search import Search, warm_up
from rlplace.agents.tuning.learn import fit_moves, price_moves
from rlplace.envs.base import greedy_fit
from rlplace.envs.instance import Instance, make_instance
from rlplace.errors import InfeasibleError, InputError
from rlplace.plan.plan import PlacementPlan, make_plan
from rlplace.planners.common.evaluate import Evaluator, Execution
from rlplace.planners.common.search import Start
from rlplace.planners.common.shortage import check_possible
from rlplace.problem import Problem
from rlplace.simulator import simulate

_ROUNDS = 6  # of learning
_LEARN = 0.15  # share of the time that goes to pricing and fitting
_STEPS = 60  # of Adam in a round


def adapt(
    checkpoint: Checkpoint,
    problem: Problem,
    *,
    time_limit_s: float = 30.0,
    seed: int = 0,
    start: Start = None,
    **execution: Any,
) -> PlacementPlan:
    """Places one problem with a network that is fine-tuned to it meanwhile.

    Args:
        checkpoint: Of Refinement-v0.
        problem: The problem.
        time_limit_s: Wall time, floor included.
        seed: Of everything random.
        start: Plan or assignment to start from instead of `best`.
        **execution: Fields of `rlplace.planners.common.evaluate.Execution`.

    Raises:
        InputError: The checkpoint is of another environment.
        InfeasibleError: No plan that fits was found.
    """
    if checkpoint.environment != "rlplace/Refinement-v0":
        raise InputError(f"agent {checkpoint.name}: adapting needs an agent of rlplace/Refinement-v0")
    run = Execution(**execution)
    check_counts(seed=seed)
    check_limit(time_limit_s)
    check_possible(problem)
    _warm_up()
    deadline_s = time.monotonic() + time_limit_s
    base = floor_of(problem, start, run, seed=seed, time_limit_s=time_limit_s)
    instance = make_instance(problem, floor=base.plan, compute_floor=False, execution=run)
    plan = greedy_fit(instance) if base.devices is None else base.devices
    score, calls = base.score, 0
    if problem.num_devices > 1:
        network = copy.deepcopy(checkpoint.network)
        for number in range(_ROUNDS + 1):
            left_s = (deadline_s - time.monotonic()) / (_ROUNDS + 1 - number)
            learn_s = 0.0 if number == _ROUNDS else _LEARN * left_s
            search = Search(instance, network, plan, seed=seed + number)
            search.run(deadline_s=time.monotonic() + left_s - learn_s)
            calls += search.calls
            if search.best.objective_s < score.objective_s:
                plan, score = search.best_plan, search.best
            if learn_s > 0.0:
                calls += _learn(network, instance, plan, time.monotonic() + learn_s, seed + number)
        Evaluator(problem, run).count(calls)
    priority = base.priority_of(plan)
    line = simulate(problem, plan, priority=priority, **run.arguments)
    if not line.feasible:
        raise base.reason or InfeasibleError("no feasible plan found; relax memory, or raise the time limit")
    predicted = line.predicted(problem).told(
        floor_step_time_s=base.score.step_time_s if base.score.feasible else None,
        search_calls=calls,
        agent=f"{checkpoint.name}, adapted",
    )
    return make_plan(problem, plan, planner="agent", seed=seed, predicted=predicted, priority=priority, **run.arguments)


@cache
def _warm_up() -> None:
    """Like `rlplace.agents.search.warm_up`, with what only learning runs."""
    from rlplace.envs.guide.features import FEATURES
    from rlplace.problem.generate import random_problem

    warm_up()
    plan = np.zeros(4, dtype=np.int32)
    instance = make_instance(random_problem(0, 4, 2), floor=plan, compute_floor=False)
    _learn(PlacerNetwork(features=FEATURES), instance, plan, time.monotonic() + 0.05, 0)


def _learn(network: PlacerNetwork, instance: Instance, plan: np.ndarray, deadline_s: float, seed: int) -> int:
    """Prices moves around a plan for half of the time and fits the network to them for the other half; returns the calls."""
    half_s = (time.monotonic() + deadline_s) / 2.0
    lesson = price_moves(network, instance, [plan], deadline_s=half_s, seed=seed)
    fit_moves(network, [lesson], steps=_STEPS, deadline_s=deadline_s, seed=seed)
    return lesson.calls
