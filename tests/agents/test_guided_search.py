"""The search that the network guides: what it says about plans is true, and chunks make no difference to its budget."""

import ctypes
import math
import time

import numpy as np
import pytest
from numba import njit

from rlplace.agents import search as guided
from rlplace.agents.network import PlacerNetwork
from rlplace.agents.search import GuidedSearch
from rlplace.envs import make_instance
from rlplace.envs.guide.features import FEATURES
from rlplace.placement.common.evaluate import Score
from rlplace.problem.generate import random_problem
from rlplace.simulator import Simulator


def instance_of(seed, *, groups=16, devices=3, **options):
    problem = random_problem(seed, num_groups=groups, num_devices=devices, **options)
    return make_instance(problem, compute_floor=False)


def start_of(instance):
    return (np.arange(instance.problem.num_groups) % instance.problem.num_devices).astype(np.int32)


@pytest.mark.parametrize("number", range(4))
def test_the_best_plan_has_the_best_score(make_network, number):
    """Against the simulator; also where nothing fits at first."""
    instance = instance_of(number, unlike=number % 2 == 1, memory_factor=(None, 1.6, 2.0, 1.2)[number])
    search = GuidedSearch(instance, make_network(), start_of(instance), seed=number)
    simulator = Simulator(instance.problem)
    first = Score(*simulator.evaluate(start_of(instance)))
    assert search.best.step_time_s == math.inf and search.calls == 0
    search.run(calls=1)
    assert search.best == first and search.calls == 1
    last = first
    for calls in (1, 7, 40, 100):
        search.run(calls=calls)
        assert search.best == Score(*simulator.evaluate(search.best_plan))
        assert search.best.objective_s <= last.objective_s
        last = search.best
    assert search.calls == 149 and last.objective_s < first.objective_s
    assert instance.allowed[np.arange(16), search.best_plan].all()


def test_equal_for_a_seed(make_network):
    instance = instance_of(3)
    paths = []
    for seed in (4, 4, 5):
        search = GuidedSearch(instance, make_network(), start_of(instance), seed=seed)
        search.run(calls=60)
        paths.append((search.best_plan.tolist(), search.best, search._state.plan.tolist(), search._state.counts.tolist()))
    assert paths[0] == paths[1] != paths[2]


def test_the_network_guides_it():
    """With the heuristic's signs reversed the same budget ends worse."""
    found = {1.0: [], -1.0: []}
    for sign, results in found.items():
        network = PlacerNetwork(features=FEATURES)
        network.linear.weight.data *= sign
        for seed in range(6):
            instance = instance_of(seed, groups=40, devices=4, shape="branchy")
            search = GuidedSearch(instance, network, start_of(instance), seed=0)
            search.run(calls=60)
            results.append(math.log(search.best.step_time_s))
    assert np.mean(found[1.0]) < np.mean(found[-1.0]) - 0.02


@pytest.mark.parametrize("groups, devices", [(2, 2), (5, 2), (4, 3)])
def test_it_ends_where_nothing_is_left_to_try(make_network, groups, devices):
    """With the best of all plans."""
    instance = instance_of(0, groups=groups, devices=devices, training=False, memory_factor=1.6)
    search = GuidedSearch(instance, make_network(), np.zeros(groups, dtype=np.int32), seed=0)
    search.run(calls=100_000)
    assert search.calls < 5_000
    everything = np.stack(np.meshgrid(*[np.arange(devices)] * groups), axis=-1).reshape(-1, groups).astype(np.int32)
    step, overflow = Simulator(instance.problem).evaluate_many(everything)
    assert search.best.objective_s == min(Score(*pair).objective_s for pair in zip(step, overflow, strict=True))
    search.run(calls=100_000, deadline_s=time.monotonic() + 600.0)
    assert search.calls < 100_000  # how many it takes goes with the clock, that it ends does not


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_hostile_weights_do_no_harm(make_network):
    """Whatever scores come out, plans are simulated: infinities and values that are no numbers, too."""
    instance = instance_of(1, memory_factor=1.6)
    for value in (3e38, float("nan")):
        network = make_network()
        network.residual.weight.data.fill_(value)
        search = GuidedSearch(instance, network, start_of(instance), seed=0)
        search.run(calls=30)
        assert search.calls <= 30
        assert search.best == Score(*Simulator(instance.problem).evaluate(search.best_plan))


@pytest.mark.long
@pytest.mark.slow
def test_calls_are_counted_where_they_are_made(make_network, monkeypatch):
    """Compiles the loop anew around a simulator that tells every call to Python."""
    made = [0]

    @ctypes.CFUNCTYPE(None)
    def told():
        made[0] += 1

    simulate_plans = guided.simulate_plans

    @njit
    def counted(graph, work, ranks, position, rows, results):
        told()
        return simulate_plans(graph, work, ranks, position, rows, results)

    monkeypatch.setattr(guided, "simulate_plans", counted)
    monkeypatch.setattr(guided, "draw_ranked", njit(guided.draw_ranked.py_func))
    monkeypatch.setattr(guided, "attempt", njit(guided.attempt.py_func))
    for seed, calls in ((0, 1), (1, 2), (2, 30), (3, 300)):
        instance = instance_of(seed, memory_factor=(None, 1.3)[seed % 2])
        search = GuidedSearch(instance, make_network(), start_of(instance), seed=seed)
        made[0] = 0
        search.run(calls=calls)
        assert made[0] == search.calls == calls
