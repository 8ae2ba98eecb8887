"""The planner contract: legal feasible plans, unchanged input, seeds, limits, settings, the name table."""

import time
from dataclasses import fields
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlplace import budget
from rlplace.budget import Budget
from rlplace.cost.contract import split_backward
from rlplace.errors import InfeasibleError, InputError
from rlplace.placement import NEEDS_SPLIT, OF_STRATEGIES, ONE_SHOT, PLANNERS, get_planner, run_planner
from rlplace.placement import search as best
from rlplace.placement.common.evaluate import PlanEvaluator, Score, ScoredAssignment
from rlplace.placement.common.floor import best_of
from rlplace.placement.published.compiler import compiler, fm
from rlplace.problem import problem_from_dict, problem_to_dict
from rlplace.problem.generate import random_problem
from rlplace.simulator import simulate

SEARCH = ("annealing", "local_search")
EXACT = ("cp_sat", "dlplacer")
CLASSICAL = tuple(dict.fromkeys(("random", "bipartition", *ONE_SHOT, "best", *SEARCH, *EXACT)))


def options_of(name, calls=60):
    if name in EXACT:
        return {"effort": 0.05}
    return {"calls": calls} if name in SEARCH else {"samples": 8} if name == "random" else {}


def constrained(seed, groups, devices, factor):
    """Returns a random problem with a fixed group, null times and, with three or more devices, a missing link."""
    data = problem_to_dict(
        random_problem(
            seed, groups, devices, memory_factor=factor, null_fraction=0.2, shared_parameters=1, unlike=seed % 2 == 0
        )
    )
    problem = problem_from_dict(data)
    group = seed % groups
    data["groups"][group]["device"] = int(np.flatnonzero(problem.group_allowed[group])[0])
    if devices >= 3:
        data["links"]["bandwidth_bytes_per_s"][0][2] = 0.0
    return problem_from_dict(data)


@settings(max_examples=25, derandomize=True)
@given(
    seed=st.integers(0, 10_000), groups=st.integers(1, 24), devices=st.integers(1, 4),
    factor=st.sampled_from([None, 1.3, 2.0]), name=st.sampled_from(CLASSICAL),
)  # fmt: skip
def test_plans_are_legal_and_feasible_and_input_is_unchanged(seed, groups, devices, factor, name):
    problem = constrained(seed, groups, devices, factor)
    if name in NEEDS_SPLIT:
        problem = split_backward(problem)
    before = {f.name: np.array(v) for f in fields(problem) if isinstance(v := getattr(problem, f.name), np.ndarray)}
    try:
        plan = get_planner(name)(problem, seed=seed, **options_of(name))
    except InfeasibleError:
        assert name == "single" or factor is not None or devices >= 3  # without limits and with all links a plan always exists
        return
    line = simulate(problem, plan)
    assert line.feasible
    assert plan.planner == name and plan.seed == seed
    assert plan.predicted.step_time_s == line.step_time_s
    assert plan.predicted.samples_per_s == problem.samples_per_microbatch / line.step_time_s
    assert problem.group_allowed[np.arange(problem.num_groups), plan.device_of_group].all()
    for field, value in before.items():
        np.testing.assert_array_equal(getattr(problem, field), value)


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSICAL)
def test_equal_seeds_give_equal_plans(name):
    problem = random_problem(3, 40, 3, memory_factor=2.0)
    if name == "single":
        problem = random_problem(3, 40, 3)
    if name in NEEDS_SPLIT:
        problem = split_backward(problem)
    plans = [get_planner(name)(problem, seed=7, **options_of(name)).to_dict() for _ in range(2)]
    assert plans[0] == plans[1]


@pytest.mark.parametrize("name", ["random", "annealing"])
def test_seeds_matter(name):
    problem = random_problem(3, 40, 3, memory_factor=2.0)
    plans = [get_planner(name)(problem, seed=seed, **options_of(name)).device_of_group.tolist() for seed in range(3)]
    assert plans[0] != plans[1] or plans[1] != plans[2]


@pytest.mark.slow
@pytest.mark.parametrize("setting", [{}, {"memory_factor": 1.3}, {"unlike": True}, {"hosts": 2, "memory_factor": 1.6}])
def test_best_is_the_best_one_shot_planner_and_searches_improve_on_it(setting):
    problem = random_problem(11, 50, 4, shape="branchy", **setting)
    floor = get_planner("best")(problem).predicted.step_time_s
    times = []
    for name in ONE_SHOT:
        try:
            times.append(get_planner(name)(problem).predicted.step_time_s)
        except InfeasibleError:
            assert setting.get("memory_factor")
    assert floor == min(times)
    for name in SEARCH:
        run = run_planner(name, problem, calls=150)
        assert run.plan.predicted.step_time_s <= floor
        if "hosts" in setting:  # this one leaves room
            assert run.plan.predicted.step_time_s < 0.99 * floor
    floor_calls = run_planner("best", problem).simulator_calls
    assert run.simulator_calls == floor_calls + 150
    assert get_planner("annealing")(problem, calls=0).predicted.step_time_s == floor


def test_search_starts_where_it_is_told():
    problem = random_problem(5, 30, 2)
    start = np.zeros(30, dtype=np.int32)
    plan = get_planner("local_search")(problem, calls=0, start=start)
    np.testing.assert_array_equal(plan.device_of_group, start)
    with pytest.raises(InputError, match="start must be a plan or name a device"):
        get_planner("annealing")(problem, start=[0, 1])


@pytest.mark.parametrize("name", [*SEARCH, "best"])
def test_time_limit_ends_the_search(name):
    problem = random_problem(2, 300, 4, memory_factor=1.5)
    get_planner(name)(problem, time_limit_s=0.01)
    start_s = time.perf_counter()
    plan = get_planner(name)(problem, time_limit_s=0.3)
    # Far above any scheduling noise and far below what an unlimited search of this size takes.
    assert time.perf_counter() - start_s < 20
    assert plan.predicted.feasible


@pytest.mark.parametrize(
    ("limit_s", "fits", "last"), [(20.0, True, "compiler"), (12.0, True, "m_topo"), (12.0, False, "compiler")]
)
def test_the_dearest_planner_does_not_begin_late_where_a_plan_is_known(monkeypatch, limit_s, fits, last):
    """Every planner takes a second."""
    problem, now_s = random_problem(1, 10, 2), [0.0]
    monkeypatch.setattr(budget, "time", SimpleNamespace(monotonic=lambda: now_s[0]))

    def answered(*args, known_s, **options):
        now_s[0] += 1.0
        known.append(known_s)
        return ScoredAssignment(
            np.zeros(10, dtype=np.int32), Score(10.0 - len(known), 0.0 if fits else 1.0), np.zeros(2, dtype=np.int64)
        )

    known = []
    monkeypatch.setattr(best, "best_of", answered)
    names = [name for name, _ in best.floor_answers(PlanEvaluator(problem, Budget(seconds=limit_s)))]
    assert names == list(ONE_SHOT[: ONE_SHOT.index(last) + 1])
    assert known == [10.0 - n if fits and n > limit_s / 4 else np.inf for n in range(len(names))]


@pytest.mark.parametrize(("groups", "devices", "unlike", "factor"), [(60, 3, False, 1.5), (700, 12, True, 1.05)])
def test_no_time_still_gives_a_feasible_plan(groups, devices, unlike, factor):
    problem = random_problem(2, groups, devices, unlike=unlike, memory_factor=factor)
    assert get_planner("best")(problem, time_limit_s=0.0).predicted.feasible


def test_a_partition_ends_in_the_middle_when_the_time_is_up(monkeypatch):
    """Every pass of refinement takes a second; the last may be half a second late."""
    problem, now_s, whole = random_problem(1, 1200, 4), [0.0], fm.refine
    monkeypatch.setattr(budget, "time", SimpleNamespace(monotonic=lambda: now_s[0]))

    def slow(*arguments):
        now_s[0] += 1.0
        return whole(*arguments)

    monkeypatch.setattr(fm, "refine", slow)
    evaluator = PlanEvaluator(problem, Budget(seconds=5.6))
    evaluator.answer(np.zeros(problem.num_groups, dtype=np.int32))  # there is an answer, so that none is worth being late
    assert best_of(evaluator, compiler.candidates(problem, 0)) is None
    assert now_s == [6.0] and evaluator.budget.used == 1
    evaluator.budget.start_clock(1e6)
    assert best_of(evaluator, islice(compiler.candidates(problem, 0), 100)).score.feasible and now_s[0] > 12.0


def test_name_table():
    for name in CLASSICAL:
        assert get_planner(name).__name__ == name
    assert set(CLASSICAL) | {"agent"} == set(PLANNERS)
    with pytest.raises(InputError, match="did you mean 'metis'"):
        get_planner("mettis")
    for name in OF_STRATEGIES:
        with pytest.raises(InputError, match=f"{name} chooses whole strategies"):
            get_planner(name)


def test_bad_options():
    problem = random_problem(0, 4, 2)
    with pytest.raises(InputError, match="samples"):
        get_planner("random")(problem, samples=0)
    for name in SEARCH:
        for calls in (-1, 2.5, True):
            with pytest.raises(InputError, match=f"{name}: calls"):
                get_planner(name)(problem, calls=calls)
        for start in ([0, 1, 2, 0], [0, -1, 0, 0], [0.5, 0, 0, 0]):
            with pytest.raises(InputError, match=f"{name}: start must"):
                get_planner(name)(problem, calls=1, start=start)


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


def test_the_prediction_of_the_agents_plan_holds():
    problem = random_problem(5, 14, 3, shape="layered", unlike=True)
    plan = get_planner("agent")(problem, seed=1, calls=60)
    line = simulate(problem, plan)
    assert line.feasible and line.step_time_s == plan.predicted.step_time_s
    assert plan.predicted.samples_per_s == pytest.approx(problem.samples_per_microbatch / line.step_time_s)
