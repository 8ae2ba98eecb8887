"""The agent: never worse than the floor, size-free weights, checkpoints, training that can be cut and resumed."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rlplace.agents.bank import GraphBank, graph_tensors
from rlplace.agents.checkpoint import load_checkpoint, save_checkpoint
from rlplace.agents.evaluate import compare_agent, format_rows
from rlplace.agents.network import NetworkConfig, PlacerNetwork
from rlplace.agents.planner import Agent, load_agent
from rlplace.agents.train import TrainConfig, train
from rlplace.envs import make_instance
from rlplace.envs.features import NUM_FEATURES
from rlplace.envs.observation import NUM_CONTEXT
from rlplace.errors import InfeasibleError, InputError
from rlplace.planners import get_planner
from rlplace.problem.toys import memory_tight_pair, random_problem, two_branches
from rlplace.simulator import simulate


def write_checkpoint(folder, environment="rlplace/Refinement-v0", seed=0):
    torch.manual_seed(seed)
    network = PlacerNetwork(NetworkConfig(hidden=16, layers=1))
    save_checkpoint(folder, network, environment=environment, training={"steps_done": 0}, card="# test\n")
    return network


@pytest.fixture(scope="module")
def small_agent(tmp_path_factory):
    folder = tmp_path_factory.mktemp("agent")
    write_checkpoint(folder)
    return load_agent(folder)


def scores(network, instance, candidates, groups, context):
    with torch.no_grad():
        return network(
            [network.encode(graph_tensors(instance))],
            torch.zeros(1, dtype=torch.long),
            candidates,
            groups,
            context,
        )[0]


def test_untrained_network_is_the_heuristic():
    instance = make_instance(random_problem(0, num_groups=10, num_devices=3))
    torch.manual_seed(1)
    network = PlacerNetwork()
    table = torch.randn(1, 5, NUM_FEATURES)
    groups = torch.tensor([[0, 3, 5, 9, -1]])
    logits = scores(network, instance, table, groups, torch.zeros(1, NUM_CONTEXT))
    assert torch.allclose(logits[:, :4], network.linear(table).squeeze(2)[:, :4])
    assert logits[0, 4] == 0.0


def test_scores_are_equivariant_under_candidate_order():
    instance = make_instance(random_problem(0, num_groups=10, num_devices=3))
    torch.manual_seed(2)
    network = PlacerNetwork(NetworkConfig(hidden=16, layers=2))
    torch.nn.init.normal_(network.residual.weight)
    table, groups = torch.randn(1, 6, NUM_FEATURES), torch.tensor([[0, 1, 2, 3, 4, 5]])
    context = torch.randn(1, NUM_CONTEXT)
    order = torch.tensor([3, 1, 5, 0, 2, 4])
    one = scores(network, instance, table, groups, context)[:, order]
    two = scores(network, instance, table[:, order], groups[:, order], context)
    assert torch.allclose(one, two, atol=1e-5)


def test_batched_graphs_equal_single_ones():
    instances = [make_instance(random_problem(s, num_groups=6 + 3 * s, num_devices=2)) for s in range(3)]
    torch.manual_seed(3)
    network = PlacerNetwork(NetworkConfig(hidden=16, layers=2))
    torch.nn.init.normal_(network.residual.weight)
    bank = GraphBank(instances)
    table, groups, context = torch.randn(3, 4, NUM_FEATURES), torch.randint(0, 6, (3, 4)), torch.randn(3, NUM_CONTEXT)
    with torch.no_grad():
        embeddings = [network.encode(bank.get(i, torch.device("cpu"))) for i in range(3)]
        together = network(embeddings, torch.arange(3), table, groups, context)[0]
        alone = [
            network([embeddings[i]], torch.zeros(1, dtype=torch.long), table[i : i + 1], groups[i : i + 1], context[i : i + 1])[
                0
            ]
            for i in range(3)
        ]
    assert torch.allclose(together, torch.cat(alone), atol=1e-5)


@pytest.mark.parametrize("environment", ["rlplace/Refinement-v0", "rlplace/Placement-v0"])
def test_never_worse_than_best_and_always_feasible(tmp_path, environment):
    write_checkpoint(tmp_path, environment)
    agent = load_agent(tmp_path)
    for seed in range(6):
        factor = (None, 1.6, 1.3)[seed % 3]
        problem = random_problem(seed, num_groups=20, num_devices=3, memory_factor=factor, unlike=seed % 2 == 1)
        floor = get_planner("best")(problem)
        plan = agent.place(problem, seed=seed, calls=80, samples=2)
        assert plan.predicted["step_time_s"] <= floor.predicted["step_time_s"]
        line = simulate(problem, plan)
        assert line.feasible and line.step_time_s == plan.predicted["step_time_s"]
        assert plan.predicted["search_calls"] <= 80 + 2


def test_deterministic_for_a_number_of_calls(small_agent):
    problem = random_problem(3, num_groups=24, num_devices=4)
    one, two = (small_agent.place(problem, seed=5, calls=120) for _ in range(2))
    assert json.dumps(one.to_dict()) == json.dumps(two.to_dict())


def test_finds_the_optimum_of_toys(small_agent):
    for toy in (two_branches(), memory_tight_pair()):
        plan = small_agent.place(toy.problem, calls=300)
        assert plan.predicted["step_time_s"] == pytest.approx(toy.optimal_step_s)


def test_infeasible_problem_is_an_error(small_agent):
    problem = random_problem(1, num_groups=8, num_devices=2, memory_factor=0.5)
    with pytest.raises(InfeasibleError, match="short"):
        small_agent.place(problem, calls=50)


def test_a_problem_that_a_bound_rules_out_is_not_searched(small_agent, monkeypatch):
    """No time is spent on what no plan can solve."""
    monkeypatch.setattr("rlplace.agents.planner.make_instance", lambda *args, **options: pytest.fail("searched"))
    problem = random_problem(1, num_groups=8, num_devices=2)
    small = tuple(dataclasses.replace(device, memory_bytes=1) for device in problem.devices)
    with pytest.raises(InfeasibleError, match="short"):
        small_agent.place(dataclasses.replace(problem, devices=small), time_limit_s=60.0)


def test_one_device(small_agent):
    problem = random_problem(1, num_groups=8, num_devices=1)
    plan = small_agent.place(problem, calls=50)
    assert plan.device_of_group.tolist() == [0] * 8


def test_checkpoint_round_trip(tmp_path):
    network = write_checkpoint(tmp_path)
    loaded = load_checkpoint(tmp_path)
    for key, value in network.state_dict().items():
        assert torch.equal(value, loaded.network.state_dict()[key])


def test_checkpoints_that_lie_are_refused(tmp_path):
    write_checkpoint(tmp_path)
    weights = load_file(tmp_path / "policy.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())

    save_file({**weights, "residual.bias": torch.full((1,), float("nan"))}, tmp_path / "policy.safetensors")
    with pytest.raises(InputError, match="not finite"):
        load_checkpoint(tmp_path)
    save_file({**weights, "residual.bias": torch.zeros(2)}, tmp_path / "policy.safetensors")
    with pytest.raises(InputError, match="has shape"):
        load_checkpoint(tmp_path)
    save_file({k: v for k, v in weights.items() if k != "residual.bias"}, tmp_path / "policy.safetensors")
    with pytest.raises(InputError, match="is missing"):
        load_checkpoint(tmp_path)
    (tmp_path / "policy.safetensors").write_bytes(b"\x80\x04not tensors")
    with pytest.raises(InputError, match="not a safetensors file"):
        load_checkpoint(tmp_path)
    for changed, message in (
        ({"network": {"hidden": 10**9, "layers": 1}}, "outside"),
        ({"version": 2}, "upgrade"),
        ({"features": ["other"]}, "other features"),
        ({"environment": "CartPole-v1"}, "not one of this version"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, **changed}))
        with pytest.raises(InputError, match=message):
            load_checkpoint(tmp_path)
    with pytest.raises(InputError, match="unknown agent"):
        load_checkpoint("no-such-agent")


@pytest.mark.parametrize("environment", ["refinement", "placement"])
def test_training_can_be_cut_and_resumed(tmp_path, environment):
    problems = [random_problem(s, num_groups=8, num_devices=2) for s in range(2)]
    small = {
        "envs": 2,
        "rollout": 32,
        "batch_size": 32,
        "epochs": 1,
        "warm_states": 60,
        "warm_epochs": 1,
        "hidden": 16,
        "layers": 1,
    }
    lines = []
    done = train(problems, TrainConfig.load(environment, steps=128, **small), tmp_path, report=lines.append)
    assert done == 128
    first = load_checkpoint(tmp_path)
    assert first.training["steps_done"] == 128 and "warm start" in "\n".join(lines)
    done = train(problems, TrainConfig.load(environment, steps=256, **small), tmp_path, resume=True, report=lines.append)
    assert done == 256
    second = load_checkpoint(tmp_path)
    assert second.training["steps_done"] == 256
    changed = [k for k, v in first.network.state_dict().items() if not torch.equal(v, second.network.state_dict()[k])]
    assert changed
    assert list((tmp_path / "tensorboard").glob("events.out.tfevents*"))
    assert "steps" in (tmp_path / "config.json").read_text() and "# Agent" in (tmp_path / "card.md").read_text()


def test_interrupt_saves(tmp_path, monkeypatch):
    from sb3_contrib import MaskablePPO

    def interrupted(self, *args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(MaskablePPO, "learn", interrupted)
    problems = [random_problem(0, num_groups=8, num_devices=2)]
    config = TrainConfig.load("refinement", steps=64, envs=1, rollout=32, batch_size=32, warm_states=0, hidden=16, layers=1)
    assert train(problems, config, tmp_path, report=lambda line: None) == 0
    assert load_checkpoint(tmp_path).training["interrupted"] is True


@pytest.mark.slow
def test_ppo_improves_on_the_heuristic_and_that_on_chance(tmp_path):
    """Without a warm start: trained policy before the heuristic that it starts as, and that before chance."""
    problem = random_problem(21, num_groups=16, num_devices=3, shape="branchy")
    config = TrainConfig.load(
        "placement", steps=6000, rollout=64, batch_size=64, warm_states=0, hidden=32, layers=1, learning_rate=1e-3
    )
    train([problem], config, tmp_path, report=lambda line: None)
    instance = make_instance(problem)

    def mean_ratio(network):
        from rlplace.agents.construct import construct

        rng = np.random.default_rng(0)
        plans = [construct(instance, network, rng, greedy=False) for _ in range(24)]
        return np.mean([simulate(problem, plan).step_time_s for plan in plans]) / instance.reference_step_time_s

    torch.manual_seed(0)
    blind = PlacerNetwork(NetworkConfig(hidden=32, layers=1))
    torch.nn.init.zeros_(blind.linear.weight)
    assert (
        mean_ratio(load_checkpoint(tmp_path).network)
        < mean_ratio(PlacerNetwork(NetworkConfig(hidden=32, layers=1)))
        < mean_ratio(blind)
    )


def test_hyperparameters_are_checked():
    with pytest.raises(InputError, match="did you mean 'learning_rate'"):
        TrainConfig.load("refinement", learning_rat=1.0)
    with pytest.raises(InputError, match="unknown environment"):
        TrainConfig.load("refine")


def test_table(small_agent):
    problems = [random_problem(s, num_groups=12, num_devices=2) for s in range(2)]
    rows = compare_agent(small_agent, problems, planners=("single", "best", "annealing"), calls=32)
    by_name = {row.planner: row for row in rows}
    assert by_name["best"].ratio == 1.0
    assert by_name["agent (32 calls)"].ratio <= 1.0 and by_name["agent (32 calls)"].worse == 0
    assert by_name["single"].ratio >= 1.0
    assert "executor list" in format_rows(rows, "title")


def test_finetune_starts_from_the_checkpoint(small_agent, tmp_path):
    problems = [random_problem(s, num_groups=8, num_devices=2) for s in range(2)]
    other = TrainConfig.load("refinement", steps=64, hidden=24)
    with pytest.raises(InputError, match="other sizes"):
        train(problems, other, tmp_path / "other", start=small_agent.checkpoint, report=lambda line: None)
    tuned = small_agent.finetune(problems, steps=64, out=tmp_path / "tuned")
    assert isinstance(tuned, Agent) and tuned.checkpoint.network.config == small_agent.checkpoint.network.config
    assert f"weights of {small_agent.checkpoint.name}" in tuned.checkpoint.training["warm_start"]
