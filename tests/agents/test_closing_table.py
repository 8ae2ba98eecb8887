"""The table at the end of a training, fine-tuning for many problems, and what PPO is for."""

import numpy as np
import pytest
import torch
from toys import memory_tight_pair

from rlplace.agents.cases import Case
from rlplace.agents.checkpoint import load_checkpoint
from rlplace.agents.construct import construct
from rlplace.agents.network import NetworkConfig, PlacerNetwork
from rlplace.agents.planner import Agent
from rlplace.agents.problems.sources import CaseSource
from rlplace.agents.train import train
from rlplace.comparing.closing import compare_agent, format_rows
from rlplace.envs import make_instance
from rlplace.envs.construction import CONSTRUCTION_FEATURES
from rlplace.errors import InputError
from rlplace.planners.common.evaluate import Execution
from rlplace.problem.generate import random_problem
from rlplace.simulator import simulate


def cases():
    problems = [random_problem(seed, num_groups=12, num_devices=2 + seed) for seed in range(2)]
    tight = random_problem(1, num_groups=8, num_devices=2, memory_factor=0.5)
    return [
        Case("a", "x", problems[0], branchy=True),
        Case("b", "x", problems[1], Execution(3, "1f1b")),
        Case("c", "x", memory_tight_pair().problem),
        Case("none", "x", tight),
    ]


@pytest.mark.parametrize("name", ["refinement", "placement"])
def test_the_table(agents, name):
    rows = compare_agent(agents[name], cases(), planners=("single", "best", "annealing"), calls=24, seeds=2)
    by_name = {row.planner: row for row in rows}
    assert list(by_name) == ["single", "best", "annealing (24 calls)", "agent, one rollout", "agent (24 calls)"]
    best, agent = by_name["best"], by_name["agent (24 calls)"]
    assert (best.ratio, best.branchy, best.feasible, best.cases, best.better, best.worse) == (1.0, 1.0, 3, 4, 0, 0)
    assert agent.ratio <= 1.0 and agent.worse == 0 and agent.feasible == 3
    assert by_name["agent, one rollout"].ratio <= 1.0
    assert by_name["single"].ratio >= 1.0 and by_name["single"].feasible == 2
    text = format_rows(rows, "title")
    assert text.startswith("title") and "3/4" in text and "nan" not in text


def test_finetuning(agents, tmp_path, monkeypatch, tiny):
    problems = [random_problem(seed, num_groups=8, num_devices=2) for seed in range(2)]
    agent = agents["refinement"]
    fast = tiny(**agent.checkpoint.network.config.to_dict())
    monkeypatch.setattr("rlplace.agents.config.TrainConfig.load", lambda environment, **changes: fast)
    tuned = agent.finetune(problems, steps=64, out=tmp_path / "tuned")
    assert isinstance(tuned, Agent) and tuned.checkpoint.network.config == agent.checkpoint.network.config
    training = tuned.checkpoint.training
    assert training["notes"]["start"] == agent.checkpoint.name and training["steps_done"] == 64
    plan = tuned.place(problems[0], calls=20)
    assert plan.predicted.agent == "tuned"
    with pytest.raises(InputError, match="no problem"):
        agent.finetune([], out=tmp_path / "none")


@pytest.mark.slow
def test_ppo_improves_on_the_heuristic_and_that_on_chance(tmp_path, tiny):
    """Without imitation: the trained policy before the heuristic that it starts as, and that before chance."""
    problem = random_problem(21, num_groups=16, num_devices=3, shape="branchy")
    sizes = {"hidden": 32, "second": 16, "layers": 1}
    config = tiny(
        "placement", fit_steps=0, steps=6144, part=2048, part_cases=1, envs=8, rollout=64, batch_size=64, epochs=4,
        learning_rate=1e-3, **sizes,
    )  # fmt: skip
    train(CaseSource("one", [Case("a", "x", problem)].__getitem__, 1), config, tmp_path, report=lambda line: None)
    instance = make_instance(problem)

    def mean_ratio(network):
        rng = np.random.default_rng(0)
        plans = [construct(instance, network, rng, greedy=False) for _ in range(24)]
        return np.mean([simulate(problem, plan).step_time_s for plan in plans]) / instance.reference_step_time_s

    torch.manual_seed(0)
    heuristic = PlacerNetwork(NetworkConfig(**sizes), features=CONSTRUCTION_FEATURES)
    blind = PlacerNetwork(NetworkConfig(**sizes), features=CONSTRUCTION_FEATURES)
    torch.nn.init.zeros_(blind.linear.weight)
    assert mean_ratio(load_checkpoint(tmp_path).network) < mean_ratio(heuristic) < mean_ratio(blind)
