"""Imitation for Placement-v0: the policy follows the best classical plan, group by group."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rlplace.agents.bank import GraphBank
from rlplace.agents.network import PlacerNetwork
from rlplace.agents.pretrain import descend
from rlplace.envs.instance import Instance
from rlplace.envs.placement import PlacementEnv
from rlplace.errors import InputError

_BATCH = 256
_RATE = 1e-3


def imitate(network: PlacerNetwork, instances: Sequence[Instance], *, steps: int, seed: int) -> tuple[float, float]:
    """Fits the network to the floors of some instances by cross-entropy over legal devices.

    Args:
        network: Changed.
        instances: With a floor.
        steps: Steps of Adam.
        seed: Seed that batches are drawn by.

    Returns:
        Mean cross-entropy before and after, on a tenth of the states that is not fitted.
    """
    rng, bank = np.random.default_rng(seed), GraphBank(instances)
    env = PlacementEnv(instances)
    rows = []
    for number in range(len(instances)):
        rows += _follow(env, number)
    if not rows:
        raise InputError("no plan to imitate: none of the problems has a feasible classical plan")
    table, group, context, mask, target, which = (torch.from_numpy(np.stack(column)) for column in zip(*rows, strict=True))
    order = rng.permutation(len(rows))
    cut = max(1, len(order) // 10)
    held, fitted = order[:cut], order[cut:] if len(order) > 1 else order

    def loss(chosen: np.ndarray) -> Tensor:
        distinct, at = torch.unique(which[chosen], return_inverse=True)
        graphs = [network.encode(bank.get(int(index), torch.device("cpu"))) for index in distinct]
        logits, _ = network(graphs, at, table[chosen], group[chosen], context[chosen])
        legal = torch.where(mask[chosen], logits, -1e9)
        return torch.nn.functional.cross_entropy(legal, target[chosen])

    with torch.no_grad():
        before = float(loss(held))
    optimizer = torch.optim.Adam(network.parameters(), lr=_RATE)
    network.train()
    for _ in range(steps):
        descend(network, optimizer, loss(rng.choice(fitted, min(_BATCH, len(fitted)), replace=False)))
    network.eval()
    with torch.no_grad():
        return before, float(loss(held))


def _follow(env: PlacementEnv, number: int) -> list[tuple[np.ndarray, ...]]:
    """Observations along the floor of a problem, as long as what it does is legal."""
    floor = env.instances[number].floor
    rows: list[tuple[np.ndarray, ...]] = []
    if floor is None:
        return rows
    observation, _ = env.reset(seed=number, options={"problem": number})
    done = False
    while not done:
        mask, device = env.action_masks(), int(floor[env.current_group])
        if not mask[device]:
            break
        table = observation["candidates"].reshape(len(mask), -1)
        group = observation["candidate_group"].astype(np.int64)
        rows.append((table, group, observation["context"], mask, np.int64(device), np.int64(number)))  # type: ignore[arg-type]
        observation, _, done, _, _ = env.step(device)
    return rows
