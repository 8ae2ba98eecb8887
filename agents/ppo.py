"""The PPO stage: stock `MaskablePPO`, in parts that each have cases and seeds of their own.

A part depends on the weights and Adam's moments before it and on its number, on nothing else. A run that is cut and resumed
therefore gives the weights that it would have given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sb3_contrib import MaskablePPO
from sb3_contrib.common.maskable.buffers import MaskableDictRolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import configure
from stable_baselines3.common.vec_env import VecMonitor

from rlplace.agents.config import TrainConfig
from rlplace.agents.gather import PlacerVecEnv
from rlplace.agents.imitation import quick_plan
from rlplace.agents.policies import PLACEMENT, Policy
from rlplace.agents.policy import PlacerPolicy
from rlplace.agents.problems.sources import CaseSource
from rlplace.envs.instance import Instance, make_instance, side_by_side
from rlplace.envs.observation import GraphArrays, graph_arrays
from rlplace.envs.vector.base import PlacementVectorEnv, PlacerVectorEnv, RefinementVectorEnv
from rlplace.errors import InputError

MOST_MISSES = 50
"""Cases in a row without a usable one after which a source counts as having none."""

_WORST, _SPREAD = -3.0, 0.01


@dataclass(frozen=True)
class Part:
    """Result of a part of PPO.

    Attributes:
        decisions: Number of decisions made.
        ratio: Geometric mean of step time over the best classical plan at the end of its episodes, NaN without any.
    """

    decisions: int
    ratio: float


class EpisodeBuffer(MaskableDictRolloutBuffer):
    """Advantages of whole episodes over the other episodes of the same graph, which know its difficulty better than a value.

    Rewards come at the end. A decision's advantage is its episode's reward less the mean, over the spread, of all episodes of
    the graph that ended in the buffer (as in POMO, arXiv 2010.16011); one whose episode goes on has none.
    """

    def compute_returns_and_advantage(self, last_values: torch.Tensor, dones: NDArray[Any]) -> None:
        """Fills `returns` and `advantages`; `last_values` are not needed."""
        ended = np.concatenate([self.episode_starts[1:], np.asarray(dones, dtype=np.float32)[None]]) > 0
        result = np.full(self.n_envs, np.nan)
        for step in reversed(range(self.buffer_size)):
            result = np.where(ended[step], np.maximum(self.rewards[step], _WORST), result)
            self.returns[step] = result
        graph = self.observations["graph"][..., 0]
        self.advantages[:] = 0.0
        for number in np.unique(graph[ended]):
            of = graph == number
            final = self.returns[of & ended]
            self.advantages[of] = (self.returns[of] - final.mean()) / (final.std() + _SPREAD)
        unknown = np.isnan(self.returns)
        self.advantages[unknown] = 0.0
        self.returns[unknown] = self.values[unknown]


def instances_of(source: CaseSource, first: int, count: int, *, quick: bool = False) -> list[Instance]:
    """`count` instances from the source's case `first` on, without cases of one device; `quick` compares with `quick_plan`.

    Raises:
        InputError: The source has no usable case.
    """
    instances: list[Instance] = []
    number = misses = 0
    while len(instances) < count and misses < MOST_MISSES and source.count != 0:
        if source.count is not None and number >= max(source.count, count):
            break
        case = source.case((first + number) % source.count if source.count is not None else first + number)
        number += 1
        instance = make_instance(case.problem, floor=quick_plan(case.problem) if quick else None, compute_floor=not quick)
        if instance.floor is None or instance.problem.num_devices < 2:
            misses += 1
            continue
        misses = 0
        instances.append(instance)
    if not instances:
        raise InputError("no problem to train on: needed is one with a feasible plan and two devices")
    return instances


def make_model(network: Policy, instances: Sequence[Instance], config: TrainConfig, seed: int) -> MaskablePPO:
    """Returns a `MaskablePPO` whose policy holds a copy of the network."""
    games: PlacerVectorEnv
    graphs: list[GraphArrays] = []
    if network.environment == PLACEMENT:
        graphs = [graph_arrays(instance) for instance in instances] * 2
        instances = [*instances, *map(side_by_side, instances)]
        games = PlacementVectorEnv(config.envs, problems=instances, autoreset_mode="SameStep")
    else:
        games = RefinementVectorEnv(config.envs, problems=instances, start="mixed", keep="better", autoreset_mode="SameStep")
    envs = VecMonitor(PlacerVecEnv(games), info_keywords=("feasible",))
    model = MaskablePPO(
        PlacerPolicy,
        envs,
        n_steps=config.rollout,
        batch_size=config.batch_size,
        n_epochs=config.epochs,
        learning_rate=config.learning_rate,
        gamma=config.gamma,
        gae_lambda=config.gae_lambda,
        clip_range=config.clip_range,
        ent_coef=config.entropy,
        seed=seed,
        device=config.device,
        rollout_buffer_class=EpisodeBuffer if network.environment == PLACEMENT else None,
        policy_kwargs={"network": type(network), "features": network.features, "settings": network.settings()},
    )
    policy = model.policy
    assert isinstance(policy, PlacerPolicy)
    policy.network.load_state_dict(network.state_dict())
    policy.network.know(graphs)
    return model


def run_part(
    network: Policy,
    moments: dict[str, Any] | None,
    instances: Sequence[Instance],
    config: TrainConfig,
    *,
    number: int,
    decisions: int,
    logs: Path,
    tick: Callable[[int], object],
) -> tuple[Part, dict[str, Any]]:
    """Returns one part of PPO; changes the network.

    Args:
        network: The network, trained in place.
        moments: Adam's state after the part before; None at first.
        instances: Instances that this part trains on.
        config: Hyperparameters.
        number: Number of the part, from which its seed follows.
        decisions: Decisions to make, rounded up to whole rollouts.
        logs: Folder of TensorBoard logs.
        tick: Called with the decisions of every step of the environments.

    Returns:
        Result of the part, and Adam's state after it.
    """
    model = make_model(network, instances, config, config.seed + 1000 * (number + 1))
    if moments is not None:  # without the settings beside them, which are the policy's own
        optimizer = model.policy.optimizer
        optimizer.load_state_dict({**optimizer.state_dict(), "state": moments["state"]})
    model.set_logger(configure(str(logs), ["tensorboard"]))
    watcher = _Watcher(tick)
    model.learn(total_timesteps=decisions, callback=watcher)
    policy = model.policy
    assert isinstance(policy, PlacerPolicy)
    network.load_state_dict(policy.network.state_dict())
    ratio = float(np.exp(np.mean(np.log(watcher.ratios)))) if watcher.ratios else float("nan")
    return Part(model.num_timesteps, ratio), policy.optimizer.state_dict()


class _Watcher(BaseCallback):
    """Notes how episodes end."""

    def __init__(self, tick: Callable[[int], object]) -> None:
        super().__init__()
        self.ratios: list[float] = []
        self._tick = tick

    def _on_step(self) -> bool:
        for info, over in zip(self.locals["infos"], self.locals["dones"], strict=True):
            if over and "vs_best_baseline" in info:
                self.ratios.append(info["vs_best_baseline"])
        self._tick(self.training_env.num_envs)
        return True

    def _on_rollout_end(self) -> None:
        if self.ratios:
            self.logger.record("placement/vs_best_baseline", float(np.exp(np.mean(np.log(self.ratios[-200:])))))
