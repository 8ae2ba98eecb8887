"""Fine-tuning on one problem: search, learn from moves that were priced around its best plan, search on.

The network is a copy; the checkpoint stays as it is.
"""

from __future__ import annotations

import copy
import time
from functools import cache
from typing import Any

import numpy as np

from rlplace.agents.checkpoint import Checkpoint
from rlplace.agents.network import PlacerNetwork
from rlplace.agents.search import Search, warm_up
from rlplace.agents.setup import check_counts, set_up
from rlplace.agents.tuning.learn import fit_moves, price_moves
from rlplace.envs.instance import Instance, make_instance
from rlplace.errors import InputError
from rlplace.plan.plan import PlacementPlan
from rlplace.planners.common.search import Start
from rlplace.problem import Problem

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
        checkpoint: An agent of Refinement-v0.
        problem: The problem.
        time_limit_s: Wall time, floor included.
        seed: Seed of everything random.
        start: Plan or assignment to start from instead of `best`.
        **execution: Fields of `rlplace.planners.common.evaluate.Execution`.

    Raises:
        InputError: The checkpoint is of another environment.
        InfeasibleError: No plan that fits was found.
    """
    if checkpoint.environment != "rlplace/Refinement-v0":
        raise InputError(f"agent {checkpoint.name}: adapting needs an agent of rlplace/Refinement-v0")
    check_counts(seed=seed)
    setup = set_up(problem, start, execution, seed=seed, time_limit_s=time_limit_s, warm=_warm_up)
    plan, score, calls = setup.first, setup.score, 0
    if problem.num_devices > 1:
        network = copy.deepcopy(checkpoint.network)
        for number in range(_ROUNDS + 1):
            left_s = (setup.deadline_s - time.monotonic()) / (_ROUNDS + 1 - number)
            learn_s = 0.0 if number == _ROUNDS else _LEARN * left_s
            search = Search(setup.instance, network, plan, seed=seed + number)
            search.run(deadline_s=time.monotonic() + left_s - learn_s)
            calls += search.calls
            if search.best.objective_s < score.objective_s:
                plan, score = search.best_plan, search.best
            if learn_s > 0.0:
                calls += _learn(network, setup.instance, plan, time.monotonic() + learn_s, seed + number)
    return setup.answer(plan, search_calls=calls, agent=f"{checkpoint.name}, adapted")


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
