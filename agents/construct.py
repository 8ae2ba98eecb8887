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
            table = observation["candidates"].reshape(-1, NUM_FEATURES)
            logits = network.score_one(embedding, table, observation["candidate_group"], observation["context"])
            values = np.where(env.action_masks(), logits, -np.inf)
            action = int(np.argmax(values if greedy else values + rng.gumbel(size=len(values))))
            observation, _, done, _, info = env.step(action)
            if done:
                plan: NDArray[np.int32] = info.get("device_of_group", env.current_plan())
                return plan
