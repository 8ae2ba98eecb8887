"""Warm start: the policy imitates the planners before PPO begins.

Placement-v0: the teacher is the best classical plan, followed group by group. Refinement-v0 starts from that plan anyway; its
teacher is the simulator, which prices every offered move (headroom studies found such labels far cheaper than reward): the
target distribution is a softmax of how much each move lowers the score.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor

from rlplace.agents.policy import PlacerPolicy
from rlplace.envs.base import Observation
from rlplace.envs.placement import PlacementEnv
from rlplace.envs.refinement import RefinementEnv

_SHARPNESS = 0.01  # a move that gains 1 % more is e times as likely in the target
_CLEAR = 0.05  # gains and losses beyond 5 % count as 5 %, so that a few great moves do not drown the rest
_EXPLORE = 0.3  # share of steps that follow a random legal action, so that other states are seen too


@dataclass(frozen=True, eq=False)
class Demonstrations:
    """States with target distributions: S states, K actions.

    Attributes:
        observations: Stacked observations, each [S, ...].
        masks: bool [S, K].
        targets: float32 [S, K], rows add up to 1.
    """

    observations: dict[str, NDArray[np.generic]]
    masks: NDArray[np.bool_]
    targets: NDArray[np.float32]


def collect(env: PlacementEnv | RefinementEnv, states: int, seed: int) -> Demonstrations:
    """Plays episodes with the teacher until `states` states are gathered."""
    assert isinstance(env.action_space, spaces.Discrete)
    rng = np.random.default_rng(seed)
    seen: list[Observation] = []
    masks, targets = [], []
    observation, _ = env.reset(seed=seed)
    while len(seen) < states:
        mask = env.action_masks()
        target = _target(env, mask)
        if target is not None:
            seen.append(observation)
            masks.append(mask)
            targets.append(target)
        probabilities = mask / mask.sum() if target is None or rng.random() < _EXPLORE else target
        if isinstance(env, RefinementEnv) and mask[1:].any():
            probabilities = np.where(np.arange(len(mask)) == 0, 0.0, probabilities)  # stopping would end the lesson
            total = probabilities.sum()
            probabilities = probabilities / total if total > 0 else mask / mask.sum()
        observation, _, done, _, _ = env.step(int(rng.choice(len(mask), p=probabilities / probabilities.sum())))
        if done:
            observation, _ = env.reset()
    stacked: dict[str, NDArray[np.generic]] = {key: np.stack([o[key] for o in seen]) for key in seen[0]}
    return Demonstrations(stacked, np.stack(masks), np.stack(targets).astype(np.float32))


def imitate(
    policy: PlacerPolicy, data: Demonstrations, *, epochs: int, batch_size: int, learning_rate: float, seed: int
) -> tuple[float, float]:
    """Fits the policy to the targets by cross-entropy over legal actions.

    Returns:
        Mean divergence from the targets before and after, on a tenth of the states that is not fitted.
    """
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(data.targets))
    held, fitted = order[: max(1, len(order) // 10)], order[max(1, len(order) // 10) :]
    optimizer = torch.optim.Adam(policy.parameters(), lr=learning_rate)
    before = _divergence(policy, data, held)
    policy.set_training_mode(True)
    for _ in range(epochs):
        rng.shuffle(fitted)
        for begin in range(0, len(fitted), batch_size):
            loss = _loss(policy, data, fitted[begin : begin + batch_size])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
    return before, _divergence(policy, data, held)


def _target(env: PlacementEnv | RefinementEnv, mask: NDArray[np.bool_]) -> NDArray[np.float64] | None:
    if isinstance(env, RefinementEnv):
        gains = env.move_scores()
        close = np.clip(gains, -_CLEAR, _CLEAR)
        weights = np.where(np.isfinite(gains), np.exp((close - close.max()) / _SHARPNESS), 0.0)
        return weights / weights.sum()
    floor = env.instance.floor
    if floor is None:
        return None
    device = int(floor[env.current_group])
    return np.eye(len(mask))[device] if mask[device] else None


def _loss(policy: PlacerPolicy, data: Demonstrations, rows: NDArray[np.int64]) -> Tensor:
    observation = {key: value[rows] for key, value in data.observations.items()}
    tensors, _ = policy.obs_to_tensor(observation)
    distribution = policy.get_distribution(tensors, data.masks[rows]).distribution
    assert distribution is not None
    target = torch.as_tensor(data.targets[rows], device=policy.device)
    log_probability = torch.where(target > 0, distribution.logits, 0.0)
    entropy = -(target * torch.log(target.clamp(min=1e-12))).sum(1)
    return (-(target * log_probability).sum(1) - entropy).mean()


def _divergence(policy: PlacerPolicy, data: Demonstrations, rows: NDArray[np.int64]) -> float:
    policy.set_training_mode(False)
    with torch.no_grad():
        return float(_loss(policy, data, rows))
