"""Scores of stock PPO in `rlplace/Strategy-v0` after a minute or a few of one core: the table in docs/agent/environments.md.

    python -m benchmarks.strategy_env [--split train] [--seeds 3] [--seconds 60]

Scores are the mean log of the step time of
the best strategy of an episode over that of the classical search; players meet the same starts, random uniform strategies.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from sb3_contrib import MaskablePPO
from stable_baselines3.common.vec_env import DummyVecEnv

from benchmarks.harness import arguments, one_thread
from rlplace.agents.policy import PlacerPolicy
from rlplace.agents.problems.questions import DEALT, strategy_questions
from rlplace.envs import StrategyEnv
from rlplace.envs.cluster import default_questions

ENVS, STEPS, EPISODES = 8, 64, 60
Player = Callable[[StrategyEnv, Any], int]


def scores(env: StrategyEnv, player: Player) -> np.ndarray:
    """Plays episodes: float64 [`EPISODES`], the final score of each episode."""
    found = []
    for episode in range(EPISODES):
        observation, _ = env.reset(seed=10_000 + episode, options={"problem": episode % len(env.boards)})
        over, info = False, {}
        while not over:
            observation, _, over, _, info = env.step(player(env, observation))
        found.append(np.log(info["vs_best_baseline"]))
    return np.array(found)


def chance(stops: bool) -> Player:
    """Takes a legal action at random, or a legal move where there is one."""
    rng = np.random.default_rng(0)

    def choose(env: StrategyEnv, observation: Any) -> int:
        legal = np.flatnonzero(env.action_masks())
        return int(rng.choice(legal if stops or len(legal) == 1 else legal[1:]))

    return choose


def greedy(stops: bool) -> Player:
    """Takes the move that lowers the score most, or rises it least where it is not to stop."""

    def choose(env: StrategyEnv, observation: Any) -> int:
        gains = env.move_scores()
        return int(gains.argmax()) if stops or not np.isfinite(gains[1:]).any() else 1 + int(gains[1:].argmax())

    return choose


def learned(model: MaskablePPO) -> Player:
    return lambda env, observation: int(model.predict(observation, action_masks=env.action_masks())[0])


def main() -> None:
    """Prints a row for every player and training."""
    chosen = arguments(
        __doc__,
        split=(None, "default: the questions that need no split", DEALT),
        seeds=(3, "trainings"),
        seconds=(60.0, "of the processor, for each seed"),
    )
    one_thread()
    asked = default_questions() if chosen.split is None else strategy_questions(chosen.split)
    env = StrategyEnv(asked, start="random")
    rows = {"chance": chance(True), "chance, no stop": chance(False), "greedy": greedy(True), "greedy, no stop": greedy(False)}
    for name, player in rows.items():
        print(f"| {name} | {scores(env, player).mean():.3f} |", flush=True)
    for seed in range(chosen.seeds):
        envs = DummyVecEnv([lambda: StrategyEnv(asked, start="random")] * ENVS)
        model = MaskablePPO(
            PlacerPolicy, envs, n_steps=STEPS, batch_size=128, n_epochs=4, learning_rate=1e-3, ent_coef=0.005, seed=seed,
            policy_kwargs={"features": StrategyEnv.FEATURES},
        )  # fmt: skip
        before, began, decisions = scores(env, learned(model)).mean(), time.process_time(), 0
        while time.process_time() - began < chosen.seconds:
            decisions += 8 * ENVS * STEPS
            model.learn(8 * ENVS * STEPS, reset_num_timesteps=False)
        rate = decisions / (time.process_time() - began)
        after = scores(env, learned(model)).mean()
        print(
            f"| PPO, seed {seed} | {before:.3f} untrained, {after:.3f} after {decisions:,} decisions, {rate:.0f} a second |",
            flush=True,
        )


if __name__ == "__main__":
    main()
