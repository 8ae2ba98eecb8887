"""The agent as a planner: never worse than what it starts from, within its budget, equal for equal arguments."""

import json
import time
from dataclasses import replace

import numpy as np
import pytest

from rlplace.agents import planner
from rlplace.agents.search import GuidedSearch
from rlplace.cluster.links import Links
from rlplace.errors import InfeasibleError, InputError
from rlplace.placement import get_planner, run_planner
from rlplace.placement.common.evaluate import count_calls
from rlplace.plan.plan import make_plan
from rlplace.problem.build import build_problem
from rlplace.problem.generate import random_problem
from rlplace.simulator import simulate
from tests.toys import TOYS, memory_tight_pair

NAMES = ("refinement", "placement")


def with_links(problem, bandwidth):
    return replace(problem, links=Links(bandwidth, problem.links.latency_s))


def step_s(problem, plan):
    line = simulate(problem, plan)
    assert line.feasible
    return line.step_time_s


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(6))
def test_never_worse_than_best_and_feasible(agents, name, seed):
    problem = random_problem(
        seed, num_groups=18, num_devices=3, memory_factor=(None, 1.6, 2.2)[seed % 3], unlike=seed % 2 == 1, null_fraction=0.2
    )
    floor = get_planner("best")(problem).predicted.step_time_s
    plan = agents[name].place(problem, seed=seed, calls=90)
    told = plan.predicted
    assert told.step_time_s == step_s(problem, plan) == step_s(problem, plan.device_of_group)
    assert told.step_time_s <= floor == told.floor_step_time_s
    assert problem.group_allowed[np.arange(18), plan.device_of_group].all()
    assert told.search_calls <= 90 and told.agent == agents[name].checkpoint.name


@pytest.mark.parametrize("calls", [0, 1, 2, 13, 100])
@pytest.mark.parametrize("name", NAMES)
def test_the_budget_of_calls_is_kept_exactly(agents, monkeypatch, name, calls):
    """Counted where the calls are made, not by what the search says about itself."""
    planner.warm_up()  # once a process, and not to be counted
    made, around = [], GuidedSearch._round

    def counted_round(self, wanted, *args):
        before = self.calls
        tried = around(self, wanted, *args)
        assert tried <= self.calls - before <= wanted
        made.append(self.calls - before)
        return tried

    monkeypatch.setattr(GuidedSearch, "_round", counted_round)
    problem = random_problem(2, num_groups=16, num_devices=3)
    start = get_planner("best")(problem).device_of_group
    with count_calls() as counter:
        plan = agents[name].place(problem, start=start, calls=calls)
    told = plan.predicted.search_calls
    assert told == calls >= sum(made) >= calls - calls // 4  # nothing of the budget is left on a problem of this size
    assert counter.calls == 1 + told  # with the start, as `rlplace compare` shows


@pytest.mark.parametrize(("calls", "asked"), [(0, 0), (7, 0), (8, 2), (48, 3), (1000, 8), (None, 8)])
def test_a_quarter_of_the_calls_is_for_built_plans(agents, monkeypatch, calls, asked):
    """What the builder finds counts, whatever else happens: here one of its plans is the optimum, and nothing is searched."""
    toy = memory_tight_pair()
    counts = []

    def build(policy, instance, count, **_):
        counts.append(count)
        assert policy is agents["placement"].builder
        return np.array([toy.optimal_device_of_group] * count)  # equal plans are simulated once

    monkeypatch.setattr(planner, "built", build)
    monkeypatch.setattr(GuidedSearch, "run", lambda self, **_: self._round(1, 0.0, 0.0))
    if not asked:
        with pytest.raises(InfeasibleError):
            agents["placement"].place(toy.problem, calls=calls, start=[0, 0])
        return
    plan = agents["placement"].place(toy.problem, calls=calls, start=[0, 0])
    assert counts == [asked]
    assert step_s(toy.problem, plan.device_of_group) == pytest.approx(toy.optimal_step_s)
    assert plan.predicted.search_calls == 2


@pytest.mark.parametrize(("calls", "mended"), [(8, False), (12, True), (400, True)])
def test_a_built_plan_that_does_not_fit_is_mended(agents, monkeypatch, calls, mended):
    """Within the same quarter of the calls; both groups on one device are quicker than the optimum and too large."""
    toy = memory_tight_pair()
    monkeypatch.setattr(planner, "built", lambda policy, instance, count, **_: np.zeros((count, 2), dtype=np.int32))
    monkeypatch.setattr(GuidedSearch, "run", lambda self, **_: None)
    with count_calls() as counter:
        if not mended:
            with pytest.raises(InfeasibleError):
                agents["placement"].place(toy.problem, calls=calls, start=[0, 0])
        else:
            plan = agents["placement"].place(toy.problem, calls=calls, start=[0, 0])
            assert step_s(toy.problem, plan.device_of_group) == pytest.approx(toy.optimal_step_s)
    assert counter.calls == 1 + min(3, calls // 4)  # the start, and equal plans are mended once, too


def test_run_planner_counts_floor_and_search(agents, tmp_path, make_checkpoint):
    make_checkpoint(tmp_path)
    problem = random_problem(2, num_groups=12, num_devices=3)
    floor = run_planner("best", problem)
    ran = run_planner("agent", problem, agent=str(tmp_path), calls=40)
    assert ran.simulator_calls == floor.simulator_calls + 40


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_equal_for_calls_and_seed(agents, name):
    problem = random_problem(3, num_groups=20, num_devices=4, memory_factor=1.5)
    one, two, other = (agents[name].place(problem, seed=seed, calls=120) for seed in (5, 5, 6))
    assert json.dumps(one.to_dict()) == json.dumps(two.to_dict())
    assert one.seed == 5 and other.seed == 6


@pytest.mark.parametrize("toy", TOYS)
@pytest.mark.parametrize("name", ["refinement"])
def test_finds_the_optimum_of_toys(agents, name, toy):
    """From the worst legal start, too."""
    problem, optimum, _ = TOYS[toy]()
    plan = agents[name].place(problem, calls=200)
    assert plan.predicted.step_time_s == pytest.approx(optimum)
    start = np.zeros(problem.num_groups, dtype=np.int32)
    plan = agents[name].place(problem, calls=400, start=start)
    assert plan.predicted.step_time_s == pytest.approx(optimum)


def test_the_start_is_respected(agents):
    """As a plan, as an array, as a list; `best` is not asked."""
    problem = random_problem(4, num_groups=16, num_devices=3)
    devices = np.arange(16) % 3
    given = make_plan(problem, devices, planner="mine")
    answers = []
    for start in (given, devices, devices.tolist(), devices.astype(np.int64)):
        plan = agents["refinement"].place(problem, start=start, calls=30, seed=1)
        answers.append(plan.to_dict())
        assert plan.predicted.floor_step_time_s == step_s(problem, devices)
    assert all(answer == answers[0] for answer in answers)
    assert answers[0]["predicted"]["step_time_s"] < step_s(problem, devices)
    kept = agents["refinement"].place(problem, start=devices, calls=0)
    assert kept.device_of_group.tolist() == devices.tolist()


def test_the_priority_of_the_start_stays_with_its_plan(agents):
    """A priority that makes the start better than its devices alone."""
    problem = random_problem(7, num_groups=14, num_devices=2, shape="branchy")
    devices, rng = np.arange(14) % 2, np.random.default_rng(0)
    plain = step_s(problem, devices)
    tried = [rng.random(problem.num_ops) for _ in range(300)]
    priority = min(tried, key=lambda values: simulate(problem, devices, priority=values).step_time_s)
    start = make_plan(problem, devices, planner="mine", priority=priority)
    assert step_s(problem, start) < plain
    kept = agents["refinement"].place(problem, start=start, calls=1)
    assert kept.priority.tolist() == priority.tolist()
    assert kept.predicted.step_time_s == step_s(problem, start) == step_s(problem, kept)
    better = agents["refinement"].place(problem, start=start, calls=200)
    assert better.priority is None and step_s(problem, better) == better.predicted.step_time_s < step_s(problem, start)


def test_fixed_devices_and_null_times(agents):
    base = random_problem(5, num_groups=12, num_devices=3, null_fraction=0.5)
    fixed = np.full(12, -1, dtype=np.int32)
    for group in (2, 7):
        fixed[group] = np.flatnonzero(base.group_allowed[group])[-1]
    problem = replace(base, group_device=fixed)
    assert not problem.group_allowed.all()
    for name in NAMES:
        plan = agents[name].place(problem, calls=150)
        assert (plan.device_of_group[[2, 7]] == fixed[[2, 7]]).all()
        assert problem.group_allowed[np.arange(12), plan.device_of_group].all()
    illegal = np.array([np.flatnonzero(~row)[0] if not row.all() else 0 for row in problem.group_allowed])
    plan = agents["refinement"].place(problem, start=illegal, calls=20)
    assert problem.group_allowed[np.arange(12), plan.device_of_group].all()


@pytest.mark.parametrize("name", ["refinement"])
def test_missing_links(agents, name):
    """A ring of devices that only hear their predecessor: most plans cannot complete."""
    problem = random_problem(6, num_groups=12, num_devices=4, training=False)
    bandwidth = np.zeros((4, 4))
    for device in range(4):
        bandwidth[device, (device + 1) % 4] = 1e10
    problem = with_links(problem, bandwidth)
    plan = agents[name].place(problem, calls=300)
    assert plan.predicted.step_time_s <= get_planner("best")(problem).predicted.step_time_s
    assert simulate(problem, plan).feasible


def test_a_start_that_cannot_complete(agents, monkeypatch):
    """The search leaves it by itself; what legal moves cannot mend beforehand is left to it."""
    problem = random_problem(0, num_groups=6, num_devices=2, shape="chain", training=False)
    problem = with_links(problem, np.array([[0.0, 1e9], [0.0, 0.0]]))
    start = np.array([1, 0] * 3, dtype=np.int32)
    monkeypatch.setattr("rlplace.placement.search.legalize", lambda problem, devices: devices)
    assert simulate(problem, start).step_time_s is None
    with pytest.raises(InfeasibleError):
        agents["refinement"].place(problem, start=start, calls=0)
    plan = agents["refinement"].place(problem, start=start, calls=200)
    assert plan.predicted.floor_step_time_s is None and plan.predicted.search_calls <= 200
    assert step_s(problem, plan) == plan.predicted.step_time_s


def test_a_start_that_does_not_fit(agents):
    toy = memory_tight_pair()
    plan = agents["refinement"].place(toy.problem, start=[0, 0], calls=10)
    assert plan.predicted.step_time_s == pytest.approx(toy.optimal_step_s)
    assert plan.predicted.floor_step_time_s is None


@pytest.mark.parametrize("name", NAMES)
def test_infeasible_problems_are_errors(agents, name):
    with pytest.raises(InfeasibleError, match="short"):
        agents[name].place(random_problem(1, num_groups=8, num_devices=2, memory_factor=0.5), calls=50)
    with pytest.raises(InfeasibleError, match="short"):
        agents[name].place(replace(memory_tight_pair().problem, resident_bytes=np.array([60, 60])), time_limit_s=60.0)
    with pytest.raises(InfeasibleError):
        agents[name].place(random_problem(1, num_groups=8, num_devices=1, memory_factor=0.5), calls=50)


def test_a_problem_that_a_bound_rules_out_is_not_searched(agents, monkeypatch):
    monkeypatch.setattr(planner, "make_instance", lambda *args, **options: pytest.fail("searched"))
    problem = random_problem(1, num_groups=8, num_devices=2)
    small = tuple(replace(device, memory_bytes=1) for device in problem.devices)
    with pytest.raises(InfeasibleError, match="short"):
        agents["refinement"].place(replace(problem, devices=small), time_limit_s=60.0)


@pytest.mark.parametrize("name", NAMES)
def test_one_device_and_one_group(agents, name):
    plan = agents[name].place(random_problem(1, num_groups=8, num_devices=1), calls=50)
    assert plan.device_of_group.tolist() == [0] * 8 and plan.predicted.search_calls == 0
    lone = build_problem("lone", time_s=[[2.0, 1.0]], tensors=[], memory_bytes=[None, None])
    assert agents[name].place(lone, calls=50).device_of_group.tolist() == [1]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", NAMES)
def test_steps_that_take_no_time(agents, name):
    idle = build_problem("idle", time_s=[[0.0, 0.0]] * 4, tensors=[], memory_bytes=[None, None])
    assert agents[name].place(idle, calls=30).predicted.step_time_s == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_time_limit_ends_it(agents, name):
    """Loose: the machine may be busy; what counts is that nothing goes on without end."""
    problem = random_problem(9, num_groups=40, num_devices=4)
    agents[name].place(problem, calls=3)
    began_s = time.monotonic()
    plan = agents[name].place(problem, time_limit_s=2.0)
    assert time.monotonic() - began_s < 6.5
    assert plan.predicted.search_calls > 0
    assert agents[name].place(problem, time_limit_s=0.0).predicted.feasible
    both = agents[name].place(problem, time_limit_s=20.0, calls=30)
    assert both.predicted.search_calls <= 30


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"calls": True}, "calls must"),
        ({"seed": -1}, "seed must"),
        ({"time_limit_s": float("nan")}, "time_limit_s must"),
        ({"start": [0, 1]}, "start must"),
        ({"start": [0] * 7 + [9]}, "start must"),
        ({"start": [0.5] * 8}, "start must"),
        ({"start": "best"}, "start must"),
    ],
)
def test_wrong_arguments(agents, arguments, message):
    problem = random_problem(1, num_groups=8, num_devices=2)
    with pytest.raises(InputError, match=message):
        agents["refinement"].place(problem, **arguments)
