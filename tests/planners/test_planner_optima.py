"""Planners on instances whose optimum is proven or found by brute force."""

import itertools

import numpy as np
import pytest
import toys

from rlplace.planners import ONE_SHOT, get_planner
from rlplace.planners.common.bounds import lower_bounds
from rlplace.problem.generate import random_problem
from rlplace.simulator import simulate_many

TOYS = [
    toys.two_device_chain,
    toys.memory_tight_chain,
    toys.fork_join,
    toys.memory_tight_pair,
    toys.unlike_pair,
    toys.two_branches,
]


def brute_force(problem):
    """Smallest step time over all feasible assignments, or None."""
    plans = np.array(list(itertools.product(range(problem.num_devices), repeat=problem.num_groups)), dtype=np.int32)
    batch = simulate_many(problem, plans[problem.group_allowed[np.arange(problem.num_groups), plans].all(axis=1)])
    times = batch.step_time_s[batch.feasible]
    return float(times.min()) if len(times) else None


@pytest.mark.parametrize("toy", TOYS, ids=lambda t: t.__name__)
@pytest.mark.parametrize("planner", ["annealing", "local_search", "brkga"])
def test_search_reaches_the_known_optimum(toy, planner):
    problem, optimum, _ = toy()
    plan = get_planner(planner)(problem, calls=400)
    assert plan.predicted.step_time_s == pytest.approx(optimum)
    assert plan.predicted.feasible


@pytest.mark.parametrize("toy", TOYS, ids=lambda t: t.__name__)
def test_floor_reaches_the_known_optimum_of_toys(toy):
    problem, optimum, _ = toy()
    assert get_planner("best")(problem).predicted.step_time_s == pytest.approx(optimum)


@pytest.mark.parametrize("seed", range(12))
def test_search_equals_brute_force_on_small_problems(seed):
    shape = ("layered", "branchy", "chain")[seed % 3]
    devices = 2 + (seed % 4 == 3)
    problem = random_problem(
        seed, 8 - 2 * (devices == 3), devices, shape=shape, unlike=seed % 2 == 1, memory_factor=(None, 1.5)[seed % 2],
        null_fraction=0.2 * (seed % 3 == 1), shared_parameters=seed % 2,
    )  # fmt: skip
    optimum = brute_force(problem)
    if optimum is None:
        pytest.skip("the generator made an infeasible problem")
    assert lower_bounds(problem).step_time_s <= optimum * (1 + 1e-12)
    found = get_planner("annealing")(problem, seed=seed, calls=3000, start_temperature=0.1).predicted.step_time_s
    assert found == pytest.approx(optimum, rel=1e-9)
    for name in (*ONE_SHOT[1:], "best", "local_search"):
        options = {"calls": 200} if name == "local_search" else {}
        assert get_planner(name)(problem, **options).predicted.step_time_s >= optimum * (1 - 1e-12)


def test_some_small_problems_are_feasible():
    """The test above must not skip everything."""
    assert sum(brute_force(random_problem(seed, 6, 2, memory_factor=1.5)) is not None for seed in range(6)) >= 5
