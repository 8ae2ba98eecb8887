"""Planners on instances whose optimum is proven or found by brute force."""

import itertools

import numpy as np
import pytest
import toys

from rlplace.planners import ONE_SHOT, get_planner
from rlplace.planners.common.bounds import lower_bounds
from rlplace.problem.generate import random_problem
from rlplace.simulator import simulate_many

REACHED = {
    **{name: set(toys.TOYS) for name in ("annealing", "local_search", "brkga", "best")},
    "compiler": set(toys.TOYS) - {"fork_join"},
    **{name: {"memory_tight_chain", "memory_tight_pair", "unlike_pair"} for name in ("gpipe", "pipedream")},
}
"""Toys whose optimum a planner finds."""


def brute_force(problem):
    """Smallest step time over all feasible assignments, or None."""
    plans = np.array(list(itertools.product(range(problem.num_devices), repeat=problem.num_groups)), dtype=np.int32)
    batch = simulate_many(problem, plans[problem.group_allowed[np.arange(problem.num_groups), plans].all(axis=1)])
    times = batch.step_time_s[batch.feasible]
    return float(times.min()) if len(times) else None


@pytest.mark.parametrize(("planner", "toy"), [(planner, toy) for planner in REACHED for toy in sorted(REACHED[planner])])
def test_known_optima_are_reached(planner, toy):
    problem, optimum, _ = toys.TOYS[toy]()
    options = {"calls": 400} if planner in ("annealing", "local_search", "brkga") else {}
    plan = get_planner(planner)(problem, **options)
    assert plan.predicted.step_time_s == pytest.approx(optimum)
    assert plan.predicted.feasible


@pytest.mark.parametrize("seed", range(12))
def test_search_equals_brute_force_on_small_problems(seed):
    shape = ("layered", "branchy", "chain")[seed % 3]
    devices = 2 + (seed % 4 == 3)
    problem = random_problem(
        seed, 8 - 2 * (devices == 3), devices, shape=shape, unlike=seed % 2 == 1, memory_factor=(None, 1.5)[seed % 2],
        null_fraction=0.2 * (seed % 3 == 1), shared_parameters=seed % 2,
    )  # fmt: skip
    optimum = brute_force(problem)
    assert optimum is not None
    assert lower_bounds(problem).step_time_s <= optimum * (1 + 1e-12)
    found = get_planner("annealing")(problem, seed=seed, calls=3000, start_temperature=0.1).predicted.step_time_s
    assert found == pytest.approx(optimum, rel=1e-9)
    for name in (*ONE_SHOT[1:], "best", "local_search"):
        options = {"calls": 200} if name == "local_search" else {}
        assert get_planner(name)(problem, **options).predicted.step_time_s >= optimum * (1 - 1e-12)
