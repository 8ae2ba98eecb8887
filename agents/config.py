"""`TrainConfig`: all settings of a training."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from rlplace.agents.policies import BUILT_IN, check_environment, default_policy, policy_class
from rlplace.envs.base import REFINEMENT
from rlplace.records import Record, build

MAX_HIDDEN = 4096
"""Largest network, in widths."""

_Count = Annotated[int, Meta(ge=1, le=1 << 53)]
_Steps = Annotated[int, Meta(ge=0, le=1 << 53)]
_Width = Annotated[int, Meta(ge=1, le=MAX_HIDDEN)]
_Share = Annotated[float, Meta(ge=0, le=1)]
_Positive = Annotated[float, Meta(ge=1e-12, le=10)]


class TrainConfig(Record, frozen=True):
    """Settings of a training; the defaults are in ``hyperparams``, a file an environment.

    Attributes:
        cases: Cases of the data set of pre-training.
        states, moves: Plans of a case, and moves priced from each; in Placement-v0 their product is the simulations of the
            search whose best plan is cloned.
        fit_steps: Steps of pre-training; 0 leaves it out.
        steps: PPO decisions in all; 0 leaves PPO out.
        part: PPO decisions between saves; every part has new problems.
        part_cases: Problems of a part.
        envs: Environments side by side. rollout: Decisions per environment between updates.
        batch_size, epochs, learning_rate, gamma, gae_lambda, clip_range, entropy: of PPO; the learning rate falls.
        hidden, second: Sizes of the built-in policies, see `PlacerNetwork` and `GraphNetwork`.
        policy: Name of the policy, see `rlplace.agents.policies`.
        environment: Id of the environment, with or without ``rlplace/``.
        settings: Other settings of the policy.
        features: Columns of a candidate that the policy reads; none: all of its environment.
        seed: Seed of all random choices.
        device: torch device of PPO, or ``auto``.
        processes: Number of processes that collect the data set; 0: one a core.
    """

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
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0
    policy: str = BUILT_IN[0]
    environment: str = REFINEMENT
    settings: dict[str, bool | int | float | str] = msgspec.field(default_factory=dict)
    features: tuple[str, ...] = ()
    device: str = "auto"
    processes: _Steps = 0

    def settings_of(self) -> dict[str, Any]:
        """Returns the settings of the policy."""
        sizes = {"hidden": self.hidden, "second": self.second} if self.policy in BUILT_IN else {}
        return {**sizes, **self.settings}

    @staticmethod
    def load(**changes: Any) -> TrainConfig:
        """Returns the shipped hyperparameters of an environment, with changes (None leaves a value).

        Without `environment` it is that of the policy; without `policy` it is the shipped one of the environment.
        """
        policy, environment = changes.get("policy"), changes.get("environment")
        environment = (
            f"rlplace/{str(environment).removeprefix('rlplace/')}"
            if environment
            else policy_class(policy or BUILT_IN[0]).environment
        )
        policy = policy or default_policy(environment)
        check_environment(policy, environment)
        name = f"{environment.removeprefix('rlplace/').partition('-')[0].lower()}.toml"
        text = (files("rlplace.agents") / "hyperparams" / name).read_text(encoding="utf-8")
        given = {key: value for key, value in changes.items() if value is not None}
        return build(
            TrainConfig, {**tomllib.loads(text), **given, "policy": policy, "environment": environment}, "hyperparameters"
        )
