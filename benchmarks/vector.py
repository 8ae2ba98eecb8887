"""Decisions a second of vector environments, beside the same environments in SyncVectorEnv and AsyncVectorEnv.

    python benchmarks/vector.py                    two minutes on two idle cores

Actions are drawn among the legal ones. *Bare* is the simulator alone on the same problems, `simulate_many` on two threads:
what a refinement step cannot beat, since each simulates once. *SB3* is the vector environment inside `PlacerVecEnv`.
"""

from __future__ import annotations

import argparse
import os
import time
from functools import partial

os.environ.setdefault("OMP_NUM_THREADS", "1")

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from rlplace.agents.policy import PlacerVecEnv
from rlplace.envs import Instance, PlacementEnv, RefinementEnv, make_instance
from rlplace.problem.generate import random_problem
from rlplace.simulator import simulate_many

KINDS = {
    "Placement": (PlacementEnv, {}),
    "Refinement": (RefinementEnv, {}),
    "Refinement, keep=better": (RefinementEnv, {"keep": "better"}),
}


def problems(ops: int) -> list[Instance]:
    """Eight problems of about as many ops: branchy and chain-like, two to eight devices."""
    rows = [(shape, devices) for shape in ("layered", "towers") for devices in (2, 4, 4, 8)]
    return [
        make_instance(random_problem(seed, num_groups=max(8, ops // 3), num_devices=devices, shape=shape))
        for seed, (shape, devices) in enumerate(rows)
    ]


def legal(masks: NDArray[np.bool_], rng: np.random.Generator, first: int) -> NDArray[np.int64]:
    """A legal action of each row, from number `first` on where there is one."""
    weights = rng.random(masks.shape) * masks
    weights[:, :first] *= 1e-9
    return np.argmax(weights, axis=1)


def rate(envs: gym.vector.VectorEnv, masks: object, first: int, seconds: float) -> float:
    """Decisions a second of wall time."""
    rng = np.random.default_rng(0)
    envs.reset(seed=0)
    for _ in range(3):
        envs.step(legal(masks(), rng, first))  # type: ignore[operator]
    done, begin = 0, time.perf_counter()
    while time.perf_counter() < begin + seconds:
        for _ in range(5):
            envs.step(legal(masks(), rng, first))  # type: ignore[operator]
        done += 5
    return done * envs.num_envs / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", type=int, nargs="+", default=[100, 300, 1000])
    parser.add_argument("--envs", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--only", choices=["vector"], help="leave the rivals out")
    args = parser.parse_args()
    print("| environment | ops | vector | SB3 | sync | async | bare simulations |\n|---|---|---|---|---|---|---|")
    for name, (kind, options) in KINDS.items():
        first = int(kind is RefinementEnv)
        for ops in args.ops:
            bank = problems(ops)
            figures = []
            envs = gym.make_vec(
                f"rlplace/{name.partition(',')[0]}-v0", num_envs=args.envs, problems=bank, autoreset_mode="SameStep", **options
            )
            figures.append(rate(envs, envs.action_masks, first, args.seconds))
            wrapped = PlacerVecEnv(envs)
            wrapped.reset()
            rng, begin, done = np.random.default_rng(0), time.perf_counter(), 0
            while time.perf_counter() < begin + args.seconds:
                wrapped.step(legal(np.stack(wrapped.env_method("action_masks")), rng, first))
                done += args.envs
            figures.append(done / (time.perf_counter() - begin))
            if args.only is None:
                for vectorised, count in ((gym.vector.SyncVectorEnv, 16), (gym.vector.AsyncVectorEnv, 2)):
                    rivals = vectorised([partial(kind, bank, **options)] * count)
                    figures.append(
                        rate(rivals, lambda rivals=rivals: np.stack(rivals.call("action_masks")), first, args.seconds)
                    )
                    rivals.close()
            rng, calls, begin = np.random.default_rng(0), 0, time.perf_counter()
            plans = [rng.integers(0, one.problem.num_devices, (256, one.problem.num_groups)) for one in bank]
            begin = time.perf_counter()
            while time.perf_counter() < begin + args.seconds:
                for one, rows in zip(bank, plans, strict=True):
                    simulate_many(one.problem, rows, threads=2)
                    calls += len(rows)
            figures.append(calls / (time.perf_counter() - begin))
            sizes = f"{np.mean([one.problem.num_ops for one in bank]):.0f}"
            print(f"| {name} | {sizes} | " + " | ".join(f"{figure:,.0f}" for figure in figures) + " |", flush=True)


if __name__ == "__main__":
    main()
