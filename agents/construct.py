"""Constructive sampling: the policy of a Placement-v0 agent places every group in turn."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from rlplace.agents.bank import graph_tensors
from rlplace.agents.network import PlacerNetwork
from rlplace.envs.features import NUM_FEATURES
from rlplace.envs.instance import Instance
from rlplace.envs.placement import PlacementEnv


def construct(instance: Instance, network: PlacerNetwork, rng: np.random.Generator, *, greedy: bool) -> NDArray[np.int32]:
    """One plan, int32 [G], sampled (or taken greedily) from the policy; repaired when its memory does not fit."""
    env = PlacementEnv([instance])
    observation, _ = env.reset()
    with torch.no_grad():
        embedding = network.encode(graph_tensors(instance))
        while True:
            logits, _ = network(
                [embedding],
                torch.zeros(1, dtype=torch.long),
                torch.from_numpy(observation["candidates"]).reshape(1, -1, NUM_FEATURES),
                torch.from_numpy(observation["candidate_group"].astype(np.int64)).unsqueeze(0),
                torch.from_numpy(observation["context"]).unsqueeze(0),
            )
            values = np.where(env.action_masks(), logits[0].double().numpy(), -np.inf)
            action = int(np.argmax(values if greedy else values + rng.gumbel(size=len(values))))
            observation, _, done, _, info = env.step(action)
            if done:
                plan: NDArray[np.int32] = info.get("device_of_group", env.current_plan())
                return plan
