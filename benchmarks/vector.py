"""Decisions a second of vector environments, beside the same environments in SyncVectorEnv and AsyncVectorEnv.

    python -m benchmarks.vector                    two minutes on two idle cores

Actions are drawn among the legal ones. *Bare* is the simulator alone on the same problems, `simulate_many` on two threads:
what a refinement step cannot beat, since each simulates once. *SB3* is the vector environment inside `PlacerVecEnv`.
"""

from __future__ import annotations

import time
from functools import partial

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import arguments, markdown, one_thread
from rlplace.agents.policy import PlacerVecEnv
from rlplace.envs import PlacementEnv, PlacementInstance, RefinementEnv, make_instance
from rlplace.problem.generate import random_problem
from rlplace.simulator import simulate_many

KINDS = {
    "Placement": (PlacementEnv, {}),
    "Refinement": (RefinementEnv, {}),
    "Refinement, keep=better": (RefinementEnv, {"keep": "better"}),
}


def problems(ops: int) -> list[PlacementInstance]:
    """Makes eight problems of about as many ops: branchy and chain-like, two to eight devices."""
    rows = [(shape, devices) for shape in ("layered", "towers") for devices in (2, 4, 4, 8)]
    return [
        make_instance(random_problem(seed, num_groups=max(8, ops // 3), num_devices=devices, shape=shape))
        for seed, (shape, devices) in enumerate(rows)
    ]


def legal(masks: NDArray[np.bool_], rng: np.random.Generator, first: int) -> NDArray[np.int64]:
    """Draws a legal action of each row, from number `first` on where there is one."""
    weights = rng.random(masks.shape) * masks
    weights[:, :first] *= 1e-9
    return np.argmax(weights, axis=1)


def rate(envs: gym.vector.VectorEnv, masks: object, first: int, seconds: float) -> float:
    """Counts decisions a second of wall time."""
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


def wrapped_rate(envs: gym.vector.VectorEnv, first: int, seconds: float) -> float:
    """Counts decisions a second of the environments inside `PlacerVecEnv`."""
    wrapped = PlacerVecEnv(envs)
    wrapped.reset()
    rng, begin, done = np.random.default_rng(0), time.perf_counter(), 0
    while time.perf_counter() < begin + seconds:
        wrapped.step(legal(np.stack(wrapped.env_method("action_masks")), rng, first))
        done += envs.num_envs
    return done / (time.perf_counter() - begin)


def bare_rate(bank: list[PlacementInstance], seconds: float) -> float:
    """Counts simulations a second."""
    rng, calls = np.random.default_rng(0), 0
    plans = [rng.integers(0, one.problem.num_devices, (256, one.problem.num_groups)) for one in bank]
    begin = time.perf_counter()
    while time.perf_counter() < begin + seconds:
        for one, rows in zip(bank, plans, strict=True):
            simulate_many(one.problem, rows, threads=2)
            calls += len(rows)
    return calls / (time.perf_counter() - begin)


def rates(name: str, ops: int, envs: int, seconds: float, alone: bool) -> list[str]:
    """Measures one environment at one size: a row of the table."""
    (kind, options), bank = KINDS[name], problems(ops)
    first = int(kind is RefinementEnv)
    words = {"num_envs": envs, "problems": bank, "autoreset_mode": "SameStep", **options}
    vector = gym.make_vec(f"rlplace/{name.partition(',')[0]}-v0", **words)
    figures = [rate(vector, vector.action_masks, first, seconds), wrapped_rate(vector, first, seconds)]
    for vectorised, count in () if alone else ((gym.vector.SyncVectorEnv, 16), (gym.vector.AsyncVectorEnv, 2)):
        rivals = vectorised([partial(kind, bank, **options)] * count)
        figures.append(rate(rivals, lambda rivals=rivals: np.stack(rivals.call("action_masks")), first, seconds))
        rivals.close()
    sizes = f"{np.mean([one.problem.num_ops for one in bank]):.0f}"
    return [name, sizes, *(f"{figure:,.0f}" for figure in (*figures, bare_rate(bank, seconds)))]


if __name__ == "__main__":
    options = arguments(
        __doc__,
        ops=((100, 300, 1000), "sizes"),
        envs=(256, "environments side by side"),
        seconds=(4.0, "of every figure"),
        alone="leave the rivals out",
    )
    one_thread()
    heads = ["environment", "ops", "vector", "SB3", *([] if options.alone else ["sync", "async"]), "bare simulations"]
    shown = (options.envs, options.seconds, options.alone)
    print(markdown(heads, [rates(name, ops, *shown) for name in KINDS for ops in options.ops]))
