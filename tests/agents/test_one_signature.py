"""After the warm-up nothing is left to compile: a kernel with a second signature would be paid out of a time limit."""

import numpy as np
import pytest
from numba.core.dispatcher import Dispatcher

from rlplace.agents import search
from rlplace.envs import features, moves
from rlplace.envs.refinement import RefinementEnv
from rlplace.planners import balanced, get_planner
from rlplace.planners.common import kernels, listkernels
from rlplace.problem import Problem
from rlplace.problem.generate import random_problem
from rlplace.problem.toys import random_problem as toy_problem
from rlplace.simulator import fast, simulate, simulate_many

KERNELS = {
    f"{module.__name__}.{name}": value
    for module in (fast, kernels, listkernels, balanced, features, moves)
    for name, value in vars(module).items()
    if isinstance(value, Dispatcher)
}


def signatures():
    return {name: len(kernel.signatures) for name, kernel in KERNELS.items()}


@pytest.mark.parametrize("kind", ["generated", "toy", "loaded", "saved plan"])
def test_nothing_is_compiled_after_the_warm_up(kind, tmp_path):
    search.warm_up()
    assert len(KERNELS) > 20
    before = signatures()
    problem = toy_problem(1, 20, 4) if kind == "toy" else random_problem(1, 20, 4, memory_factor=1.3, hosts=2)
    if kind == "loaded":
        problem.save(tmp_path / "p.problem.json")
        problem = Problem.load(tmp_path / "p.problem.json")
    plan = get_planner("best")(problem)
    simulate(problem, plan)
    simulate_many(problem, np.tile(plan.device_of_group, (3, 1)))
    get_planner("local_search")(problem, calls=100)
    env = RefinementEnv([problem], start="best")
    options = {"plan": plan.device_of_group} if kind == "saved plan" else None
    env.reset(seed=0, options=options)
    done, rng = False, np.random.default_rng(0)
    while not done:
        _, _, done, _, _ = env.step(int(rng.choice(np.flatnonzero(env.action_masks()))))
    assert {name: count for name, count in signatures().items() if count != before[name]} == {}
