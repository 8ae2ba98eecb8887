"""Annealing is the Python loop compiled; BRKGA decodes, breeds and ends as it should."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from rlplace.errors import InfeasibleError, InputError
from rlplace.planners import get_planner, run_planner
from rlplace.planners.annealing import annealing as annealing_file
from rlplace.planners.annealing.annealing import COOLING, RETURNS, AnnealingSettings, spend
from rlplace.planners.brkga.brkga import BARRED, Decoder, encode, mix
from rlplace.planners.common import evaluate, movekernels
from rlplace.planners.common.evaluate import Evaluator, count_calls
from rlplace.planners.common.repair import legalize
from rlplace.planners.common.search import MoveMaker, Search
from rlplace.problem.build import TensorSpec, build_problem
from rlplace.problem.generate import random_problem

SETTINGS = [
    {},
    {"memory_factor": 1.2},  # the start below does not fit
    {"unlike": True, "null_fraction": 0.3},
    {"hosts": 2, "shape": "branchy"},
]


def anneal_in_python(search, moves, calls, hot, chunk):
    """The rules of `annealing`, step by step; after each chunk it goes back to the best assignment."""
    for used in range(calls):
        if used % chunk == 0 and search.score != search.best_score:
            search.restart()
        move = []
        while not move:
            move = moves.draw(search.assignment)
        if used % chunk % 16 == 0:
            temperature = hot * COOLING ** (used / calls)
        score = search.evaluate(move)
        now, before = score.descent_s, search.score.descent_s
        if now == math.inf:
            continue
        scale = temperature * search.best_score.descent_s
        if now <= before:
            search.accept(move, score)
        elif scale > 0:
            with np.errstate(over="ignore"):
                number = movekernels.draw_uniform.py_func(moves.state)
            if number < math.exp((before - now) / scale):
                search.accept(move, score)
    if search.score != search.best_score:
        search.restart()


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_compiled_loop_is_the_python_loop(setting):
    problem = random_problem(6, 24, 3 if "hosts" not in setting else 4, **setting)
    start = [0] * 24
    found = []
    for compiled in (True, False):
        search = Search(problem, "annealing", start, calls=200, time_limit_s=None)
        if compiled:
            spend(search, 5, AnnealingSettings(0.05))
        else:
            anneal_in_python(search, MoveMaker(problem, 5), 200, 0.05, 200 // RETURNS)
        assert search.used() == 200
        again = Evaluator(problem)
        assert again.score(search.assignment) == search.score
        assert again.score(search.best_devices) == search.best_score
        found.append((search.assignment.tolist(), search.best_devices.tolist(), search.score, search.best_score))
    assert found[0] == found[1]
    assert found[0][1] != start


@pytest.mark.parametrize("setting", SETTINGS)
def test_moves_change_the_assignment_and_stay_legal(setting):
    problem = random_problem(7, 30, 4, **setting)
    devices = legalize(problem, np.random.default_rng(0).integers(0, 4, 30))
    moves = MoveMaker(problem, 1)
    lengths = set()
    for _ in range(1500):
        move = moves.draw(devices)
        assert len({group for group, _ in move}) == len(move)
        assert all(devices[group] != device and problem.group_allowed[group, device] for group, device in move)
        lengths.add(len(move))
        for group, device in move:
            devices[group] = device
    assert {1, 2, 3, 4, 5} <= lengths


def test_moves_of_small_and_fixed_problems():
    alone = MoveMaker(random_problem(0, 1, 3), 0)
    devices = np.zeros(1, dtype=np.int32)
    assert all(move[0][0] == 0 and len(move) == 1 for _ in range(100) if (move := alone.draw(devices)))
    nowhere = MoveMaker(random_problem(0, 5, 1), 0)
    assert not nowhere.movable
    assert nowhere.draw(np.zeros(5, dtype=np.int32)) == []


def test_random_numbers_are_those_of_splitmix64():
    """First outputs for state 1234567, from the test vectors that come with the algorithm."""
    state = np.array([1234567], dtype=np.uint64)
    with np.errstate(over="ignore"):
        numbers = [movekernels.draw_uniform.py_func(state) for _ in range(3)]
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert numbers == [(value >> 11) * 2.0**-53 for value in expected]


def test_annealing_without_anything_to_move_ends():
    problem = random_problem(0, 5, 1)
    run = run_planner("annealing", problem, calls=50, start=[0] * 5)
    assert run.simulator_calls == 1


def test_with_a_time_limit_the_temperature_follows_the_calls_that_the_rate_promises(monkeypatch):
    promised = []
    monkeypatch.setattr(annealing_file, "default_temperature", lambda calls, groups: promised.append(calls) or 0.01)
    problem = random_problem(3, 40, 3)
    with count_calls() as counter:  # a clock that a simulation moves by a millisecond
        for module in (annealing_file, evaluate):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 1e-3 * counter.calls))
        for calls, expected in ((None, 2_000), (500, 500), (9_000, 2_000)):
            search = Search(problem, "annealing", [0] * 40, calls=calls, time_limit_s=2.0)
            spend(search, 0, AnnealingSettings())
            assert promised[0] == 0.0
            assert promised[1:] == pytest.approx([expected] * (len(promised) - 1), rel=2e-3)
            assert search.used() == pytest.approx(expected, abs=11)
            promised.clear()


def test_the_start_temperature_grows_with_the_calls_up_to_a_limit():
    temperatures = [annealing_file.default_temperature(calls, 50) for calls in (0, 64, 256, 1024, 4096, 16_384, 10**6)]
    assert temperatures == sorted(temperatures)
    assert temperatures[0] == 0.0 < temperatures[1] and temperatures[-2] == temperatures[-1]
    assert annealing_file.default_temperature(2048, 100) == temperatures[3] < annealing_file.default_temperature(2048, 50)


def test_returns_keep_a_hot_search_near_its_best_assignment():
    problem = random_problem(6, 24, 3)
    at_end = []
    for returns in (0, 10):
        search = Search(problem, "annealing", [0] * 24, calls=1000, time_limit_s=None)
        spend(search, 5, AnnealingSettings(10.0, 1.0, returns))
        at_end.append(search.score.step_time_s / search.best_score.step_time_s)
    assert at_end[0] > 1.05
    assert at_end[1] == 1.0


@pytest.mark.parametrize("setting", SETTINGS)
def test_many_scores_are_single_scores(setting):
    problem = random_problem(9, 20, 4, **setting)
    plans = np.random.default_rng(2).integers(0, 4, (30, 20)).astype(np.int32)
    many, single = Evaluator(problem), Evaluator(problem)
    assert many.scores(plans) == [single.score(plan) for plan in plans]
    assert many.calls == single.calls == 30


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
