"""Every planner takes micro-batches and a schedule, and plans for the step that they make."""

import pytest

from rlplace.errors import InputError
from rlplace.planners import NEEDS_SHARDING, NEEDS_SPLIT, PLANNERS, get_planner
from rlplace.problem.generate import random_problem
from rlplace.simulator import simulate


@pytest.mark.parametrize("schedule", ["list", "1f1b"])
@pytest.mark.parametrize("name", [name for name in PLANNERS if name not in NEEDS_SHARDING | NEEDS_SPLIT])
def test_the_plan_carries_its_execution_and_its_prediction_holds(name, schedule):
    problem = random_problem(5, 14, 3, shape="layered", unlike=True)
    options = {"calls": 60} if name in ("annealing", "local_search", "brkga", "agent") else {}
    if name in ("cp_sat", "dlplacer"):
        options = {"effort": 0.05}  # without it, minutes on a proof
    plan = get_planner(name)(problem, seed=1, microbatches=4, schedule=schedule, **options)
    assert (plan.microbatches, plan.schedule) == (4, schedule)
    line = simulate(problem, plan)
    assert line.feasible
    assert line.step_time_s == plan.predicted.step_time_s
    assert plan.predicted.samples_per_s == pytest.approx(4 * problem.samples_per_microbatch / line.step_time_s)


@pytest.mark.parametrize("name", ["annealing", "local_search", "agent"])
def test_searches_are_never_worse_than_the_floor_of_the_same_execution(name):
    problem = random_problem(9, 20, 4, shape="branchy")
    run = {"microbatches": 8, "schedule": "gpipe"}
    floor = get_planner("best")(problem, **run).predicted.step_time_s
    assert get_planner(name)(problem, seed=0, calls=150, **run).predicted.step_time_s <= floor


@pytest.mark.parametrize(
    ("options", "message"),
    [({"schedule": "zero_bubble"}, "schedule"), ({"microbatches": 0}, "from 1 up"), ({"microbatches": True}, "from 1 up")],
)
def test_executions_that_no_search_can_run_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        get_planner("best")(random_problem(5, 6, 2), **options)
