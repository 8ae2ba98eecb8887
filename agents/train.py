"""Training a placer: warm start from the planners, then stock `MaskablePPO`.

A run folder is a checkpoint (`rlplace.agents.checkpoint`) plus ``optimizer.safetensors`` and TensorBoard logs, rewritten every
`save_every` steps and at Ctrl-C, so that a run can be cut anywhere and resumed.
"""

from __future__ import annotations

import dataclasses
import platform
import sys
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import sb3_contrib
import torch
from sb3_contrib import MaskablePPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import configure
from stable_baselines3.common.vec_env import DummyVecEnv, VecMonitor

import rlplace
from rlplace.agents.bank import GraphBank
from rlplace.agents.checkpoint import Checkpoint, load_optimizer, load_weights, make_folder, save_checkpoint, save_optimizer
from rlplace.agents.network import NetworkConfig
from rlplace.agents.policy import PlacerPolicy
from rlplace.agents.warmstart import collect, imitate
from rlplace.envs.instance import Instance, make_instances
from rlplace.envs.placement import PlacementEnv
from rlplace.envs.refinement import RefinementEnv
from rlplace.errors import InputError, unknown_name
from rlplace.files import read_json
from rlplace.problem import Problem

ENVIRONMENTS = {"placement": "rlplace/Placement-v0", "refinement": "rlplace/Refinement-v0"}


@dataclass(frozen=True)
class TrainConfig:
    """Everything that decides a training, read from ``hyperparams/<environment>.toml``.

    Attributes:
        environment: ``placement`` or ``refinement``.
        steps: PPO decisions in all.
        envs: Environments side by side.
        rollout: Decisions per environment between updates.
        batch_size, epochs, learning_rate, gamma, gae_lambda, clip_range, entropy: PPO's own.
        warm_states, warm_epochs: Size of the warm start; 0 states leaves it out.
        hidden, layers: Network sizes.
        save_every: Decisions between checkpoints.
        seed: Seed of everything random.
        device: torch device of the network, or ``auto``.
    """

    environment: str
    steps: int
    envs: int
    rollout: int
    batch_size: int
    epochs: int
    learning_rate: float
    gamma: float
    gae_lambda: float
    clip_range: float
    entropy: float
    warm_states: int
    warm_epochs: int
    hidden: int
    layers: int
    save_every: int
    seed: int = 0
    device: str = "auto"

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


def train(
    problems: Sequence[Problem],
    config: TrainConfig,
    out: str | Path,
    *,
    start: Checkpoint | None = None,
    resume: bool = False,
    problem_set: str = "given problems",
    progress_bar: bool = False,
    report: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
) -> int:
    """Trains and writes a run folder.

    Args:
        problems: What to train on.
        config: Hyperparameters.
        out: Run folder.
        start: Checkpoint whose weights to start from, instead of a warm start.
        resume: Continue the run in `out` up to ``config.steps``.
        problem_set: Name of the set, for the card.
        progress_bar: Show a progress bar on stderr.
        report: Called with lines that tell what happens.

    Returns:
        PPO decisions done in all. Less than ``config.steps`` after Ctrl-C, which saves and returns.
    """
    torch.set_num_threads(1)
    out = Path(out)
    make_folder(out)
    report(f"preparing {len(problems)} problems (the best classical plan of each is the reference)")
    instances = make_instances(problems)
    if config.environment == "refinement":
        instances = [instance for instance in instances if instance.problem.num_devices > 1]
    if not instances:
        raise InputError("no problem to train on; refinement needs problems with at least two devices")
    model = _make_model(instances, config)
    policy = model.policy
    assert isinstance(policy, PlacerPolicy)
    done, warm = 0, "none"
    if resume:
        done = _resume(model, out)
        warm = "earlier in this run"
    elif start is not None:
        if start.network.config != policy.network.config:
            raise InputError("the checkpoint's network has other sizes than the hyperparameters ask for")
        policy.network.load_state_dict(start.network.state_dict())
        warm = f"weights of {start.name}"
    elif config.warm_states > 0:
        report(f"warm start on {config.warm_states} states")
        env = make_env(config.environment, instances, "mixed")
        data = collect(env, config.warm_states, config.seed)
        before, after = imitate(
            policy, data, epochs=config.warm_epochs, batch_size=config.batch_size, learning_rate=1e-3, seed=config.seed
        )
        warm = f"{config.warm_states} states, divergence {before:.3f} to {after:.3f} on states not fitted"
        report(f"warm start: {warm}")
    model.set_logger(configure(str(out / "tensorboard"), ["tensorboard"]))
    saver = _Saver(config, out, done, warm, problem_set, len(instances), progress_bar, report)
    try:
        model.learn(total_timesteps=max(config.steps - done, 0), callback=saver, reset_num_timesteps=not resume)
    except KeyboardInterrupt:
        report("interrupted; saving what was learned")
        saver.interrupted = True
    finally:
        saver.close()
    saver.save(model)
    return model.num_timesteps


def make_env(environment: str, instances: Sequence[Instance], start: str) -> PlacementEnv | RefinementEnv:
    """One environment over the instances."""
    if environment == "placement":
        return PlacementEnv(instances)
    return RefinementEnv(instances, start=start)


def _make_model(instances: list[Instance], config: TrainConfig) -> MaskablePPO:
    envs = VecMonitor(
        DummyVecEnv([lambda: make_env(config.environment, instances, "mixed")] * config.envs),
        info_keywords=("feasible",),
    )
    return MaskablePPO(
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
        seed=config.seed,
        device=config.device,
        policy_kwargs={"config": NetworkConfig(config.hidden, config.layers), "bank": GraphBank(instances)},
    )


def _resume(model: MaskablePPO, out: Path) -> int:
    policy = model.policy
    assert isinstance(policy, PlacerPolicy)
    config = read_json(out / "config.json", "rlplace.checkpoint", 1)
    load_weights(policy.network, out / "policy.safetensors")
    load_optimizer(out / "optimizer.safetensors", policy.optimizer)
    done = int(config["training"].get("steps_done", 0))
    model.num_timesteps = done
    model.set_random_seed(int(config["training"].get("seed", 0)) + done)  # another stream than the first part had
    return done


class _Saver(BaseCallback):
    """Logs placement figures, saves the run, shows the progress bar."""

    def __init__(
        self,
        config: TrainConfig,
        out: Path,
        done: int,
        warm: str,
        problem_set: str,
        problems: int,
        progress_bar: bool,
        report: Callable[[str], None],
    ) -> None:
        super().__init__()
        self.config, self.out, self.warm, self.problem_set, self.problems = config, out, warm, problem_set, problems
        self.interrupted = False
        self.report = report
        self._first = self._last_save = done
        self._begin = time.perf_counter()
        self._ratios: list[float] = []
        self._bar: Any = None
        if progress_bar:
            from tqdm import tqdm

            self._bar = tqdm(total=config.steps, initial=done, unit="step", file=sys.stderr)

    def _on_step(self) -> bool:
        for info, over in zip(self.locals["infos"], self.locals["dones"], strict=True):
            if over and "vs_best_baseline" in info:
                self._ratios.append(info["vs_best_baseline"])
        if self._bar is not None:
            self._bar.update(self.training_env.num_envs)
        return True

    def _on_rollout_end(self) -> None:
        if self._ratios:
            self.logger.record("placement/vs_best_baseline", float(np.exp(np.mean(np.log(self._ratios[-200:])))))
        if self.num_timesteps - self._last_save >= self.config.save_every:
            self.save(self.model)
            if self._bar is None:
                self.report(self._progress())

    def _progress(self) -> str:
        seconds = time.perf_counter() - self._begin
        rate = (self.num_timesteps - self._first) / seconds
        left = (self.config.steps - self.num_timesteps) / max(rate, 1e-9)
        ratio = f", step time {np.exp(np.mean(np.log(self._ratios[-200:]))):.4f} of best" if self._ratios else ""
        return f"{self.num_timesteps}/{self.config.steps} decisions, {rate:.0f} a second, {left:.0f} s left{ratio}"

    def save(self, model: Any) -> None:
        """Writes checkpoint and optimizer."""
        self._last_save = model.num_timesteps
        training = {
            "steps_done": model.num_timesteps,
            "seed": self.config.seed,
            "problem_set": self.problem_set,
            "problems": self.problems,
            "warm_start": self.warm,
            "interrupted": self.interrupted,
            "hyperparameters": asdict(self.config),
            "versions": _versions(),
        }
        environment = ENVIRONMENTS[self.config.environment]
        card = _card(self.out.name, environment, training, time.perf_counter() - self._begin)
        save_checkpoint(self.out, model.policy.network, environment=environment, training=training, card=card)
        save_optimizer(self.out / "optimizer.safetensors", model.policy.optimizer)

    def close(self) -> None:
        """Ends the progress bar."""
        if self._bar is not None:
            self._bar.close()


def _versions() -> dict[str, str]:
    return {
        "rlplace": rlplace.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gymnasium": gymnasium.__version__,
        "sb3-contrib": sb3_contrib.__version__,
        "numpy": np.__version__,
    }


def _card(name: str, environment: str, training: dict[str, Any], seconds: float) -> str:
    versions = ", ".join(f"{key} {value}" for key, value in training["versions"].items())
    return "\n".join(
        [
            f"# Agent {name}",
            "",
            f"- environment: {environment}",
            f"- trained on: {training['problem_set']}, {training['problems']} problems",
            f"- warm start: {training['warm_start']}",
            f"- PPO decisions: {training['steps_done']} (seed {training['seed']}), last part {seconds:.0f} s",
            f"- versions: {versions}",
            "- reproduce: `rlplace train` with the hyperparameters in config.json",
            "- license: Apache-2.0",
            "",
        ]
    )
