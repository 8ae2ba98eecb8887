"""The placer network as a policy of stock `MaskablePPO`, and of algorithms that know no masks.

Only `_build` is overridden: SB3's feature extractor becomes the whole network, whose output is split into logits and value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from gymnasium import spaces
from sb3_contrib.common.maskable.policies import MaskableMultiInputActorCriticPolicy
from stable_baselines3.common.policies import MultiInputActorCriticPolicy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.type_aliases import Schedule
from torch import Tensor, nn

from rlplace.agents.network import GraphBank, NetworkConfig, PlacerNetwork
from rlplace.errors import InputError


class NetworkExtractor(BaseFeaturesExtractor):
    """Runs `PlacerNetwork` on a batch of observations; features are the K logits and the value, [B, K + 1].

    Every distinct graph of a batch is encoded once. While no gradient is wanted (rollouts), encodings are kept until the
    weights change.
    """

    def __init__(
        self, observation_space: spaces.Dict, config: NetworkConfig, bank: GraphBank | None, features: Sequence[str]
    ) -> None:
        candidates, table = observation_space["candidate_group"].shape, observation_space["candidates"].shape
        assert candidates is not None and table is not None
        if table[0] != candidates[0] * len(features):
            raise InputError(
                f"policy_kwargs['features'] has {len(features)} names, the environment describes a candidate by "
                f"{table[0] / candidates[0]:g} numbers; pass FEATURES of its class"
            )
        if config.layers and bank is None:
            raise InputError("a network with message passing needs policy_kwargs['bank']: GraphBank(env.instances)")
        super().__init__(observation_space, candidates[0] + 1)
        self.network = PlacerNetwork(config, features=features)
        self.bank = bank
        self._kept: dict[int, Tensor] = {}

    def train(self, mode: bool = True) -> NetworkExtractor:
        """SB3 switches modes around every update: the moment to forget encodings."""
        self._kept.clear()
        super().train(mode)
        return self

    def forward(self, observations: dict[str, Tensor]) -> Tensor:
        """Returns float32 [B, K + 1]."""
        groups = observations["candidate_group"].long()
        candidates = observations["candidates"].reshape(*groups.shape, len(self.network.features))
        embeddings: list[Tensor] = []
        which = groups.new_zeros(len(groups))
        if self.network.config.layers:
            distinct, which = torch.unique(observations["graph"].long().squeeze(1), return_inverse=True)
            embeddings = [self._embed(int(index), groups.device) for index in distinct]
        logits, value = self.network(embeddings, which, candidates, groups, observations["context"])
        return torch.cat([logits, value], dim=1)

    def _embed(self, index: int, device: torch.device) -> Tensor:
        assert self.bank is not None
        if torch.is_grad_enabled():
            return self.network.encode(self.bank.get(index, device))
        if index not in self._kept:
            self._kept[index] = self.network.encode(self.bank.get(index, device))
        return self._kept[index]


class _Split(nn.Module):
    """SB3's place for policy and value layers: here it only cuts the features apart."""

    def __init__(self, candidates: int) -> None:
        super().__init__()
        self.latent_dim_pi, self.latent_dim_vf = candidates, 1

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        return self.forward_actor(features), self.forward_critic(features)

    def forward_actor(self, features: Tensor) -> Tensor:
        return features[:, :-1]

    def forward_critic(self, features: Tensor) -> Tensor:
        return features[:, -1:]


def _build(policy: Any, lr_schedule: Schedule) -> None:
    """Instead of SB3's layers for policy and value: nothing but the network."""
    policy.mlp_extractor = _Split(policy.features_dim - 1)
    policy.action_net = nn.Identity()
    policy.value_net = nn.Identity()
    policy.optimizer = policy.optimizer_class(policy.parameters(), lr=lr_schedule(1), **policy.optimizer_kwargs)


class _NetworkPolicy:
    """What both policies share; it stands before SB3's class in their bases."""

    def __init__(
        self,
        observation_space: spaces.Dict,
        action_space: spaces.Space,
        lr_schedule: Schedule,
        *,
        features: Sequence[str],
        config: NetworkConfig | None = None,
        bank: GraphBank | None = None,
        **options: Any,
    ) -> None:
        extractor = {"config": NetworkConfig() if config is None else config, "bank": bank, "features": tuple(features)}
        super().__init__(
            observation_space,
            action_space,
            lr_schedule,
            features_extractor_class=NetworkExtractor,
            features_extractor_kwargs=extractor,
            ortho_init=False,
            **options,
        )  # type: ignore[call-arg]

    def _build(self, lr_schedule: Schedule) -> None:
        _build(self, lr_schedule)

    @property
    def network(self: Any) -> PlacerNetwork:
        """The network inside, which checkpoints save."""
        extractor = self.features_extractor
        assert isinstance(extractor, NetworkExtractor)
        return extractor.network


class PlacerPolicy(_NetworkPolicy, MaskableMultiInputActorCriticPolicy):
    """Policy for `MaskablePPO` on either environment.

    Pass ``policy_kwargs={"config": NetworkConfig(), "bank": GraphBank(instances), "features": RefinementEnv.FEATURES}`` with
    the instances of the environment, in its order. Only `features` is required; `bank` is needed by networks with message
    passing.
    """


class UnmaskedPlacerPolicy(_NetworkPolicy, MultiInputActorCriticPolicy):
    """The same for on-policy algorithms without masks (`PPO`, `A2C`, `TRPO`): they must learn what is illegal."""
