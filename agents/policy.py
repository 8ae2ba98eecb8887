"""Any `Policy` as one of stock `MaskablePPO`, and of algorithms that know no masks.

Only `_build` is overridden: SB3's feature extractor becomes the whole network, whose output is split into logits and value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from gymnasium import spaces
from sb3_contrib.common.maskable.policies import MaskableMultiInputActorCriticPolicy
from stable_baselines3.common.policies import MultiInputActorCriticPolicy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.type_aliases import Schedule
from torch import Tensor, nn

from rlplace.agents.network import PlacerNetwork
from rlplace.agents.policies import KNOWN, Policy, narrowed
from rlplace.errors import InputError


class PolicyExtractor(BaseFeaturesExtractor):
    """Runs a `Policy` on a batch of observations; features are the K logits and the value, [B, K + 1]."""

    def __init__(
        self, observation_space: spaces.Dict, features: Sequence[str], network: type[Policy], settings: Mapping[str, Any]
    ) -> None:
        candidates, table = observation_space["candidate_group"].shape, observation_space["candidates"].shape
        assert candidates is not None and table is not None
        wide = table[0] // candidates[0]
        super().__init__(observation_space, candidates[0] + 1)
        self.network = network(features=tuple(features), **settings)
        self._known = next((names for names in KNOWN.values() if len(names) == wide), tuple(features))
        if len(self._known) != wide or not set(features) <= set(self._known):
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
    """Policy for `MaskablePPO` on either environment.

    Pass ``policy_kwargs={"features": RefinementEnv.FEATURES}``, and ``"network"``, a class of `Policy`, with its ``"settings"``
    where it is another than the shipped one.
    """


class UnmaskedPlacerPolicy(_NetworkPolicy, MultiInputActorCriticPolicy):
    """The same for on-policy algorithms without masks (`PPO`, `A2C`, `TRPO`): they must learn what is illegal."""
