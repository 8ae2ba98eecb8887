"""The placer network as a policy: of MaskablePPO and of algorithms that know no masks."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from sb3_contrib import TRPO, MaskablePPO
from stable_baselines3 import A2C

from rlplace.agents.network import HEURISTIC, GraphBank, NetworkConfig
from rlplace.agents.policy import PlacerPolicy, UnmaskedPlacerPolicy
from rlplace.envs import PlacementEnv, RefinementEnv, make_instance
from rlplace.errors import InputError
from rlplace.problem.generate import random_problem

EXAMPLE = Path(__file__).parents[2] / "examples" / "other_algorithm.py"


@pytest.fixture(scope="module")
def instances():
    return [make_instance(random_problem(seed, num_groups=10, num_devices=3)) for seed in range(2)]


@pytest.mark.parametrize("env_class", [PlacementEnv, RefinementEnv])
@pytest.mark.parametrize("layers", [0, 2])
@pytest.mark.parametrize(("algorithm", "policy"), [(MaskablePPO, PlacerPolicy), (TRPO, UnmaskedPlacerPolicy)])
def test_learning_changes_the_network(instances, env_class, layers, algorithm, policy):
    options = {"config": NetworkConfig(layers=layers), "bank": GraphBank(instances), "features": env_class.FEATURES}
    model = algorithm(policy, env_class(instances), n_steps=32, batch_size=32, policy_kwargs=options, seed=0)
    before = {name: value.clone() for name, value in model.policy.network.state_dict().items()}
    model.learn(32)
    after = model.policy.network.state_dict()
    assert set(before) == set(after) and not torch.equal(before["linear.weight"], after["linear.weight"])
    assert all(torch.isfinite(value).all() for value in after.values())


@pytest.mark.parametrize("env_class", [PlacementEnv, RefinementEnv])
def test_an_untrained_policy_is_the_heuristic(instances, env_class):
    env = env_class(instances)
    policies = [
        MaskablePPO(PlacerPolicy, env, policy_kwargs={"features": env.FEATURES}, seed=0).policy,
        A2C(UnmaskedPlacerPolicy, env, policy_kwargs={"features": env.FEATURES}, seed=0).policy,
    ]
    observation, _ = env.reset(seed=0)
    table = observation["candidates"].reshape(-1, len(env.FEATURES))
    weight = np.array([HEURISTIC.get(name, 0.0) for name in env.FEATURES])
    assert weight.any()
    real = observation["candidate_group"] >= 0
    scores = np.where(real, table @ weight, -np.inf)
    masks = env.action_masks()
    for policy in policies:
        probabilities = policy.get_distribution(policy.obs_to_tensor(observation)[0]).distribution.probs[0].detach().numpy()
        known = np.log(probabilities[real])
        np.testing.assert_allclose(known - known[0], scores[real] - scores[real][0], rtol=1e-3, atol=1e-3)
        masked = {"action_masks": masks} if isinstance(policy, PlacerPolicy) else {}
        assert masks[policy.predict(observation, deterministic=True, **masked)[0]]


def test_message_passing_asks_for_the_bank(instances):
    options = {"config": NetworkConfig(layers=1), "features": RefinementEnv.FEATURES}
    with pytest.raises(InputError, match="GraphBank"):
        MaskablePPO(PlacerPolicy, RefinementEnv(instances), policy_kwargs=options)


def test_the_bank_makes_graphs_when_they_are_asked_for(instances):
    bank = GraphBank(instances)
    assert len(bank) == 2 and not bank._on_device
    one = bank.get(1, torch.device("cpu"))
    assert bank.get(1, torch.device("cpu")) is one and len(one.nodes) == 10


@pytest.mark.slow
def test_the_example_runs():
    done = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == ["MaskablePPO", "TRPO", "PPO, SB3's policy", "agent"]
