"""`TrainConfig`: everything that decides a training, and the environments that can be trained in."""

from __future__ import annotations

import dataclasses
import tomllib
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from rlplace.agents.network import NetworkConfig
from rlplace.errors import InputError, show, unknown_name
from rlplace.files import finite_number

ENVIRONMENTS = {"placement": "rlplace/Placement-v0", "refinement": "rlplace/Refinement-v0"}


MAX_HIDDEN, MAX_LAYERS = 4096, 64
"""Largest network, in widths and rounds of message passing."""

_MOST = 1 << 53
_LEAST_1 = ("cases", "part", "part_cases", "envs", "rollout", "batch_size", "epochs", "hidden", "second")
_RANGES: dict[str, tuple[float, float]] = {
    "hidden": (1, MAX_HIDDEN),
    "second": (1, MAX_HIDDEN),
    "layers": (0, MAX_LAYERS),
    "envs": (1, 4096),
    "gamma": (0, 1),
    "gae_lambda": (0, 1),
    "learning_rate": (1e-12, 10),
    "clip_range": (1e-12, 10),
    "entropy": (0, 100),
    "seed": (0, (1 << 63) - 1),
}


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
        for field in dataclasses.fields(TrainConfig):
            if field.name in values:
                _check(field.name, str(field.type), values[field.name])
        return TrainConfig(**{"environment": environment, **values})


def _check(name: str, kind: str, value: Any) -> None:
    """Refuses a value of another type or out of range: hyperparameters also come from the config of a run that is resumed."""
    where = f"hyperparameter {name}"
    if kind == "str":
        if not isinstance(value, str):
            raise InputError(f"{where}: expected text, found {show(value)}")
        return
    if kind == "int" and (isinstance(value, bool) or not isinstance(value, int)):
        raise InputError(f"{where}: expected a whole number, found {show(value)}")
    least, most = _RANGES.get(name, (1 if name in _LEAST_1 else 0, _MOST))
    if not least <= finite_number(value, where) <= most:
        raise InputError(f"{where}: {show(value)} is outside {least:g}..{most:g}")
