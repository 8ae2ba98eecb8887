"""A policy of one's own: moves look at each other by attention. It is trained by stock MaskablePPO, saved, and places models.

Install it with ``pip install ./examples/policy`` (``--no-deps --no-build-isolation`` without a network), then

    python -m rlplace_example_policy runs/attention --decisions 20000
    rlplace place hf:gpt2 --cluster a100-80g:4 --space placement --agent runs/attention
    rlplace train --policy attention --out runs/longer --fit-steps 0            # or trained by rlplace itself
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

import gymnasium
import torch
from sb3_contrib import MaskablePPO
from torch import Tensor, nn

from rlplace.agents.policies import Policy
from rlplace.agents.policy import PlacerPolicy, PlacerVecEnv
from rlplace.envs import make_instance
from rlplace.problem.generate import random_problem

FEATURES = (
    "busiest_change",
    "congested_load",
    "sent_change",
    "congested_sent",
    "delay_sum",
    "saved",
    "tightness",
    "overdue_sum",
)
"""Some of `rlplace.envs.RefinementEnv.FEATURES`."""


class AttentionPolicy(Policy):
    """Scores a move by its features and by what is on offer beside it."""

    def __init__(self, *, features: tuple[str, ...] = FEATURES, width: int = 32, heads: int = 2) -> None:
        super().__init__()
        self.features, self.width, self.heads = tuple(features), width, heads
        self.describe = nn.Linear(len(self.features), width)
        self.attend = nn.MultiheadAttention(width, heads, batch_first=True)
        self.score = nn.Linear(width, 1)
        self.state = nn.Sequential(nn.Linear(width + 8, width), nn.ReLU(), nn.Linear(width, 2))

    def settings(self) -> dict[str, int]:
        return {"width": self.width, "heads": self.heads}

    def look(self, observation: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        named = observation["candidate_group"] >= 0  # the others are stop and moves that do not exist
        moves = torch.relu(self.describe(observation["candidates"].reshape(*named.shape, -1)))
        hidden = ~named & named.any(dim=1, keepdim=True)
        heard, _ = self.attend(moves, moves, moves, key_padding_mask=hidden, need_weights=False)
        mixed = (moves + heard) * named.unsqueeze(2)
        pooled = mixed.sum(1) / named.sum(1, keepdim=True).clamp(min=1)
        stop, value = self.state(torch.cat([pooled, observation["context"]], dim=1)).split(1, dim=1)
        return torch.where(named, self.score(mixed).squeeze(2), stop.expand_as(named)), value


def train(folder: str, decisions: int, envs: int = 32, seed: int = 0) -> AttentionPolicy:
    """Trains on random problems and writes a checkpoint."""
    torch.set_num_threads(1)
    shapes = ("branchy", "layered", "towers")
    problems = [random_problem(number, num_groups=24, num_devices=4, shape=shapes[number % 3]) for number in range(12)]
    instances = [make_instance(problem) for problem in problems]
    vector = gymnasium.make_vec(
        "rlplace/Refinement-v0", num_envs=envs, problems=instances, start="mixed", autoreset_mode="SameStep"
    )
    model = MaskablePPO(
        PlacerPolicy, PlacerVecEnv(vector), n_steps=64, batch_size=512, learning_rate=1e-3, gamma=0.98, ent_coef=0.001,
        seed=seed, policy_kwargs={"network": AttentionPolicy, "features": FEATURES},
    )  # fmt: skip
    model.learn(decisions)
    policy = model.policy.network
    policy.save(folder, training={"decisions": model.num_timesteps, "seed": seed})
    return policy


def main() -> None:
    """Trains from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--decisions", type=int, default=20_000)
    options = parser.parse_args()
    from rlplace_example_policy import train as train_installed  # the class that the entry point names, not that of __main__

    train_installed(options.folder, options.decisions)


if __name__ == "__main__":
    main()
