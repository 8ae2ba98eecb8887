"""The placer network as a policy of stock `MaskablePPO`, and of algorithms that know no masks.

Only `_build` is overridden: SB3's feature extractor becomes the whole network, whose output is split into logits and value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from gymnasium import spaces
from sb3_contrib.common.maskable.policies import MaskableMultiInputActorCriticPolicy
from stable_baselines3.common.policies import MultiInputActorCriticPolicy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.type_aliases import Schedule
from torch import Tensor, nn

from rlplace.agents.network import NetworkConfig, PlacerNetwork
from rlplace.errors import InputError


class NetworkExtractor(BaseFeaturesExtractor):
    """Runs `PlacerNetwork` on a batch of observations; features are the K logits and the value, [B, K + 1].

    Attributes:
        kind: Class of the network.
    """

    kind: type[PlacerNetwork] = PlacerNetwork

    def __init__(self, observation_space: spaces.Dict, config: NetworkConfig, features: Sequence[str]) -> None:
        candidates, table = observation_space["candidate_group"].shape, observation_space["candidates"].shape
        assert candidates is not None and table is not None
        if table[0] != candidates[0] * len(features):
            raise InputError(
                f"policy_kwargs['features'] has {len(features)} names, the environment describes a candidate by "
                f"{table[0] / candidates[0]:g} numbers; pass FEATURES of its class"
            )
        super().__init__(observation_space, candidates[0] + 1)
        self.network = self.kind(config, features=features)

    def forward(self, observations: dict[str, Tensor]) -> Tensor:
        """Returns float32 [B, K + 1]."""
        groups = observations["candidate_group"].long()
        candidates = observations["candidates"].reshape(*groups.shape, len(self.network.features))
        logits, value = self.network(candidates, groups, observations["context"])
        return torch.cat([logits, value], dim=1)


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

    extractor: type[NetworkExtractor] = NetworkExtractor

    def __init__(
        self,
        observation_space: spaces.Dict,
        action_space: spaces.Space,
        lr_schedule: Schedule,
        *,
        features: Sequence[str],
        config: NetworkConfig | None = None,
        **options: Any,
    ) -> None:
        extractor = {"config": NetworkConfig() if config is None else config, "features": tuple(features)}
        super().__init__(
            observation_space,
            action_space,
            lr_schedule,
            features_extractor_class=self.extractor,
            features_extractor_kwargs=extractor,
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
    def network(self: Any) -> PlacerNetwork:
        """The network inside, which checkpoints save."""
        extractor = self.features_extractor
        assert isinstance(extractor, NetworkExtractor)
        return extractor.network


class PlacerPolicy(_NetworkPolicy, MaskableMultiInputActorCriticPolicy):
    """Policy for `MaskablePPO` on either environment.

    Pass ``policy_kwargs={"config": NetworkConfig(), "features": RefinementEnv.FEATURES}``; only `features` is required.
    """


class UnmaskedPlacerPolicy(_NetworkPolicy, MultiInputActorCriticPolicy):
    """The same for on-policy algorithms without masks (`PPO`, `A2C`, `TRPO`): they must learn what is illegal."""
