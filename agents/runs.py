"""A policy for `rlplace/Cluster-v0`, trained by stock `MaskablePPO`: which strategy runs next on a cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.random import Generator
from sb3_contrib import MaskablePPO
from stable_baselines3.common.vec_env import DummyVecEnv

from rlplace.agents.network import NetworkConfig, PlacerNetwork
from rlplace.agents.policy import PlacerPolicy
from rlplace.envs.cluster import FEATURES, ClusterEnv, Scenario, observe
from rlplace.measured.belief import Belief

ENVS, ROLLOUT, EPOCHS, BATCH, RATE, ENTROPY = 8, 256, 4, 256, 3e-4, 0.003


def train_runs(
    scenarios: Sequence[Scenario],
    *,
    decisions: int,
    runs: int = 5,
    seed: int = 0,
    tick: Callable[[int], object] = lambda done: None,
) -> PlacerNetwork:
    """Trains a policy, from the heuristic that takes the largest expected improvement.

    Args:
        scenarios: Episodes.
        decisions: Decisions to make, rounded up to whole rollouts.
        runs: Most runs of an episode.
        seed: Seed of everything.
        tick: Called with the decisions so far after every rollout.
    """
    envs = DummyVecEnv([lambda: ClusterEnv(scenarios, runs=runs)] * ENVS)
    model = MaskablePPO(
        PlacerPolicy, envs, n_steps=ROLLOUT, batch_size=BATCH, n_epochs=EPOCHS, learning_rate=RATE, gamma=1.0, ent_coef=ENTROPY,
        seed=seed, device="cpu", policy_kwargs={"config": NetworkConfig(), "features": FEATURES},
    )  # fmt: skip
    policy = model.policy
    assert isinstance(policy, PlacerPolicy)
    standardise(policy.network, scenarios, runs)
    while model.num_timesteps < decisions:
        model.learn(ENVS * ROLLOUT, reset_num_timesteps=False)
        tick(model.num_timesteps)
    return policy.network


def standardise(network: PlacerNetwork, scenarios: Sequence[Scenario], runs: int) -> None:
    """Sets mean and scale of the features by what candidates look like before anything runs."""
    tables = []
    for scenario in scenarios[:200]:
        count = len(scenario.pool.drafts)
        tables.append(observe(Belief(scenario.pool), runs, count)["candidates"].reshape(count + 1, len(FEATURES))[:count])
    rows = torch.from_numpy(np.concatenate(tables))
    network.standardise(rows.mean(dim=0), rows.std(dim=0).clamp(min=0.05))


def rule_of(network: PlacerNetwork, runs: int = 5) -> Callable[[Belief, Generator], int | None]:
    """The policy as a rule of `rlplace.measured.choose`: the best score of what has not run; it never stops early."""

    def choose(belief: Belief, rng: Generator) -> int | None:
        if not belief.left.any():
            return None
        count = len(belief.pool.drafts)
        seen = observe(belief, max(runs, len(belief.ran) + 1), count)
        table = torch.from_numpy(seen["candidates"]).reshape(count + 1, len(FEATURES))[:count]
        with torch.no_grad():
            scores = network.scores(table)[0].numpy()
        return int(np.argmax(np.where(belief.left, scores, -np.inf)))

    return choose
