"""`TrainConfig`: everything that decides a training, and the environments that can be trained in."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from typing import Annotated, Any, Literal

from msgspec import Meta

from rlplace.agents.network import NetworkConfig
from rlplace.errors import InputError, unknown_name
from rlplace.records import Record, build

ENVIRONMENTS = {"placement": "rlplace/Placement-v0", "refinement": "rlplace/Refinement-v0"}


MAX_HIDDEN, MAX_LAYERS = 4096, 64
"""Largest network, in widths and rounds of message passing."""

_Count = Annotated[int, Meta(ge=1, le=1 << 53)]
_Steps = Annotated[int, Meta(ge=0, le=1 << 53)]
_Width = Annotated[int, Meta(ge=1, le=MAX_HIDDEN)]
_Share = Annotated[float, Meta(ge=0, le=1)]
_Positive = Annotated[float, Meta(ge=1e-12, le=10)]


def features_of(environment: str) -> tuple[str, ...]:
    """Names of the candidates' features in ``placement`` or ``refinement``."""
    if environment == "placement":
        from rlplace.envs.construction import CONSTRUCTION_FEATURES

        return CONSTRUCTION_FEATURES
    from rlplace.envs.guide.features import FEATURES

    return FEATURES


class TrainConfig(Record, frozen=True):
    """Everything that decides a training, read from ``hyperparams/<environment>.toml``.

    Attributes:
        environment: ``placement`` or ``refinement``.
        cases: Cases that labels are collected from (refinement) or demonstrations (placement).
        states, moves: Labelled plans of a case, and moves priced from each. Refinement only.
        fit_steps: Steps of pre-training; 0 leaves it out.
        steps: PPO decisions in all; 0 leaves PPO out.
        part: PPO decisions between saves; every part has new cases.
        part_cases: Cases of a part.
        envs: Environments side by side. rollout: Decisions per environment between updates.
        batch_size, epochs, learning_rate, gamma, gae_lambda, clip_range, entropy: PPO's own.
        hidden, second, layers: Network sizes, see `NetworkConfig`.
        seed: Seed of everything random.
        device: torch device of PPO, or ``auto``.
        processes: That collect labels; 0: one a core.
    """

    environment: Literal["placement", "refinement"]
    cases: _Count
    states: _Steps
    moves: _Steps
    fit_steps: _Steps
    steps: _Steps
    part: _Count
    part_cases: _Count
    envs: Annotated[int, Meta(ge=1, le=4096)]
    rollout: _Count
    batch_size: _Count
    epochs: _Count
    learning_rate: _Positive
    gamma: _Share
    gae_lambda: _Share
    clip_range: _Positive
    entropy: Annotated[float, Meta(ge=0, le=100)]
    hidden: _Width
    second: _Width
    layers: Annotated[int, Meta(ge=0, le=MAX_LAYERS)]
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0
    device: str = "auto"
    processes: _Steps = 0

    @property
    def network(self) -> NetworkConfig:
        """Sizes of the network."""
        return NetworkConfig(self.hidden, self.second, self.layers)

    @staticmethod
    def load(environment: str, **changes: Any) -> TrainConfig:
        """The shipped hyperparameters of an environment, with changes (None leaves a value)."""
        if environment not in ENVIRONMENTS:
            raise unknown_name("environment", environment, ENVIRONMENTS)
        text = (files("rlplace.agents") / "hyperparams" / f"{environment}.toml").read_text(encoding="utf-8")
        values = {**tomllib.loads(text), **{key: value for key, value in changes.items() if value is not None}}
        config = build(TrainConfig, {"environment": environment, **values}, "hyperparameters")
        if config.layers and environment == "refinement":
            raise InputError("layers: the search of rlplace/Refinement-v0 knows no message passing; leave it 0")
        return config
