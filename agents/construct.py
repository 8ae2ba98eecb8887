"""Constructive sampling: the policy of a Placement-v0 agent places every group in turn."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from rlplace.agents.bank import graph_tensors
from rlplace.agents.network import PlacerNetwork
from rlplace.envs.instance import Instance
from rlplace.envs.placement import PlacementEnv


def construct(instance: Instance, network: PlacerNetwork, rng: np.random.Generator, *, greedy: bool) -> NDArray[np.int32]:
    """One plan, int32 [G], sampled (or taken greedily) from the policy; repaired when its memory does not fit."""
    env = PlacementEnv([instance])
    observation, _ = env.reset()
    with torch.no_grad():
        embeddings = [network.encode(graph_tensors(instance))] if network.config.layers else []
        while True:
            groups = torch.from_numpy(observation["candidate_group"]).long().unsqueeze(0)
            table = torch.from_numpy(observation["candidates"]).reshape(*groups.shape, len(network.features))
            context = torch.from_numpy(observation["context"]).unsqueeze(0)
            logits = network(embeddings, groups.new_zeros(1), table, groups, context)[0].squeeze(0).numpy()
            values = np.where(env.action_masks(), logits, -np.inf)
            action = int(np.argmax(values if greedy else values + rng.gumbel(size=len(values))))
            observation, _, done, _, info = env.step(action)
            if done:
                plan: NDArray[np.int32] = info.get("device_of_group", env.current_plan())
                return plan
