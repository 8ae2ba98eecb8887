"""Times Refinement-v0: steps per second of one thread, and microseconds of the parts of a step.

    python benchmarks/refinement.py [--model hf:gpt2] [--groups 128] [--cluster a100-80g:4]

Moves are drawn at random among the legal ones; step times do not matter here.
"""

from __future__ import annotations

import argparse
import os
import time
import timeit

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from rlplace.cluster.parse import parse
from rlplace.cost.price import price
from rlplace.envs.instance import make_instance
from rlplace.envs.moves import propose
from rlplace.envs.observation import features, placed_state
from rlplace.envs.refinement import RefinementEnv
from rlplace.graph.capture import capture
from rlplace.planners.common.bottleneck import ranked_moves
from rlplace.simulator import Simulator, simulate
from rlplace.zoo import load_model


def steps_per_second(env: RefinementEnv, seed: int, steps: int) -> float:
    rng = np.random.default_rng(seed)
    env.reset(seed=seed)
    begin = time.process_time()
    for _ in range(steps):
        legal = np.flatnonzero(env.action_masks())
        _, _, done, _, _ = env.step(int(rng.choice(legal[1:])) if len(legal) > 1 else 0)
        if done:
            env.reset()
    return steps / (time.process_time() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="hf:gpt2")
    parser.add_argument("--groups", type=int, default=128)
    parser.add_argument("--cluster", default="a100-80g:4")
    args = parser.parse_args()
    model = load_model(args.model, batch=8, seq=512, dtype="fp32")
    graph = capture(model.module, model.example_inputs, loss=model.loss, optimizer="adam", name=model.name)
    problem = price(graph, parse(args.cluster), groups=args.groups)
    instance = make_instance(problem)
    env = RefinementEnv([instance], start="mixed")
    steps_per_second(env, 0, 200)
    rates = [steps_per_second(env, seed, 1500) for seed in (1, 2, 3)]
    print(f"{problem.name}: {problem.num_ops} tasks, {problem.num_groups} groups, {problem.num_devices} devices")
    print(f"{max(rates):.0f} steps/s")
    plan, rng, simulator = instance.floor, np.random.default_rng(0), Simulator(problem)
    line = simulate(problem, plan)
    state = placed_state(instance, line, plan)
    moves = propose(instance, line, plan, state.tightness, rng, 31)
    parts = {
        "Simulator.evaluate": lambda: simulator.evaluate(plan),
        "simulate": lambda: simulate(problem, plan),
        "placed_state": lambda: placed_state(instance, line, plan),
        "propose": lambda: propose(instance, line, plan, state.tightness, rng, 31),
        "of it ranked_moves": lambda: ranked_moves(problem, line, plan, limit=15),
        "features": lambda: features(instance, state, moves),
    }
    for name, function in parts.items():
        print(f"{name:20s} {min(timeit.repeat(function, number=200, repeat=5)) / 200 * 1e6:7.1f} us")


if __name__ == "__main__":
    main()
