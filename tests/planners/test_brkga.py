"""The genetic algorithm: keys that decode to plans, the decoder's rules, budgets, never worse than the floor."""

import numpy as np
import pytest
import toys

from rlplace.errors import InfeasibleError, InputError
from rlplace.planners import get_planner, run_planner
from rlplace.planners.brkga.brkga import BARRED, Decoder, encode, mix
from rlplace.planners.common.repair import legalize
from rlplace.problem.build import TensorSpec, build_problem
from rlplace.problem.generate import random_problem


@pytest.mark.parametrize(
    "setting",
    [
        {},
        {"memory_factor": 1.1},
        {"unlike": True, "null_fraction": 0.4},
        {"shared_parameters": 3},
        {"training": False, "hosts": 2},
    ],
)
def test_encoded_plans_decode_to_themselves(setting):
    problem = random_problem(1, 40, 4, **setting)
    rng = np.random.default_rng(0)
    plans = np.stack([legalize(problem, rng.integers(0, 4, 40)) for _ in range(20)])
    keys = np.stack([encode(plan, 4) for plan in plans])
    np.testing.assert_array_equal(Decoder(problem, 4.0)(keys), plans)


@pytest.mark.parametrize("bias", [0.0, 4.0])
def test_random_keys_decode_to_legal_plans_that_avoid_barred_devices(bias):
    problem = random_problem(2, 40, 4, null_fraction=0.4)
    keys = np.random.default_rng(1).random((50, 40, 5))
    plans = Decoder(problem, bias)(keys)
    groups = np.arange(40)
    assert problem.group_allowed[groups, plans].all()
    affinity = np.where(problem.group_allowed, keys[:, :, :4], -1.0)
    barred = keys[np.arange(50)[:, None], groups, plans] < BARRED
    assert not (barred & (affinity.max(axis=2) >= BARRED)).any()
    assert len(np.unique(plans, axis=0)) == 50


def test_a_strong_bias_follows_affinity_and_none_finishes_earliest():
    """Two independent ops of 1 s: by finish time they part; a bias of 10 op times keeps both on the device they like."""
    problem = build_problem("pair", time_s=[[1.0, 1.0]] * 2, tensors=[], memory_bytes=[None, None])
    keys = np.array([[[0.9, 0.2, 0.5], [0.8, 0.2, 0.4]]])
    assert sorted(Decoder(problem, 0.0)(keys)[0].tolist()) == [0, 1]
    assert Decoder(problem, 10.0)(keys)[0].tolist() == [0, 0]


def test_priorities_decide_who_comes_first():
    """Device 1 is faster; whoever is scheduled first gets it."""
    problem = build_problem("race", time_s=[[2.0, 1.5]] * 2, tensors=[], memory_bytes=[None, None])
    first = np.array([[[0.5, 0.5, 0.9], [0.5, 0.5, 0.1]], [[0.5, 0.5, 0.1], [0.5, 0.5, 0.9]]])
    assert Decoder(problem, 0.0)(first).tolist() == [[1, 0], [0, 1]]


def test_devices_without_room_come_last():
    problem = build_problem(
        "room", time_s=[[1.0, 5.0]] * 3, tensors=[TensorSpec(0, 0, [1]), TensorSpec(1, 0, [2])], memory_bytes=[20, None],
        resident_bytes=[10, 10, 10],
    )  # fmt: skip
    assert Decoder(problem, 0.0)(np.full((1, 3, 3), 0.5)).tolist() == [[0, 0, 1]]


def test_children_have_most_keys_of_the_elite_parent():
    rng = np.random.default_rng(0)
    elite, other = np.ones((100, 20, 3)), np.zeros((100, 20, 3))
    assert mix(elite, other, 0.9, rng).mean() == pytest.approx(0.9, abs=0.02)
    assert mix(elite, other, 1.0, rng).mean() == 1.0


@pytest.mark.parametrize("seed", range(4))
def test_never_worse_than_the_floor_and_within_its_calls(seed):
    setting = [{"memory_factor": 1.2}, {"unlike": True}, {"hosts": 2}, {"shape": "chain"}][seed]
    problem = random_problem(20 + seed, 30, 4, **setting)
    try:
        floor = run_planner("best", problem)
    except InfeasibleError:
        pytest.skip("the generator made a problem without a feasible floor")
    for calls in (0, 1, 37, 300):
        run = run_planner("brkga", problem, seed=seed, calls=calls)
        assert run.plan.predicted.step_time_s <= floor.plan.predicted.step_time_s
        assert run.simulator_calls == floor.simulator_calls + calls
        if calls == 0:
            np.testing.assert_array_equal(run.plan.device_of_group, floor.plan.device_of_group)


@pytest.mark.parametrize("toy", [toys.memory_tight_chain, toys.fork_join, toys.memory_tight_pair, toys.two_branches])
def test_it_reaches_known_optima_from_a_poor_start(toy):
    problem, optimum, _ = toy()
    plan = get_planner("brkga")(problem, calls=300, start=[0] * problem.num_groups)
    assert plan.predicted.step_time_s == pytest.approx(optimum)


def test_it_ends_when_there_is_nothing_left_to_find():
    """Three groups on two devices have 8 assignments: the rest of the budget stays unspent."""
    problem = random_problem(0, 3, 2)
    run = run_planner("brkga", problem, calls=4000, start=[0, 0, 0])
    assert run.simulator_calls <= 8
    assert run_planner("brkga", random_problem(0, 3, 1), calls=4000).plan.device_of_group.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"population": 2}, "population"),
        ({"population": 10.5}, "population"),
        ({"elite": 0.0}, "elite"),
        ({"elite": 0.6, "mutants": 0.5}, "mutants"),
        ({"rho": 0.3}, "rho"),
        ({"bias": -1.0}, "bias"),
    ],
)
def test_bad_options_are_refused(options, said):
    with pytest.raises(InputError, match=said):
        get_planner("brkga")(random_problem(0, 4, 2), **options)
