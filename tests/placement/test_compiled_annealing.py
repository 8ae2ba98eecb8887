"""Annealing is the Python loop compiled."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from rlplace import budget
from rlplace.placement import annealing as annealing_file
from rlplace.placement import run_planner
from rlplace.placement.annealing import COOLING, RETURNS, AnnealingSettings, annealing
from rlplace.placement.common import movekernels
from rlplace.placement.common.evaluate import PlanEvaluator, count_calls
from rlplace.placement.common.repair import legalize
from rlplace.placement.search import MoveMaker, PlacementSearch
from rlplace.problem.generate import random_problem

SETTINGS = [
    {},
    {"memory_factor": 1.2},  # the start below does not fit
    {"unlike": True, "null_fraction": 0.3},
    {"hosts": 2, "shape": "branchy"},
]


def anneal_in_python(search, moves, calls, hot, chunk):
    """Follows the rules of `annealing` step by step; after each chunk it returns to the best assignment."""
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
        search = PlacementSearch(problem, "annealing", start, calls=200, time_limit_s=None)
        if compiled:
            annealing.spend(search, 5, AnnealingSettings(0.05))
        else:
            anneal_in_python(search, MoveMaker(problem, 5), 200, 0.05, 200 // RETURNS)
        assert search.budget.used == 200
        again = PlanEvaluator(problem)
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
        for module in (annealing_file, budget):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 1e-3 * counter.calls))
        for calls, expected in ((None, 2_000), (500, 500), (9_000, 2_000)):
            search = PlacementSearch(problem, "annealing", [0] * 40, calls=calls, time_limit_s=2.0)
            annealing.spend(search, 0, AnnealingSettings())
            assert promised[0] == 0.0
            assert promised[1:] == pytest.approx([expected] * (len(promised) - 1), rel=2e-3)
            assert search.budget.used == pytest.approx(expected, abs=11)
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
        search = PlacementSearch(problem, "annealing", [0] * 24, calls=1000, time_limit_s=None)
        annealing.spend(search, 5, AnnealingSettings(10.0, 1.0, returns))
        at_end.append(search.score.step_time_s / search.best_score.step_time_s)
    assert at_end[0] > 1.05
    assert at_end[1] == 1.0
