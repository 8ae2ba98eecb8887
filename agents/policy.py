"""Adapters to stable-baselines3: any `Policy` as one of stock `MaskablePPO`, and vector environments as its `VecEnv`.

Of SB3's policies only `_build` is overridden: the feature extractor becomes the whole network, whose output is split into
logits and value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from numpy.typing import NDArray
from sb3_contrib.common.maskable.policies import MaskableMultiInputActorCriticPolicy
from stable_baselines3.common.policies import MultiInputActorCriticPolicy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.type_aliases import Schedule
from stable_baselines3.common.vec_env import VecEnv
from torch import Tensor, nn

from rlplace.agents.network import PlacerNetwork
from rlplace.agents.policies import Policy, candidate_columns, narrowed
from rlplace.envs.base import ENVIRONMENTS
from rlplace.envs.vector import PlacerVectorEnv
from rlplace.errors import InputError


class PolicyExtractor(BaseFeaturesExtractor):
    """A `Policy` as SB3's feature extractor: its features are the K logits and the value, [B, K + 1]."""

    def __init__(
        self, observation_space: spaces.Dict, features: Sequence[str], network: type[Policy], settings: Mapping[str, Any]
    ) -> None:
        candidates, table = observation_space["candidate_group"].shape, observation_space["candidates"].shape
        assert candidates is not None and table is not None
        wide = table[0] // candidates[0]
        super().__init__(observation_space, candidates[0] + 1)
        self.network = network(features=tuple(features), **settings)
        columns = (
            known for known in map(candidate_columns, ENVIRONMENTS) if len(known) == wide and set(features) <= set(known)
        )
        self._known = next(columns, tuple(features))
        if len(self._known) != wide:
            raise InputError(
                f"policy_kwargs['features'] are not of the environment, which describes a candidate by {wide} numbers; pass "
                "FEATURES of its class, or some of them"
            )

    def forward(self, observations: dict[str, Tensor]) -> Tensor:
        """Returns float32 [B, K + 1]."""
        return torch.cat(self.network.look(narrowed(observations, self.network.features, self._known)), dim=1)


class _Split(nn.Module):
    """SB3's module for policy and value layers; it only splits the features."""

    def __init__(self, candidates: int) -> None:
        super().__init__()
        self.latent_dim_pi, self.latent_dim_vf = candidates, 1

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        return self.forward_actor(features), self.forward_critic(features)

    def forward_actor(self, features: Tensor) -> Tensor:
        return features[:, :-1]

    def forward_critic(self, features: Tensor) -> Tensor:
        return features[:, -1:]


class _NetworkPolicy:
    """The common part of both policies; it precedes SB3's class in their bases."""

    def __init__(
        self,
        observation_space: spaces.Dict,
        action_space: spaces.Space,
        lr_schedule: Schedule,
        *,
        features: Sequence[str],
        network: type[Policy] = PlacerNetwork,
        settings: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            observation_space,
            action_space,
            lr_schedule,
            features_extractor_class=PolicyExtractor,
            features_extractor_kwargs={"features": features, "network": network, "settings": settings or {}},
            ortho_init=False,
            **options,
        )  # type: ignore[call-arg]

    def _build(self, lr_schedule: Schedule) -> None:
        """Builds only the network, in place of SB3's layers for policy and value."""
        policy = cast(Any, self)
        policy.mlp_extractor = _Split(policy.features_dim - 1)
        policy.action_net = nn.Identity()
        policy.value_net = nn.Identity()
        policy.optimizer = policy.optimizer_class(policy.parameters(), lr=lr_schedule(1), **policy.optimizer_kwargs)

    @property
    def network(self: Any) -> Policy:
        """The policy inside, which checkpoints save."""
        extractor = self.features_extractor
        assert isinstance(extractor, PolicyExtractor)
        return extractor.network


class PlacerPolicy(_NetworkPolicy, MaskableMultiInputActorCriticPolicy):
    """Policy for `MaskablePPO` in any environment of the package.

    Pass ``policy_kwargs={"features": RefinementEnv.FEATURES}``, and ``"network"``, a class of `Policy`, with its ``"settings"``
    where it is another than the shipped one.
    """


class UnmaskedPlacerPolicy(_NetworkPolicy, MultiInputActorCriticPolicy):
    """Policy for on-policy algorithms without masks (`PPO`, `A2C`, `TRPO`), which must learn what is illegal."""


class PlacerVecEnv(VecEnv):
    """N environments that are stepped together, for any algorithm of stable-baselines3 and sb3-contrib, masks included.

    >>> envs = gymnasium.make_vec("rlplace/Refinement-v0", num_envs=64, autoreset_mode="SameStep")      # doctest: +SKIP
    >>> model = MaskablePPO(PlacerPolicy, PlacerVecEnv(envs), policy_kwargs={"features": RefinementEnv.FEATURES})
    """

    def __init__(self, envs: Any) -> None:
        """Wraps a vector environment.

        Args:
            envs: `gymnasium.make_vec` of rlplace/Placement-v0 or rlplace/Refinement-v0 with ``autoreset_mode="SameStep"``, or
                `gymnasium.vector.SyncVectorEnv` of others in that mode.

        Raises:
            InputError: It is another environment, or has another mode.
        """
        known = isinstance(envs, PlacerVectorEnv | SyncVectorEnv)
        if not known or envs.metadata["autoreset_mode"] is not AutoresetMode.SAME_STEP:
            raise InputError(
                'PlacerVecEnv wraps gymnasium.make_vec("rlplace/Placement-v0", num_envs=N, autoreset_mode="SameStep") or '
                f"Refinement-v0, or a SyncVectorEnv in that mode, found {envs!r}"
            )
        self.envs = envs
        super().__init__(envs.num_envs, envs.single_observation_space, envs.single_action_space)
        self._actions = np.zeros(self.num_envs, dtype=np.int64)

    def reset(self) -> dict[str, NDArray[Any]]:  # type: ignore[override]
        """Begins all episodes, with the seeds and options that were set."""
        seed = None if self._seeds[0] is None else self._seeds
        observation, infos = self.envs.reset(seed=seed, options=self._options[0] or None)
        self.reset_infos = self._numbers(infos)
        self._reset_seeds()
        self._reset_options()
        return cast(dict[str, NDArray[Any]], observation)

    def step_async(self, actions: NDArray[Any]) -> None:
        """Takes the actions of the next step."""
        self._actions = actions

    def step_wait(self) -> tuple[Any, Any, Any, list[dict[str, Any]]]:
        """Steps; an environment whose episode ended has its last info and ``terminal_observation``."""
        observation, rewards, terminated, truncated, infos = self.envs.step(self._actions)
        rows, over = self._numbers(infos), terminated | truncated
        for e in np.flatnonzero(over).tolist():
            rows[e] = {
                **_row(infos["final_info"], e),
                "terminal_observation": infos["final_obs"][e],
                "TimeLimit.truncated": bool(truncated[e] and not terminated[e]),
            }  # fmt: skip
        return observation, rewards.astype(np.float32), over, rows

    def close(self) -> None:
        """Ends the threads of the environments."""
        self.envs.close()

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """Returns an attribute of each environment."""
        values = self.envs.get_attr(attr_name)
        return [values[e] for e in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Raises InputError: environments that are stepped together have no attributes of their own."""
        raise InputError(f"{attr_name} cannot be set: these environments share their attributes; make others")

    def env_method(self, method_name: str, *method_args: Any, indices: Any = None, **method_kwargs: Any) -> list[Any]:
        """Returns rows of a method of the environments, such as ``action_masks``."""
        rows = self.envs.call(method_name, *method_args, **method_kwargs)
        return [rows[e] for e in self._get_indices(indices)]

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        """Returns False for each: they have no wrapper of stable-baselines3."""
        return [False for _ in self._get_indices(indices)]

    def _numbers(self, infos: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Returns the info of each environment between ends of episodes: the number of its problem, where it has one."""
        if "problem" not in infos:
            return [{} for _ in range(self.num_envs)]
        return [{"problem": number} for number in infos["problem"].tolist()]


def _row(infos: Mapping[str, Any], e: int) -> dict[str, Any]:
    """Returns the info of one environment from those of a vector."""
    found = {}
    for name, values in infos.items():
        if name[0] != "_" and infos.get(f"_{name}", values)[e]:
            value = _row(values, e) if isinstance(values, dict) else values[e]
            found[name] = value.item() if isinstance(value, np.generic) else value
    return found
