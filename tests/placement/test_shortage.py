"""Infeasibility is proven and explained; no plan is quicker than its bounds."""

import dataclasses
import itertools

import numpy as np
import pytest

from rlplace.errors import InfeasibleError
from rlplace.placement import get_planner
from rlplace.placement.common.bounds import device_time_s, largest, largest_bound, least_devices, lower_bounds, memory_forced
from rlplace.placement.common.floor import REPAIRS, OneShotPlanner
from rlplace.placement.common.shortage import check_possible
from rlplace.problem import BACKWARD, FORWARD, problem_from_dict, problem_to_dict
from rlplace.problem.build import TensorSpec, build_problem
from rlplace.problem.generate import random_problem
from rlplace.simulator import simulate


def changed(problem, change):
    data = problem_to_dict(problem)
    change(data)
    return problem_from_dict(data)


def four_groups(memory_bytes, resident=(100, 100, 100, 100)):
    return build_problem("four", time_s=[[1.0] * len(memory_bytes)] * 4, tensors=[], memory_bytes=list(memory_bytes),
                         resident_bytes=list(resident))  # fmt: skip


@pytest.mark.parametrize("name", ["best", "single", "heft", "annealing"])
def test_total_says_bytes_short_and_devices_needed(name):
    def change(data):
        for device in data["devices"]:
            device["kind"] = "a100-80g"
        for group in data["groups"]:
            group.update(weight_bytes=25, gradient_bytes=25, optimizer_bytes=50)

    problem = changed(four_groups([120, 120]), change)
    with pytest.raises(InfeasibleError) as error:
        get_planner(name)(problem)
    message = str(error.value)
    assert error.value.short_bytes == 160 and error.value.device is None
    assert "groups need 400 bytes resident, 2 devices together offer 240 bytes" in message
    assert "160 bytes" in message and "short" in message
    assert "at least 4 devices of a100-80g (2 given)" in message
    assert "frees 200 bytes of optimizer state, enough" in message
    assert "\n" not in message
    assert "smaller batch" not in message  # resident bytes do not depend on it


def test_unlike_devices_and_reserved_bytes():
    def reserve(data):
        data["devices"][0]["reserved_bytes"] = 20

    problem = changed(four_groups([120, 200]), reserve)
    with pytest.raises(InfeasibleError, match=r"offer 300 bytes.*100 bytes.*at least 1 more device like"):
        check_possible(problem)


def test_largest_group_names_group_and_device():
    problem = four_groups([500, 300], (50, 50, 600, 50))
    with pytest.raises(InfeasibleError, match=r"group .* alone needs 600 bytes") as error:
        check_possible(problem)
    assert error.value.short_bytes == 100
    assert error.value.device == problem.devices[0].name


def test_devices_where_a_group_may_not_sit_do_not_count():
    problem = build_problem("picky", time_s=[[float("nan"), 1.0], [1.0, 1.0]], tensors=[], memory_bytes=[500, 300],
                            resident_bytes=[400, 10])  # fmt: skip
    with pytest.raises(InfeasibleError, match=r"alone needs 400 bytes.* offers 300 bytes: 100 bytes short") as error:
        check_possible(problem)
    assert error.value.device == problem.devices[1].name


def test_a_smaller_batch_is_advised_where_what_is_resident_just_fits():
    problem = build_problem("full", time_s=[[1.0], [1.0]], tensors=[TensorSpec(0, 10, [1])], memory_bytes=[100],
                            resident_bytes=[100, 0])  # fmt: skip
    with pytest.raises(InfeasibleError, match=r"10 bytes short.* a smaller batch"):
        check_possible(problem)


def test_fixed_groups_that_exceed_their_device():
    def fix(data):
        for group in data["groups"][:3]:
            group["device"] = 1

    problem = changed(four_groups([1000, 250]), fix)
    with pytest.raises(InfeasibleError, match=r"3 groups fixed to .* 50 bytes short") as error:
        get_planner("best")(problem)
    assert error.value.device == problem.devices[1].name


def test_group_that_may_sit_nowhere():
    problem = build_problem("nowhere", time_s=[[1.0, float("nan")], [float("nan"), 1.0]], tensors=[], memory_bytes=[None, None],
                            group=[0, 0])  # fmt: skip
    with pytest.raises(InfeasibleError, match="may sit nowhere"):
        get_planner("heft")(problem)

    def fix(data):
        data["ops"][1]["time_s"] = [None, 1.0]
        data["ops"][0]["time_s"] = [1.0, 1.0]
        data["groups"][0]["device"] = 0

    with pytest.raises(InfeasibleError, match=r"fixed to .*, where its op .* cannot run"):
        get_planner("heft")(changed(problem, fix))


def test_activations_count_in_the_proof():
    """Two forward ops whose outputs wait for their backward ops: 80 bytes live at once."""
    problem = build_problem(
        "activations", time_s=[[1.0]] * 4, memory_bytes=[70], group=[0, 1, 1, 0], resident_bytes=[10, 10],
        phase=[FORWARD, FORWARD, BACKWARD, BACKWARD],
        tensors=[TensorSpec(0, 40, [1, 3]), TensorSpec(1, 5, [2]), TensorSpec(2, 5, [3])],
    )  # fmt: skip
    bounds = lower_bounds(problem)
    assert (bounds.resident_bytes, bounds.live_bytes, bounds.capacity_bytes) == (20, 45, 70)
    check_possible(problem)  # 65 of 70 bytes

    def shrink(data):
        data["devices"][0]["memory_bytes"] = 62

    with pytest.raises(InfeasibleError, match=r"45 bytes of activations.* a smaller batch") as error:
        check_possible(changed(problem, shrink))
    assert error.value.short_bytes == 3


def test_unproven_infeasibility_names_the_device():
    """Three groups of 60 on two devices of 100: the sum fits, no assignment does."""
    problem = four_groups([100, 100], (60, 60, 60, 0))
    check_possible(problem)
    with pytest.raises(InfeasibleError, match=r"20 bytes short \(40 bytes are free on other devices\)") as error:
        get_planner("best")(problem)
    assert error.value.short_bytes == 20
    assert error.value.device in {d.name for d in problem.devices}


def test_missing_links():
    """Two devices without a link and two groups that talk, each fixed to its device."""
    problem = build_problem("islands", time_s=[[1.0, 1.0]] * 2, tensors=[TensorSpec(0, 8, [1])], memory_bytes=[None, None])

    def cut(data):
        data["links"]["bandwidth_bytes_per_s"] = [[0, 0], [0, 0]]
        data["groups"][0]["device"], data["groups"][1]["device"] = 0, 1

    with pytest.raises(InfeasibleError, match="missing links"):
        get_planner("best")(changed(problem, cut))


def test_a_planner_without_candidates_does_not_blame_the_time_limit():
    nowhere = float("nan")
    times = [[1.0, nowhere], [nowhere, 1.0], [1.0, nowhere], [nowhere, 1.0]]
    tensors = [TensorSpec(i, 8, [i + 1]) for i in range(3)]
    problem = build_problem("zigzag", time_s=times, tensors=tensors, memory_bytes=[1000, 1000])
    with pytest.raises(InfeasibleError, match="none that it can build respects null times"):
        OneShotPlanner(lambda problem, seed: iter(()), "none", REPAIRS)(problem)
    assert get_planner("best")(problem).predicted.feasible


def memory_forced_s(problem):
    return memory_forced(device_time_s(problem), problem.resident_bytes, problem.memory_limit_bytes)


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
    assert steps and bound <= min(steps) and largest_bound(problem)[0] <= min(steps)


def test_memory_raises_the_bound_where_the_fast_device_is_small():
    problem = random_problem(5, 30, 3, unlike=True)
    fast = int(problem.group_time_s.sum(axis=0).argmin())
    limits = [int(problem.resident_bytes.sum() * (0.1 if device == fast else 1.0)) for device in range(3)]
    devices = tuple(
        dataclasses.replace(device, memory_bytes=limit) for device, limit in zip(problem.devices, limits, strict=True)
    )
    tight = dataclasses.replace(problem, devices=devices)
    assert memory_forced_s(tight) > 1.2 * lower_bounds(tight).work_s == 1.2 * lower_bounds(problem).work_s
    assert largest_bound(tight)[1] in ("memory", "critical path")


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
    assert memory_forced_s(problem) == pytest.approx(6.0) and largest_bound(problem)[0] == pytest.approx(6.0)
