"""The baselines of agents/zoo: stock algorithms, random play, heuristics and searches on the same unseen problems.

    python -m benchmarks.zoo                                          all that has no rows yet, ten minutes on a core
    python -m benchmarks.zoo --algo a2c dqn --env Toy --seeds 0       trains these again and replaces their rows
    python -m benchmarks.zoo --table                                  writes docs/agent/baselines.md from the rows

Learned policies play one greedy episode a problem. In Toy an episode builds a plan and is compared with the optimum; in
Refinement it makes up to 24 moves from the plan of `best` and is compared with that; searches get as many simulations (24) from
the same start, so that all see the same number of plans.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
import yaml
from numpy.typing import NDArray
from safetensors.torch import save_file
from sb3_contrib import MaskablePPO
from stable_baselines3 import A2C, DQN, PPO
from stable_baselines3.common.callbacks import BaseCallback

from benchmarks.harness import ROOT, Row, arguments, geometric, markdown, read_rows, write_rows
from benchmarks.lns import lns
from rlplace.agents.checkpoint import versions
from rlplace.agents.policy import PlacerPolicy, PlacerVecEnv, UnmaskedPlacerPolicy
from rlplace.envs import PlacementEnv, PlacementInstance, RefinementEnv, make_instance
from rlplace.envs.toy import UNSEEN, toy_instances
from rlplace.errors import InfeasibleError
from rlplace.placement import get_planner
from rlplace.problem.generate import random_problem

ZOO, ROWS, PAGE = ROOT / "agents" / "zoo", Path(__file__).with_suffix(".rows.jsonl"), ROOT / "docs" / "agent" / "baselines.md"
ALGORITHMS: dict[str, Any] = {"maskable_ppo": MaskablePPO, "ppo": PPO, "a2c": A2C, "dqn": DQN}
POLICIES: dict[str, Any] = {"PlacerPolicy": PlacerPolicy, "UnmaskedPlacerPolicy": UnmaskedPlacerPolicy}
CLASSICAL = {
    "Toy": ("random play", "heft", "m_etf", "best", "annealing", "lns"),
    "Refinement": ("random play", "best", "annealing", "local_search", "lns"),
}
KINDS: dict[str, Any] = {"Toy": PlacementEnv, "Refinement": RefinementEnv}
CALLS, SEEDS = 24, (0, 1, 2)
LOOKS = 8  # points of a curve


@cache
def problems(env: str, split: str) -> tuple[PlacementInstance, ...]:
    """Problems to train on, or those that nothing is trained on."""
    if env == "Toy":
        return toy_instances(*((0, 256) if split == "train" else (UNSEEN, 64)))
    first, shapes = (0, 32) if split == "train" else (UNSEEN, 24), ("branchy", "layered", "towers", "wavefront")
    numbers = range(first[0], first[0] + first[1])
    made = [
        random_problem(number, num_groups=24 + 8 * (number % 5), num_devices=2 + 2 * (number % 3), shape=shapes[number % 4])
        for number in numbers
    ]
    return tuple(make_instance(problem) for problem in made)


def sizes(env: str) -> dict[str, int]:
    """Returns sizes of the spaces that hold both splits."""
    both = [one.problem for split in ("train", "test") for one in problems(env, split)]
    return {"max_groups": max(one.num_groups for one in both), "max_devices": max(one.num_devices for one in both)}


def played(env: str, choose: Callable[[Any, NDArray[np.bool_]], int]) -> list[float]:
    """Plays an episode on each unseen problem: step time over the reference's, inf where the plan does not fit."""
    play = KINDS[env](problems(env, "test"), **sizes(env))
    over = []
    for number in range(len(play.instances)):
        seen, _ = play.reset(seed=0, options={"problem": number})
        done = False
        while not done:
            seen, _, done, _, info = play.step(choose(seen, play.action_masks()))
        over.append(info.get("vs_best_baseline", np.inf))
    return over


def searched(env: str, name: str, seed: int) -> list[float]:
    """Plans every unseen problem: step times over the reference's."""
    over = []
    for instance in problems(env, "test"):
        options: dict[str, Any] = {"calls": CALLS, "seed": seed} if name in ("annealing", "local_search", "lns") else {}
        if options and env == "Refinement":
            options["start"] = instance.floor
        try:
            planner = lns if name == "lns" else get_planner(name)
            over.append(planner(instance.problem, **options).predicted.step_time_s / instance.reference_step_time_s)
        except InfeasibleError:
            over.append(np.inf)
    return over


class Curve(BaseCallback):
    """Mean reward of episodes, by decisions."""

    def __init__(self, total: int) -> None:
        super().__init__()
        self.points: list[tuple[int, float]] = []
        self._every, self._won, self._ended = total // LOOKS, np.zeros(0), []

    def _on_step(self) -> bool:
        if not len(self._won):
            self._won = np.zeros(self.training_env.num_envs)
        self._won += self.locals["rewards"]
        over = np.flatnonzero(self.locals["dones"])
        self._ended += self._won[over].tolist()
        self._won[over] = 0.0
        if self.num_timesteps >= (len(self.points) + 1) * self._every and self._ended:
            self.points.append((self.num_timesteps, round(float(np.mean(self._ended)), 4)))
            self._ended = []
        return True


def trained(algo: str, env: str, seed: int) -> tuple[list[float], dict[str, Any]]:
    """Trains, writes card and weights, and plays; returns what was reached and facts of the training."""
    settings = yaml.safe_load((ZOO / f"{algo}.yml").read_text())[env]
    options = dict(settings)
    count, total, policy = options.pop("n_envs"), options.pop("n_timesteps"), options.pop("policy")
    kind = KINDS[env]
    vector = gym.make_vec(
        f"rlplace/{env}-v0",
        num_envs=count,
        problems=problems(env, "train"),
        autoreset_mode="SameStep",
        **sizes(env),
        **({"start": "mixed"} if env == "Refinement" else {}),
    )
    if policy in POLICIES:
        options["policy_kwargs"] = {"features": kind.FEATURES}
    torch.set_num_threads(1)
    model = ALGORITHMS[algo](POLICIES.get(policy, policy), PlacerVecEnv(vector), seed=seed, device="cpu", **options)
    begin, curve = time.monotonic(), Curve(total)
    model.learn(total, callback=curve)
    seconds = time.monotonic() - begin
    folder = ZOO / algo / env / f"seed{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    inner = model.policy.network if policy in POLICIES else model.policy
    if seed == SEEDS[0]:  # weights of one seed are kept, cards of all
        save_file({name: value.contiguous() for name, value in inner.state_dict().items()}, folder / "policy.safetensors")

    def choose(seen: Any, mask: NDArray[np.bool_]) -> int:
        words = {"action_masks": mask} if algo == "maskable_ppo" else {}
        action = int(model.predict(seen, deterministic=True, **words)[0])
        return action if mask[action] else int(np.argmax(mask))  # the episode of one that never learned masks goes on

    over = played(env, choose)
    facts = {"decisions": model.num_timesteps, "seconds": round(seconds), "curve": curve.points}
    told = {"environment": env, "seed": seed, **settings, **facts, **versions(), "license": "Apache-2.0"}
    lines = [f"# {algo} on {env}", "", *(f"- {key}: {value}" for key, value in told.items()), ""]
    (folder / "card.md").write_text("\n".join(lines))
    return over, facts


def measure(algos: list[str], envs: list[str], seeds: list[int], again: bool) -> None:
    """Makes the rows that are missing, or all that are named."""
    for env in envs:
        learned_here = [algo for algo in ALGORITHMS if env in yaml.safe_load((ZOO / f"{algo}.yml").read_text())]
        for method, seed in product((*CLASSICAL[env], *learned_here), seeds):
            learned, rows = method in ALGORITHMS, read_rows(ROWS)
            if (learned and method not in algos) or (method in ("heft", "m_etf", "best") and seed):
                continue
            kept = [row for row in rows if (row["env"], row["method"], row["seed"]) != (env, method, seed)]
            if len(kept) < len(rows) and not (again and learned):
                continue
            rng, facts = np.random.default_rng(seed), {}
            if learned:
                over, facts = trained(method, env, seed)
            elif method == "random play":
                over = played(env, lambda seen, mask, rng=rng: int(rng.choice(np.flatnonzero(mask))))
            else:
                over = searched(env, method, seed)
            numbers = [None if value == np.inf else round(value, 6) for value in over]
            write_rows(ROWS, [*kept, {"env": env, "method": method, "seed": seed, "over": numbers, **facts}])
            print(env, method, seed, f"{mean(numbers):.4f}", facts.get("seconds", ""), flush=True)


def mean(over: list[float | None]) -> float:
    """Takes the geometric mean of plans that fit."""
    return geometric([value for value in over if value is not None])


def table() -> str:
    """Makes the page: its text, and the table."""
    text = PAGE.read_text().partition("| environment |")[0]
    found: dict[tuple[str, str], list[Row]] = {}
    for row in read_rows(ROWS):
        found.setdefault((row["env"], row["method"]), []).append(row)
    lines = []
    for (env, method), seeds in sorted(found.items(), key=lambda item: _order(*item)):
        means = [mean(row["over"]) for row in seeds]
        fits = np.mean([value is not None for row in seeds for value in row["over"]])
        between = f"{min(means):.4f}-{max(means):.4f}" if len(means) > 1 else ""
        facts = ["", ""]
        if "decisions" in seeds[0]:
            facts = [f"{seeds[0]['decisions']:,}", f"{np.mean([row['seconds'] for row in seeds]):.0f}"]
        lines.append([env, method, f"{geometric(means):.4f}", between, f"{100 * fits:.0f} %", *facts])
    heads = ["environment", "method", "step time", "seeds", "fits", "decisions", "seconds"]
    return f"{text}{markdown(heads, lines)}\n"


def _order(key: tuple[str, str], seeds: list[Row]) -> tuple[int, float]:
    return list(KINDS).index(key[0]), float(np.mean([mean(row["over"]) for row in seeds]))


if __name__ == "__main__":
    options = arguments(
        __doc__,
        algo=((), "train these again", ALGORITHMS),
        env=(tuple(KINDS), "environments", KINDS),
        seeds=(SEEDS, "of everything"),
        table="only write the page",
    )
    if not options.table:
        measure(options.algo or [*ALGORITHMS], options.env, options.seeds, again=bool(options.algo))
    PAGE.write_text(table())
