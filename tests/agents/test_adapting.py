"""Fine-tuning on one problem: never worse than the start, and the checkpoint stays as it was."""

import time

import numpy as np
import pytest
import torch
from toys import TOYS, memory_tight_pair

from rlplace.agents import adapt as adapting
from rlplace.agents.pretrain import ranking_loss
from rlplace.agents.tuning import learn
from rlplace.agents.tuning.learn import graph_part
from rlplace.envs import make_instance
from rlplace.errors import InfeasibleError, InputError
from rlplace.planners import get_planner
from rlplace.planners.common.evaluate import count_calls
from rlplace.problem.generate import random_problem
from rlplace.simulator import simulate


@pytest.mark.parametrize("name, execution", [("refinement", {"microbatches": 3, "schedule": "1f1b"}), ("graph", {})])
def test_never_worse_than_the_floor(agents, name, execution):
    problem = random_problem(3, num_groups=24, num_devices=4, memory_factor=1.8)
    agent = agents[name]
    before = {key: value.clone() for key, value in agent.checkpoint.network.state_dict().items()}
    with count_calls() as counter:
        plan = agent.adapt(problem, time_limit_s=1.0, seed=1, **execution)
    floor = get_planner("best")(problem, **execution).predicted.step_time_s
    line = simulate(problem, plan)
    assert line.feasible and line.step_time_s == plan.predicted.step_time_s <= floor
    assert plan.predicted.floor_step_time_s == floor
    assert 0 < plan.predicted.search_calls < counter.calls  # the floor's are counted, too
    assert all(torch.equal(value, before[key]) for key, value in agent.checkpoint.network.state_dict().items())


@pytest.mark.parametrize("layers", [0, 1])
def test_it_learns_from_moves_around_a_plan(make_network, layers, monkeypatch):
    """Moves that gain score higher afterwards; the calls that this takes are told."""
    instance = make_instance(random_problem(3, num_groups=24, num_devices=4), compute_floor=False)
    plan, network = (np.arange(24) % 4).astype(np.int32), make_network(layers=layers)
    rows, calls, walk = [], [0], learn.walk

    def noted(guide, *args):
        found = walk(guide, *args)
        rows.extend(found)
        calls[0] = guide.simulator.calls
        return found

    monkeypatch.setattr(learn, "walk", noted)

    def loss():
        features, change, group = (torch.from_numpy(np.stack(column)) for column in zip(*rows, strict=True))
        with torch.no_grad():
            embed = graph_part(network, instance)
            of_group = None if embed is None else embed[group.long().clamp(min=0)]
            return float(ranking_loss(network.scores(features.float(), of_group)[0], change))

    before = {key: value.clone() for key, value in network.state_dict().items()}
    assert adapting._learn(network, instance, plan, time.monotonic() + 0.6, 0) == calls[0] > 0
    after = loss()
    network.load_state_dict(before)
    assert after < loss()


def test_a_given_start(agents):
    problem = random_problem(4, num_groups=16, num_devices=3)
    start = np.arange(16) % 3
    plan = agents["refinement"].adapt(problem, time_limit_s=0.3, start=start)
    assert plan.predicted.floor_step_time_s == simulate(problem, start).step_time_s
    assert plan.predicted.step_time_s < plan.predicted.floor_step_time_s


@pytest.mark.parametrize("toy", ["memory_tight_pair", "two_branches", "unlike_pair"])
def test_optima_of_toys(agents, toy):
    problem, optimum, _ = TOYS[toy]()
    plan = agents["refinement"].adapt(problem, time_limit_s=0.5)
    assert plan.predicted.step_time_s == pytest.approx(optimum)


def test_a_start_that_does_not_fit(agents):
    toy = memory_tight_pair()
    plan = agents["refinement"].adapt(toy.problem, time_limit_s=0.3, start=[1, 1])
    assert plan.predicted.step_time_s == pytest.approx(toy.optimal_step_s)
    assert plan.predicted.floor_step_time_s is None


def test_cases_without_a_search(agents):
    one = random_problem(1, num_groups=8, num_devices=1)
    plan = agents["refinement"].adapt(one, time_limit_s=0.2)
    assert plan.device_of_group.tolist() == [0] * 8 and plan.predicted.search_calls == 0
    with pytest.raises(InfeasibleError):
        agents["refinement"].adapt(random_problem(1, num_groups=8, num_devices=2, memory_factor=0.5), time_limit_s=0.3)
    with pytest.raises(InfeasibleError):
        agents["refinement"].adapt(random_problem(1, num_groups=8, num_devices=1, memory_factor=0.5), time_limit_s=0.3)
    with pytest.raises(InputError, match="Refinement-v0"):
        agents["placement"].adapt(one)


def test_a_time_limit_ends_it(agents):
    """Loose: the machine may be busy."""
    problem = random_problem(5, num_groups=60, num_devices=4)
    adapting._warm_up()
    for limit_s in (0.0, 0.4):
        began_s = time.monotonic()
        assert agents["refinement"].adapt(problem, time_limit_s=limit_s).predicted.feasible
        assert time.monotonic() - began_s < limit_s + 6.0
