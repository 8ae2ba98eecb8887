"""The PPO stage: stock `MaskablePPO`, in parts that each have cases and seeds of their own.

A part depends on the weights and Adam's moments before it and on its number, on nothing else. A run that is cut and resumed
therefore gives the weights that it would have given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray
from sb3_contrib import MaskablePPO
from sb3_contrib.common.maskable.buffers import MaskableDictRolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import configure
from stable_baselines3.common.vec_env import VecMonitor

from rlplace.agents.behaviour_cloning import quick_plan
from rlplace.agents.config import TrainConfig
from rlplace.agents.policies import Policy
from rlplace.agents.policy import PlacerPolicy, PlacerVecEnv
from rlplace.agents.problems.sources import CaseSource
from rlplace.envs.base import CLUSTER, PLACEMENT, REFINEMENT, STRATEGY
from rlplace.envs.instance import make_instance, side_by_side
from rlplace.envs.observation import GraphArrays, graph_arrays
from rlplace.envs.vector import PlacementVectorEnv, RefinementVectorEnv
from rlplace.errors import InputError

MOST_MISSES = 50
"""Cases in a row without a usable one after which a source counts as having none."""

BASELINES = {
    PLACEMENT: "quick planners", REFINEMENT: "best plan", STRATEGY: "classical search's strategy", CLUSTER: "best candidate",
}  # fmt: skip
"""By environment, whose step time the ratios of training are relative to."""

_WORST, _SPREAD = -3.0, 0.01


class PartResult(NamedTuple):
    """Result of a part of PPO.

    Attributes:
        decisions: Number of decisions made.
        ratio: Geometric mean of the step time at the end of episodes over that of `BASELINES`, NaN without any.
        moments: Adam's state after it.
    """

    decisions: int
    ratio: float
    moments: dict[str, Any]


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


def instances_of(source: CaseSource, first: int, count: int, environment: str) -> list[Any]:
    """Returns `count` problems of an environment from the source's number `first` on, without those that teach nothing.

    Raises:
        InputError: The source has no usable problem.
    """
    instances: list[Any] = []
    number = misses = 0
    while len(instances) < count and misses < MOST_MISSES and source.count != 0:
        if source.count is not None and number >= max(source.count, count):
            break
        case = source.case((first + number) % source.count if source.count is not None else first + number)
        number += 1
        instance = _instance_of(case, environment)
        if instance is None:
            misses += 1
            continue
        misses = 0
        instances.append(instance)
    if not instances:
        raise InputError("no problem to train on: needed is one with a feasible plan and two devices")
    return instances


def _instance_of(case: Any, environment: str) -> Any:
    """Returns a case as the environment takes it; None without a feasible plan, or with one device."""
    if environment in (STRATEGY, CLUSTER):
        return case if environment == STRATEGY or case.least_s < np.inf else None
    quick = environment == PLACEMENT
    instance = make_instance(case.problem, floor=quick_plan(case.problem) if quick else None, compute_floor=not quick)
    return instance if instance.floor is not None and instance.problem.num_devices > 1 else None


def make_model(network: Policy, instances: Sequence[Any], config: TrainConfig, seed: int) -> MaskablePPO:
    """Returns a `MaskablePPO` whose policy holds a copy of the network."""
    games: Any
    graphs: list[GraphArrays] = []
    environment = network.environment
    if environment == PLACEMENT:
        graphs = [graph_arrays(instance) for instance in instances] * 2
        instances = [*instances, *map(side_by_side, instances)]
        games = PlacementVectorEnv(config.envs, problems=instances, autoreset_mode="SameStep")
    elif environment == REFINEMENT:
        games = RefinementVectorEnv(config.envs, problems=instances, start="mixed", keep="better", autoreset_mode="SameStep")
    else:
        options: dict[str, Any] = (
            {"problems": instances, "start": "random"} if environment == STRATEGY else {"scenarios": instances}
        )
        sync: dict[str, Any] = {"vectorization_mode": "sync", "vector_kwargs": {"autoreset_mode": "SameStep"}}
        games = gymnasium.make_vec(environment, config.envs, **sync, **options)
    envs = VecMonitor(PlacerVecEnv(games))
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
        rollout_buffer_class=EpisodeBuffer if environment == PLACEMENT else None,
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
    instances: Sequence[Any],
    config: TrainConfig,
    *,
    number: int,
    decisions: int,
    logs: Path,
    tick: Callable[[int], object],
) -> PartResult:
    """Runs one part of PPO.

    Args:
        network: The network, trained in place.
        moments: Adam's state after the part before; None at first.
        instances: Problems that this part trains on, see `instances_of`.
        config: Hyperparameters.
        number: Number of the part, from which its seed follows.
        decisions: Decisions to make, rounded up to whole rollouts.
        logs: Folder of TensorBoard logs.
        tick: Called with the decisions of every step of the environments.
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
    return PartResult(model.num_timesteps, ratio, policy.optimizer.state_dict())


class _Watcher(BaseCallback):
    """Step times at the end of episodes."""

    def __init__(self, tick: Callable[[int], object]) -> None:
        super().__init__()
        self.ratios: list[float] = []
        self._tick = tick

    def _on_step(self) -> bool:
        for info, over in zip(self.locals["infos"], self.locals["dones"], strict=True):
            if over and (ratio := info.get("vs_best_baseline", info.get("over"))) is not None:
                self.ratios.append(ratio)
        self._tick(self.training_env.num_envs)
        return True

    def _on_rollout_end(self) -> None:
        if self.ratios:
            self.logger.record("placement/vs_best_baseline", float(np.exp(np.mean(np.log(self.ratios[-200:])))))
