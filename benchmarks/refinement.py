"""Times the environments: decisions per second of one thread, and microseconds of the parts of a decision.

    python benchmarks/refinement.py [--model hf:gpt2] [--groups 128] [--cluster a100-80g:4]

Actions are drawn at random among the legal ones; step times do not matter here.
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
from rlplace.envs.base import PlacerEnv
from rlplace.envs.guide.guide import Guide
from rlplace.envs.instance import make_instance
from rlplace.envs.placement import PlacementEnv
from rlplace.envs.refinement import RefinementEnv
from rlplace.model.capture.capture import capture
from rlplace.model.zoo import load_model


def steps_per_second(env: PlacerEnv, seed: int, steps: int) -> float:
    rng = np.random.default_rng(seed)
    env.reset(seed=seed)
    begin = time.process_time()
    for _ in range(steps):
        legal = np.flatnonzero(env.action_masks())
        if isinstance(env, RefinementEnv) and len(legal) > 1:
            legal = legal[1:]
        _, _, done, _, _ = env.step(int(rng.choice(legal)))
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
    tasks = f"{problem.num_ops} ops, {problem.num_groups} groups, {problem.num_devices} devices"
    print(f"{problem.name}: {tasks}")
    for env in (RefinementEnv([instance], start="mixed"), PlacementEnv([instance])):
        steps_per_second(env, 0, 200)
        rates = [steps_per_second(env, seed, 1500) for seed in (1, 2, 3)]
        print(f"{type(env).__name__:20s} {max(rates):7.0f} steps/s")
    plan = instance.floor
    if plan is None:
        raise SystemExit("no plan fits; take a larger cluster")
    guide = Guide(instance, 31, 0)
    guide.look(plan)
    which = np.arange(guide.draw(plan))
    parts = {
        "simulate": (lambda: guide.simulator.evaluate(plan), 1),
        "simulate and analyse": (lambda: guide.look(plan), 1),
        "draw 31 and describe": (lambda: guide.draw(plan), 1),
        "price a move": (lambda: guide.price(plan, which), len(which)),
    }
    for name, (function, count) in parts.items():
        print(f"{name:20s} {min(timeit.repeat(function, number=100, repeat=5)) / 100 / count * 1e6:7.1f} us")


if __name__ == "__main__":
    main()
