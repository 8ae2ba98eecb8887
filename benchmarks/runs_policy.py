"""A graph policy for `rlplace/Cluster-v0`, trained by stock `MaskablePPO`: which strategy runs next on a cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.random import Generator
from sb3_contrib import MaskablePPO
from stable_baselines3.common.vec_env import DummyVecEnv
from torch import Tensor, nn

from rlplace.agents.network import PlacerNetwork
from rlplace.agents.policy import PlacerPolicy
from rlplace.envs.cluster import FEATURES, STAGE_FEATURES, ClusterEnv, Scenario, observe, plan_graphs
from rlplace.measure.belief import Belief

ENVS, ROLLOUT, EPOCHS, BATCH, RATE, ENTROPY = 8, 256, 4, 256, 3e-4, 0.003

STAGE, ROUNDS = 24, 2
"""Width of what is known of a stage, and rounds of messages between the stages of a plan."""


class RunsNetwork(PlacerNetwork):
    """Scores candidates by messages in two graphs.

    Stages tell those before and behind them, and those on the same place, what they are; what all stages of a plan say joins
    what is believed of it; then candidates hear each other, as much as they are alike. It starts as the heuristic that takes
    the largest expected improvement. B observations, K candidates, S stages.
    """

    def __init__(self, *, features: Sequence[str] = FEATURES, hidden: int = 64, second: int = 32) -> None:
        super().__init__(features=features, hidden=hidden, second=second)
        self.stage, self.told = nn.Linear(len(STAGE_FEATURES), STAGE), nn.Linear(4 * STAGE, STAGE)
        self.plan = nn.Linear(2 * STAGE, hidden, bias=False)
        self.second = nn.Linear(2 * hidden, second)

    def plans(self, stages: Tensor, place: Tensor) -> Tensor:
        """Says what the stages of each plan say, [..., 2 `STAGE`], of stages [..., S, F] on places [..., S] (-1: none)."""
        there = (place >= 0).unsqueeze(-1).float()
        together = (place.unsqueeze(-1) == place.unsqueeze(-2)).float() * there * there.transpose(-1, -2)
        together = together / together.sum(-1, keepdim=True).clamp(min=1.0)
        state = torch.relu(self.stage(stages)) * there
        for _ in range(ROUNDS):
            none = torch.zeros_like(state[..., :1, :])
            before, behind = torch.cat([none, state[..., :-1, :]], -2), torch.cat([state[..., 1:, :], none], -2)
            heard = torch.cat([state, before, behind, together @ state], dim=-1)
            state = (state + torch.relu(self.told(heard))) * there
        mean = state.sum(-2) / there.sum(-2).clamp(min=1.0)
        return torch.cat([mean, state.amax(-2)], dim=-1)

    def forward(  # type: ignore[override]
        self, candidates: Tensor, candidate_group: Tensor, context: Tensor, alike: Tensor, plans: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns logits [B, K] and values [B, 1].

        Args:
            candidates: float32 [B, K, F].
            candidate_group: int64 [B, K], -1 for what has run, stop and padding.
            context: float32 [B, C].
            alike: float32 [B, K, K], correlations; zeros in rows of no candidate.
            plans: float32 [B, K, 2 `STAGE`], of `plans`.
        """
        named = candidate_group >= 0
        own = torch.relu(self.first((candidates - self.mean) / self.scale) + self.plan(plans))
        heard = (alike @ own) / alike.abs().sum(-1, keepdim=True).clamp(min=1.0)
        after = torch.relu(self.second(torch.cat([own, heard], dim=-1)))
        logits = (self.linear(candidates) + self.residual(after)).squeeze(-1)
        there = (alike.diagonal(dim1=-2, dim2=-1) > 0).unsqueeze(2).float()
        summary = torch.cat([(after * there).sum(1) / there.sum(1).clamp(min=1.0), context], dim=1)
        return torch.where(named, logits, self.stop(summary).expand_as(logits)), self.value(summary)

    def look(self, observation: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Returns `forward` of observations of the environment."""
        groups = observation["candidate_group"].long()
        rows = groups.shape
        stages, which = torch.unique(observation["stages"], dim=0, return_inverse=True)  # few questions, many observations
        place = torch.zeros(len(stages), observation["place"].shape[1]).index_copy(0, which, observation["place"].float())
        place = place.reshape(len(stages), rows[1], -1)
        plans = self.plans(stages.reshape(*place.shape, len(STAGE_FEATURES)), place)[which]
        candidates, alike = observation["candidates"].reshape(*rows, -1), observation["alike"].reshape(*rows, rows[-1])
        return self(candidates, groups, observation["context"], alike, plans)


def train_runs(
    scenarios: Sequence[Scenario],
    *,
    decisions: int,
    runs: int = 5,
    seed: int = 0,
    tick: Callable[[int], object] = lambda done: None,
) -> RunsNetwork:
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
        seed=seed, device="cpu", policy_kwargs={"network": RunsNetwork, "features": FEATURES},
    )  # fmt: skip
    policy = model.policy
    assert isinstance(policy, PlacerPolicy) and isinstance(policy.network, RunsNetwork)
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


def load_runs(path: str | Path) -> RunsNetwork:
    """Returns a trained policy from its weights, a file of safetensors."""
    from rlplace.agents.checkpoint import load_weights

    network = RunsNetwork()
    load_weights(network, Path(path))
    return network.eval()


def rule_of(network: RunsNetwork, runs: int = 5) -> Callable[[Belief, Generator], int | None]:
    """Yields the policy as a rule of `rlplace.measure.session`: the best score of what has not run; it never stops early."""

    def choose(belief: Belief, rng: Generator) -> int | None:
        if not belief.untried.any():
            return None
        count = len(belief.pool.drafts)
        stages = max(sum(one.stages for one in draft.pipelines) for draft in belief.pool.drafts)
        seen = {**observe(belief, max(runs, len(belief.observations) + 1), count), **plan_graphs(belief.pool, count, stages)}
        with torch.no_grad():
            scores = network.look({name: torch.from_numpy(value[None]) for name, value in seen.items()})[0][0].numpy()
        return int(np.argmax(np.where(belief.untried, scores[:count], -np.inf)))

    return choose
