"""Fine-tuning on one problem and on many: never worse than the start; the table at the end of a training."""

import time

import numpy as np
import pytest
import torch
from toys import TOYS, memory_tight_pair

from rlplace.agents import learn
from rlplace.agents import setup as adapting
from rlplace.agents.cases import Case
from rlplace.agents.pretrain import ranking_loss
from rlplace.cli.compare_table import print_summaries
from rlplace.comparing.closing import compare_agent
from rlplace.envs import make_instance
from rlplace.errors import InfeasibleError
from rlplace.planners import get_planner
from rlplace.planners.common.evaluate import count_calls
from rlplace.problem.generate import random_problem
from rlplace.simulator import simulate


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", ["refinement"])
def test_never_worse_than_the_floor(agents, name):
    problem = random_problem(3, num_groups=24, num_devices=4, memory_factor=1.8)
    agent = agents[name]
    before = {key: value.clone() for key, value in agent.checkpoint.network.state_dict().items()}
    with count_calls() as counter:
        plan = agent.adapt(problem, time_limit_s=1.0, seed=1)
    floor = get_planner("best")(problem).predicted.step_time_s
    line = simulate(problem, plan)
    assert line.feasible and line.step_time_s == plan.predicted.step_time_s <= floor
    assert plan.predicted.floor_step_time_s == floor
    assert 0 < plan.predicted.search_calls < counter.calls  # the floor's are counted, too
    assert all(torch.equal(value, before[key]) for key, value in agent.checkpoint.network.state_dict().items())


def test_it_learns_from_moves_around_a_plan(make_network, monkeypatch):
    """Moves that gain score higher afterwards; the calls that this takes are told."""
    instance = make_instance(random_problem(3, num_groups=24, num_devices=4), compute_floor=False)
    plan, network = (np.arange(24) % 4).astype(np.int32), make_network()
    rows, calls, walk = [], [0], learn.walk

    def noted(guide, *args):
        found = walk(guide, *args)
        rows.extend(found)
        calls[0] = guide.simulator.calls
        return found

    adapting._learn(make_network(), instance, plan, time.monotonic() + 0.1, 0)  # compiles what it runs
    monkeypatch.setattr(learn, "walk", noted)

    def loss():
        features, change = (torch.from_numpy(np.stack(column)) for column in zip(*rows, strict=True))
        with torch.no_grad():
            return float(ranking_loss(network.scores(None, features.float()), change))

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


def test_cases_without_a_search(agents):
    one = random_problem(1, num_groups=8, num_devices=1)
    plan = agents["refinement"].adapt(one, time_limit_s=0.2)
    assert plan.device_of_group.tolist() == [0] * 8 and plan.predicted.search_calls == 0
    with pytest.raises(InfeasibleError):
        agents["refinement"].adapt(random_problem(1, num_groups=8, num_devices=2, memory_factor=0.5), time_limit_s=0.3)
    with pytest.raises(InfeasibleError):
        agents["refinement"].adapt(random_problem(1, num_groups=8, num_devices=1, memory_factor=0.5), time_limit_s=0.3)


def cases():
    problems = [random_problem(seed, num_groups=12, num_devices=2 + seed) for seed in range(2)]
    tight = random_problem(1, num_groups=8, num_devices=2, memory_factor=0.5)
    return [
        Case("a", "x", problems[0], branchy=True),
        Case("b", "x", problems[1]),
        Case("c", "x", memory_tight_pair().problem),
        Case("none", "x", tight),
    ]


def test_the_table(tmp_path, make_checkpoint, capsys):
    make_checkpoint(tmp_path / "mine")
    every, branchy = compare_agent(tmp_path / "mine", cases(), planners=("single", "best", "annealing"), calls=24, seeds=2)
    by_name = {line.planner: line for line in every.summaries}
    assert list(by_name) == ["single", "best", "annealing", "agent, one rollout", "agent"]
    best, agent = by_name["best"], by_name["agent"]
    assert (best.ratio, best.feasible, best.problems, best.wins, best.losses) == (1.0, 3, 4, 0, 0)
    assert agent.ratio <= 1.0 and agent.losses == 0 and agent.feasible == 3
    assert by_name["agent, one rollout"].ratio <= 1.0
    assert by_name["single"].ratio >= 1.0 and by_name["single"].feasible == 2
    assert {line.problems for line in branchy.summaries} == {1}
    print_summaries(every, "title")
    text = capsys.readouterr().out
    assert "title, makespan of one step" in text and "3/4" in text and "nan" not in text
