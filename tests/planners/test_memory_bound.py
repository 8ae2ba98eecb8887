"""The bound that knows memory: a hand-made case, never above a feasible plan, equal to the work bound where memory is free."""

import dataclasses
import itertools

import numpy as np
import pytest

from rlplace.planners.common.bounds import lower_bounds
from rlplace.planners.common.execution_bound import execution_bound, largest
from rlplace.planners.common.memory_bound import least_devices, memory_forced, memory_forced_s
from rlplace.problem import problem_from_dict, problem_to_dict
from rlplace.problem.build import build_problem
from rlplace.problem.generate import random_problem
from rlplace.simulator import simulate


def test_groups_that_do_not_fit_on_the_fast_device_run_on_the_slow_one():
    times = np.array([[1.0, 4.0]] * 4)
    size = np.full(4, 10)
    free = memory_forced(times, size, np.array([np.inf, np.inf]))
    assert free == pytest.approx(3.2)  # a fifth of the work on the slow device
    assert memory_forced(times, size, np.array([20.0, np.inf])) == pytest.approx(8.0)
    assert memory_forced(times, size, np.array([30.0, 10.0])) == pytest.approx(4.0)
    assert memory_forced(times, size, np.array([20.0, 10.0])) == np.inf
    assert memory_forced(times, size, np.array([40.0, -1.0])) == np.inf


def test_groups_that_may_sit_nowhere_else_count_there():
    times = np.array([[1.0, np.inf], [1.0, np.inf], [1.0, 1.0]])
    assert memory_forced(times, np.zeros(3), np.array([np.inf, np.inf])) == pytest.approx(2.0)
    assert memory_forced(np.zeros((2, 2)), np.ones(2), np.array([5.0, 5.0])) == 0.0


@pytest.mark.parametrize("seed", range(12))
def test_no_plan_beats_the_bounds(seed):
    factor = (None, 1.3, 1.7)[seed % 3]
    problem = random_problem(seed, 7, 2 + seed % 2, unlike=True, memory_factor=factor, null_fraction=0.1 * (seed % 2))
    bound, work = memory_forced_s(problem), lower_bounds(problem).work_s
    assert bound >= work * (1 - 1e-9) or bound == pytest.approx(work, rel=0.05)  # two duals of one programme
    steps = []
    for devices in itertools.product(range(problem.num_devices), repeat=problem.num_groups):
        line = simulate(problem, devices)
        if line.feasible:
            steps.append(line.step_time_s)
    assert steps and bound <= min(steps)


def test_memory_raises_the_bound_where_the_fast_device_is_small():
    problem = random_problem(5, 30, 3, unlike=True)
    fast = int(problem.group_time_s.sum(axis=0).argmin())
    limits = [int(problem.resident_bytes.sum() * (0.1 if device == fast else 1.0)) for device in range(3)]
    devices = tuple(
        dataclasses.replace(device, memory_bytes=limit) for device, limit in zip(problem.devices, limits, strict=True)
    )
    tight = dataclasses.replace(problem, devices=devices)
    assert memory_forced_s(tight) > 1.2 * lower_bounds(tight).work_s == 1.2 * lower_bounds(problem).work_s
    assert execution_bound(tight, 1, 1)[1] in ("memory", "critical path")


@pytest.mark.parametrize("microbatches", [1, 2, 5])
def test_bounds_of_pipelines_and_replicas_hold(microbatches):
    problem = random_problem(4, 12, 4)
    rng = np.random.default_rng(microbatches)
    bound, _ = execution_bound(problem, microbatches, 1)
    for _ in range(50):
        devices = rng.integers(0, 4, 12)
        assert simulate(problem, devices, microbatches=microbatches).step_time_s >= bound
    work = execution_bound(problem, microbatches, 2)[0]
    assert work >= bound  # twice the samples


def test_replicas_are_bounded_by_all_their_work():
    from rlplace.plan import make_plan

    problem = random_problem(5, 12, 4)
    plan = make_plan(problem, [0] * 12, planner="x", microbatches=3, replicas=[[0], [1], [2], [3]])
    bound, binding = execution_bound(problem, 3, 4)
    assert bound <= simulate(problem, plan).step_time_s
    assert bound >= 0.9 * problem.group_time_s[:, 0].sum() * 3 * 0.5 and binding == "work"


def test_the_largest_bound_is_named():
    assert largest(1.0, 2.0, 1.5, 2.0) == (2.0, "work")
    assert largest(1.0, 2.0, 1.5, 2.5) == (2.5, "memory")
    assert largest(3.0, 2.0, 3.0, 1.0) == (3.0, "critical path")
    assert least_devices(10.0, np.array([4.0, 8.0, 2.0])) == 2
    assert least_devices(15.0, np.array([4.0, 8.0, 2.0])) is None
    assert least_devices(0.0, np.array([4.0])) == 1


def test_collectives_hold_no_device():
    """Two ops of a collective of 5 s beside two of 6 s: a step of 6 s, though there are 11 s for each device."""
    free = build_problem("beside", time_s=[[5.0, 5.0]] * 2 + [[6.0, 6.0]] * 2, tensors=[], memory_bytes=[None, None])
    data = problem_to_dict(free)
    for op in data["ops"][:2]:
        op["kind"] = "collective"
    data["collectives"] = [{"ops": [0, 1], "channels": []}]
    problem = problem_from_dict(data)
    assert simulate(problem, [0, 1, 0, 1]).step_time_s == 6.0
    bounds = lower_bounds(problem)
    assert (bounds.critical_path_s, bounds.work_s, bounds.largest_group_s) == (6.0, 6.0, 6.0)
    assert memory_forced_s(problem) == pytest.approx(6.0) and execution_bound(problem, 1, 1)[0] == pytest.approx(6.0)
