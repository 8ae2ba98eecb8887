"""Assisted simulation: the ordinary one when nothing moves, consistent when ops do, and what it recovers when costs drift."""

import dataclasses

import numpy as np
import pytest

from benchmarks.papers.compiler.assist import simulate_assisted
from benchmarks.papers.compiler.movable import movable, move_costs, prepare_assistants
from rlplace.placement import get_planner
from rlplace.problem.build import TensorSpec, build_problem
from rlplace.problem.generate import random_problem
from rlplace.simulator import default_priority, simulate


def drifted(problem, seed, spread=0.3):
    """Returns actual times: every op by up to `spread` more or less than planned."""
    factor = np.random.default_rng(seed).uniform(1 - spread, 1 + spread, problem.num_ops)
    return problem.time_s * factor[:, None]


def assert_same(found, expected):
    for field in dataclasses.fields(expected):
        np.testing.assert_array_equal(getattr(found, field.name), getattr(expected, field.name), err_msg=field.name)


@pytest.mark.parametrize("seed", range(8))
def test_without_movable_groups_it_is_the_ordinary_simulator(seed):
    problem = random_problem(seed, 40, 4, shape=("layered", "branchy")[seed % 2], shared_parameters=2, hosts=1 + seed % 2)
    devices = np.random.default_rng(seed).integers(0, 4, 40)
    none = np.zeros(40, dtype=bool)
    found = simulate_assisted(problem, devices, movable=none)
    assert_same(found.timeline, simulate(problem, devices))
    assert found.steals == () and found.weight_transfers == ()
    actual = drifted(problem, seed)
    found = simulate_assisted(problem, devices, movable=none, actual_time_s=actual)
    really = dataclasses.replace(problem, time_s=actual)
    assert_same(found.timeline, simulate(really, devices, priority=default_priority(problem)))


@pytest.mark.slow
def test_assistants_recover_half_of_what_planning_anew_would():
    """The stale plan against the better of itself and a plan made for the actual costs, both at the actual costs."""
    compiler = get_planner("compiler")
    for shape in ("layered", "branchy"):
        problem = random_problem(1, 120, 4, shape=shape, width=8)
        plan = compiler(problem)
        options = prepare_assistants(problem, plan.device_of_group).options
        gap = recovered = 0.0
        for seed in range(4):
            actual = problem.time_s * np.random.default_rng(seed).uniform(0.7, 1.3, problem.num_ops)[:, None]
            really = dataclasses.replace(problem, time_s=actual)
            stale = simulate(really, plan.device_of_group, priority=default_priority(problem)).step_time_s
            line = simulate_assisted(problem, plan, actual_time_s=actual, **options).timeline
            assert line.feasible
            gap += stale - min(stale, compiler(really).predicted.step_time_s)
            recovered += stale - line.step_time_s
        assert recovered >= 0.5 * gap > 0.0


def test_assistants_do_not_slow_what_goes_as_planned():
    problems = [
        random_problem(
            seed, 60, 2 + seed % 3, shape=("layered", "branchy")[seed % 2], width=8, unlike=seed % 3 == 0,
            training=seed % 4 != 0, comm_ratio=(0.3, 2.0)[seed % 5 == 0],
        )
        for seed in range(8)
    ]  # fmt: skip
    rehearsals = []
    for index, problem in enumerate(problems):
        plan = get_planner(("metis", "compiler")[index % 2])(problem)
        for move_weights in (False, True):
            help_ = prepare_assistants(problem, plan.device_of_group, move_weights=move_weights)
            found = simulate_assisted(problem, plan, **help_.options)
            assert found.step_time_s == help_.rehearsed_s <= plan.predicted.step_time_s
            rehearsals.append(help_.only_late)
            if help_.only_late:
                assert found.steals == ()
    assert not all(rehearsals)


@pytest.mark.parametrize("seed", range(12))
def test_nothing_is_late_in_a_step_that_goes_as_planned(seed):
    """Whatever the plan: assistants that take only what is late leave the planned step alone."""
    problem = random_problem(seed, 50, 2 + seed % 3, shape=("layered", "branchy")[seed % 2], hosts=1 + seed % 2)
    devices = np.random.default_rng(seed).integers(0, problem.num_devices, 50)
    for margin_s in (None, 0.0):
        found = simulate_assisted(problem, devices, movable=np.ones(50, dtype=bool), move_weights=True, margin_s=margin_s)
        assert found.steals == () and found.step_time_s == simulate(problem, devices).step_time_s


@pytest.mark.parametrize("seed", range(6))
def test_move_costs_are_differences_of_cuts(seed):
    problem = random_problem(
        seed, 14, 3, shape=("layered", "branchy")[seed % 2], shared_parameters=seed % 3, hosts=1 + 2 * (seed % 2)
    )
    devices = np.random.default_rng(seed).integers(0, 3, 14).astype(np.int32)

    def cut(where):
        total = 0.0
        for tensor in range(problem.num_tensors):
            producer, owner = problem.tensor_producer[tensor], problem.tensor_owner[tensor]
            source = int(where[problem.op_group[producer] if producer >= 0 else owner])
            readers = problem.consumers[problem.consumer_ptr[tensor] : problem.consumer_ptr[tensor + 1]]
            for to in {int(where[problem.op_group[reader]]) for reader in readers} - {source}:
                total += problem.links.transfer_s(source, to, int(problem.tensor_bytes[tensor]))
        return total

    costs, before = move_costs(problem, devices), cut(devices)
    for group in range(14):
        for device in range(3):
            where = devices.copy()
            where[group] = device
            assert costs[group, device] == pytest.approx(cut(where) - before, abs=1e-12)


def test_tags_by_hand():
    """A chain on one device: its ends cost one transfer to move, the middle two; parameters and fixed groups stay."""
    problem = build_problem(
        "chain",
        time_s=[[10.0, 10.0]] * 5,
        tensors=[TensorSpec(i, 1, [i + 1]) for i in range(4)],
        memory_bytes=[None, None],
        resident_bytes=[0, 0, 0, 0, 3],
        group_device=[-1, -1, 0, -1, -1],
    )
    tags = [movable(problem, [0] * 5, delta=delta).tolist() for delta in (0.01, 0.03, 0.05)]
    assert tags[0] == [False] * 5
    assert tags[1] == [True, False, False, False, False]
    assert tags[2] == [True, True, False, True, False]
    weights = movable(problem, [0] * 5, delta=0.15, move_weights=True)
    assert weights.tolist() == [True, True, False, True, True]  # the last: one transfer and 3 bytes each way, 7 of 50 seconds
