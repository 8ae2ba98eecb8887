"""`TrainConfig`: everything that decides a training, and the environments that can be trained in."""

from __future__ import annotations

import dataclasses
import tomllib
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from rlplace.agents.network import NetworkConfig
from rlplace.errors import unknown_name

ENVIRONMENTS = {"placement": "rlplace/Placement-v0", "refinement": "rlplace/Refinement-v0"}


def features_of(environment: str) -> tuple[str, ...]:
    """Names of the candidates' features in ``placement`` or ``refinement``."""
    if environment == "placement":
        from rlplace.envs.construction import CONSTRUCTION_FEATURES

        return CONSTRUCTION_FEATURES
    from rlplace.envs.guide.features import FEATURES

    return FEATURES


@dataclass(frozen=True)
class TrainConfig:
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
        seed: Of everything random.
        device: torch device of PPO, or ``auto``.
        processes: That collect labels; 0: one a core.
    """

    environment: str
    cases: int
    states: int
    moves: int
    fit_steps: int
    steps: int
    part: int
    part_cases: int
    envs: int
    rollout: int
    batch_size: int
    epochs: int
    learning_rate: float
    gamma: float
    gae_lambda: float
    clip_range: float
    entropy: float
    hidden: int
    second: int
    layers: int
    seed: int = 0
    device: str = "auto"
    processes: int = 0

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
        known = {field.name for field in dataclasses.fields(TrainConfig)}
        for key in values:
            if key not in known:
                raise unknown_name("hyperparameter", key, known)
        return TrainConfig(**{"environment": environment, **values})
