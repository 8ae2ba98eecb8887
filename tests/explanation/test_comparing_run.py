"""A comparison: equal treatment, errors as rows, views kept apart, and going on after an interruption."""

import sys
import types

import numpy as np
import pytest

from rlplace.cost.contract import split_backward
from rlplace.errors import InfeasibleError, InputError, MissingError
from rlplace.explanation.compare import Case, Settings, Store, compare, count_rows, gather
from rlplace.explanation.compare.records import SPLIT, TASKS
from rlplace.explanation.compare.rows import is_random, takes_calls
from rlplace.placement import PLANNERS, get_planner
from rlplace.placement.common.bounds import lower_bounds
from rlplace.plan import make_plan
from rlplace.plan.prediction import Prediction
from rlplace.problem.generate import random_problem
from rlplace.simulator import simulate


def register(monkeypatch, **planners):
    """Puts functions into the planner table."""
    module = types.ModuleType("planners_of_a_test")
    for name, function in planners.items():
        setattr(module, name, function)
        monkeypatch.setitem(PLANNERS, name, f"planners_of_a_test:{name}")
    monkeypatch.setitem(sys.modules, "planners_of_a_test", module)


def case(problem, name="toy", cluster=""):
    return Case(name, cluster, lambda: problem)


def run(problems, planners, *, views=(), store=None, **settings):
    cases = [case(problem, f"toy{number}") for number, problem in enumerate(problems)]
    store = store or Store(Settings(**settings))
    compare(cases, planners, store, views=views)
    return gather(store, cases, planners, views)


def test_rows_hold_what_the_simulator_says():
    problem = random_problem(1, 14, 3, memory_factor=2.0)
    found = run([problem], ["heft", "annealing"], calls=40, seeds=3)
    assert [row.planner for row in found.rows] == ["best", "heft", "annealing"] and found.complete
    best, heft, annealing = found.rows
    plan = get_planner("heft")(problem)
    line = simulate(problem, plan)
    assert heft.step_time_s == line.step_time_s and heft.samples_per_s == pytest.approx(8 / line.step_time_s)
    assert heft.ratio == heft.step_time_s / best.step_time_s and best.ratio == 1.0
    limits = [device.memory_bytes for device in problem.devices]
    assert heft.memory_share == max(line.peak_memory_bytes / limits)
    assert (heft.random, heft.seeds, heft.spread_s) == (False, 1, None)
    steps = [get_planner("annealing")(problem, seed=seed, calls=40).predicted.step_time_s for seed in range(3)]
    assert (annealing.random, annealing.seeds) == (True, 3)
    assert annealing.step_time_s == pytest.approx(np.mean(steps)) and annealing.spread_s == pytest.approx(np.ptp(steps))
    assert annealing.simulator_calls == best.simulator_calls + 40  # the floor, and the budget
    bounds = lower_bounds(problem)
    info = found.problems[0]
    assert info.critical_path_s == bounds.critical_path_s and heft.bound_s == pytest.approx(
        max(bounds.step_time_s, info.memory_forced_s)
    )
    assert heft.gap == heft.step_time_s / heft.bound_s - 1 and heft.gap >= 0


def test_an_error_is_a_row_with_its_reason(monkeypatch):
    def infeasible(problem, *, seed=0, time_limit_s=None):
        raise InfeasibleError("gpu0 is\nfull")

    def missing(problem, *, seed=0, time_limit_s=None):
        raise MissingError("pip install it")

    def refuses(problem, *, seed=0, time_limit_s=None):
        raise InputError("needs kinds of ops")

    def broken(problem, *, seed=0, time_limit_s=None):
        return 1 / 0

    def elsewhere(problem, *, seed=0, time_limit_s=None):
        return make_plan(random_problem(99, 3, 2), [0, 0, 0], planner="elsewhere")

    def optimist(problem, *, seed=0, time_limit_s=None):
        return make_plan(problem, [0] * problem.num_groups, planner="optimist", predicted=Prediction(feasible=True))

    register(
        monkeypatch, infeasible=infeasible, missing=missing, refuses=refuses, broken=broken, elsewhere=elsewhere,
        optimist=optimist,
    )  # fmt: skip
    names = ["infeasible", "missing", "refuses", "broken", "elsewhere", "optimist", "heft"]
    found = run([random_problem(1, 14, 3, memory_factor=1.6)], names)
    rows = {row.planner: row for row in found.rows}
    assert [rows[name].status for name in names] == [
        "infeasible", "missing", "failed", "failed", "failed", "infeasible", "ok",
    ]  # fmt: skip
    assert rows["infeasible"].reason == "gpu0 is full" and rows["missing"].reason == "pip install it"
    assert rows["broken"].reason == "ZeroDivisionError: division by zero" and rows["refuses"].reason == "needs kinds of ops"
    assert "simulated again" in rows["optimist"].reason and "problem" in rows["elsewhere"].reason
    assert all(rows[name].step_time_s is None and rows[name].ratio is None for name in names[:6])
    summary = {line.planner: line for line in found.summaries}
    assert summary["broken"].feasible == 0 and summary["broken"].only_reference == 1 and summary["heft"].feasible == 1


def test_bugs_are_raised_on_demand(monkeypatch):
    def broken(problem, *, seed=0, time_limit_s=None):
        return 1 / 0

    register(monkeypatch, broken=broken)
    with pytest.raises(ZeroDivisionError):
        compare([case(random_problem(1, 5, 2))], ["broken"], Store(Settings()), strict=True)


def test_some_seeds_without_a_plan(monkeypatch):
    def moody(problem, *, seed=0, time_limit_s=None, calls=None):
        if seed == 1:
            raise InfeasibleError("not with seed 1")
        return make_plan(problem, [seed % 2] * problem.num_groups, planner="moody", seed=seed)

    register(monkeypatch, moody=moody)
    row = run([random_problem(1, 5, 2)], ["moody"], calls=1, seeds=3).rows[-1]
    assert (row.status, row.seeds, row.feasible_seeds, row.ratio) == ("infeasible", 3, 2, None) and row.step_time_s > 0


def test_a_wrong_prediction_is_remarked(monkeypatch):
    def boaster(problem, *, seed=0, time_limit_s=None):
        return make_plan(problem, [0] * problem.num_groups, planner="boaster", predicted=Prediction(1e-9))

    register(monkeypatch, boaster=boaster)
    problem = random_problem(1, 5, 2)
    row = run([problem], ["boaster"]).rows[-1]
    assert row.step_time_s == simulate(problem, [0] * 5).step_time_s and "said 0.000 ms" in row.reason


def test_split_problems_are_a_block_of_their_own():
    problem = random_problem(1, 10, 3)
    found = run([problem], ["heft", "single"], views=[SPLIT])
    assert [(row.view, row.planner) for row in found.rows] == [
        (view, name) for view in (TASKS, SPLIT) for name in ("best", "heft", "single")
    ]
    assert [info.fingerprint for info in found.problems] == [problem.fingerprint, split_backward(problem).fingerprint]
    assert len(found.rows) == count_rows([case(problem)], ["heft", "single"], [SPLIT])
    assert {(line.view, line.planner) for line in found.summaries} == {
        (view, name) for view in (TASKS, SPLIT) for name in ("best", "heft", "single")
    }


def test_interrupted_comparisons_go_on(monkeypatch, tmp_path):
    made = []

    def counted(problem, *, seed=0, time_limit_s=None):
        made.append(problem.num_groups)
        if len(made) == 4:
            raise KeyboardInterrupt
        return make_plan(problem, [0] * problem.num_groups, planner="counted")

    register(monkeypatch, counted=counted)
    problems = [random_problem(seed, 9 + seed, 2) for seed in range(3)]
    cases = [case(problem, f"toy{number}") for number, problem in enumerate(problems)]
    path = tmp_path / "rows.jsonl"
    made.clear()
    with pytest.raises(KeyboardInterrupt):
        compare(cases, ["counted", "heft"], Store(Settings(), path))
    first = Store(Settings(), path, resume=True)
    rows = dict(first.rows)
    part = gather(first, cases, ["counted", "heft"])
    assert not part.complete and len(part.rows) == 7 and made == [6, 9, 10, 11]  # 6: the warm-up
    made[:] = [0] * 10
    compare(cases, ["counted", "heft"], first)
    assert made[10:] == [6, 11] and all(first.rows[key] is row for key, row in rows.items())
    again = gather(Store(Settings(), path, resume=True), cases, ["counted", "heft"])
    assert again.complete and again == gather(first, cases, ["counted", "heft"])


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(PLANNERS))
def test_planners_that_run_once_do_not_look_at_their_seed(name):
    if is_random(name):
        assert takes_calls(name) or name in ("random", "metis")
        return
    problem = random_problem(3, 9, 3, memory_factor=2.5)
    plans = []
    for seed in range(3):
        try:
            plans.append(get_planner(name)(problem, seed=seed, time_limit_s=20.0))
        except (InfeasibleError, MissingError, InputError) as error:
            plans.append(type(error))
    if isinstance(plans[0], type):
        assert plans[0] == plans[1] == plans[2]
        return
    kept = [plan.device_of_group.tolist() for plan in plans]
    assert kept[0] == kept[1] == kept[2]
