"""Settings of the search planners: refused when they make no sense, and they reach the search."""

import pytest

from rlplace.errors import InputError
from rlplace.planners import get_planner
from rlplace.problem.generate import random_problem


@pytest.mark.parametrize(
    ("planner", "options", "said"),
    [
        ("annealing", {"start_temperature": -0.1}, "start_temperature must not be negative, found -0.1"),
        ("annealing", {"start_temperature": float("nan")}, "start_temperature"),
        ("annealing", {"cooling": 0.0}, "cooling must be above 0"),
        ("annealing", {"returns": 1.5}, "returns must be a whole number"),
        ("local_search", {"tries": 0}, "tries must be a whole number from 1 up, found 0"),
        ("local_search", {"random_tries": True}, "random_tries"),
        ("local_search", {"kick": 0}, "kick must be"),
        ("local_search", {"kick_worse": -1.0}, "kick_worse must not be negative"),
    ],
)
def test_settings_that_make_no_sense_are_refused(planner, options, said):
    with pytest.raises(InputError, match=f"{planner}: {said}"):
        get_planner(planner)(random_problem(0, 8), calls=8, **options)


@pytest.mark.parametrize(
    ("planner", "options"),
    [
        ("annealing", {"start_temperature": 0.3}),
        ("annealing", {"start_temperature": 0.1, "cooling": 1.0}),
        ("annealing", {"start_temperature": 0.1, "returns": 0}),
        ("local_search", {"tries": 2}),
        ("local_search", {"random_tries": 2}),
        ("local_search", {"kick": 9}),
        ("local_search", {"kick_worse": 0.5}),
    ],
)
def test_settings_change_what_is_found(planner, options):
    problems = [random_problem(seed, 40, 4) for seed in range(3)]
    usual = {"start_temperature": 0.1} if planner == "annealing" else {}
    found = []
    for setting in (usual, usual, options):
        plans = [get_planner(planner)(problem, calls=400, start=[0] * 40, **setting) for problem in problems]
        found.append([plan.device_of_group.tolist() for plan in plans])
    assert found[0] == found[1] != found[2]
