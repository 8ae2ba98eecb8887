"""The agent against the classical searches at equal simulator calls, on problems that nothing was trained or tuned on.

Usage: python benchmarks/agent.py [--agent NAME] [--calls 64,256,1024] [--seeds 3]

Problems: five Hugging Face families on four clusters, and twelve branchy random graphs, none of which training, its closing
table or the tuning of the search has seen. Executor ``list``, one micro-batch, simulated; geometric mean of step time over that
of ``best``. The row ``untrained`` is the same search with a network that was never trained, which is the heuristic.
"""

import argparse
import time

import numpy as np
import torch

from rlplace.agents.checkpoint import Checkpoint
from rlplace.agents.network import PlacerNetwork
from rlplace.agents.planner import Agent, load_agent
from rlplace.agents.problems import capture_problems, with_memory
from rlplace.errors import InfeasibleError
from rlplace.planners import get_planner
from rlplace.problem.toys import random_problem

MODELS = (
    ("hf:t5,num_layers=3", 16, 128),
    ("hf:swin", 16, 64),
    ("hf:whisper", 16, 128),
    ("hf:convnext", 16, 64),
    ("hf:mixtral,num_hidden_layers=2,hidden_size=512,intermediate_size=1024,vocab_size=8000", 16, 256),
)
CLUSTERS = ("a100-80g:3,pcie", "v100:4+t4:4", "l4:6", "h100:4x2,ib=200g")


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agent", default="default")
    parser.add_argument("--calls", default="64,256,1024")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    problems = capture_problems(MODELS, CLUSTERS, 31, lambda line: None)
    for seed in range(12):
        problem = random_problem(500_000 + seed, 40 + 10 * seed, 2 + seed % 5, shape="branchy", unlike=seed % 3 == 0)
        problems.append(with_memory(problem, (None, 1.5)[seed % 2]))
    torch.manual_seed(0)
    untrained = Agent(Checkpoint("untrained", PlacerNetwork().eval(), "rlplace/Refinement-v0", {}))
    trained = load_agent(options.agent)
    floors = [_step(get_planner("best"), problem) for problem in problems]
    print(f"{len(problems)} problems, {sum(f is not None for f in floors)} with a feasible floor, {options.seeds} seeds")
    print(f"{'planner':14s} {'calls':>6s} {'vs best':>8s} {'spread':>8s} {'feasible':>9s} {'seconds':>8s}")
    for calls in [int(text) for text in options.calls.split(",")]:
        for name, planner in (
            ("annealing", get_planner("annealing")),
            ("local_search", get_planner("local_search")),
            ("untrained", untrained.place),
            ("agent", trained.place),
        ):
            means, feasible, begin = [], 0, time.perf_counter()
            for seed in range(options.seeds):
                steps = [_step(planner, problem, seed=seed, calls=calls) for problem in problems]
                feasible += sum(step is not None for step in steps)
                ratios = [s / f for s, f in zip(steps, floors, strict=True) if s is not None and f is not None]
                means.append(float(np.exp(np.mean(np.log(ratios)))))
            seconds = (time.perf_counter() - begin) / (options.seeds * len(problems))
            spread = max(means) - min(means)
            total = f"{feasible}/{options.seeds * len(problems)}"
            print(f"{name:14s} {calls:6d} {np.mean(means):8.4f} {spread:8.4f} {total:>9s} {seconds:8.3f}")


def _step(planner, problem, **options):
    try:
        return planner(problem, **options).predicted["step_time_s"]
    except InfeasibleError:
        return None


if __name__ == "__main__":
    main()
