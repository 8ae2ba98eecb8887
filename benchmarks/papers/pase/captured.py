"""PaSE against cutting the batch alone and against one device, on captured models, by the simulator.

    python -m benchmarks.papers.pase.captured [--models M ...] [--clusters C ...]

One row a model and cluster, in Markdown: step times in milliseconds, largest peak memory, the devices that most cut ops use,
and planning time in seconds.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter

import numpy as np
import torch

from benchmarks.papers.pase.batch import data_parallel
from rlplace.cost.price import price
from rlplace.graph.capture import capture
from rlplace.plan import make_plan
from rlplace.planners import run_planner
from rlplace.simulator import simulate
from rlplace.zoo import load_model

MODELS = ("hf:gpt2", "hf:bert", "zoo:inception", "zoo:lstm")
CLUSTERS = ("a100-80g:4", "v100:8,pcie")
BATCHES = {"zoo:inception": 64, "zoo:lstm": 64}


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--clusters", nargs="+", default=CLUSTERS)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seq", type=int, default=128)
    options = parser.parse_args()
    print("| model | batch | cluster | single | data parallel | pase, paper's cost | pase | peak GB: dp, pase | devices | s |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name in options.models:
        batch = BATCHES.get(name, options.batch)
        model = load_model(name, batch=batch, seq=options.seq)
        graph = capture(model.module, model.example_inputs, loss=model.loss)
        for cluster in options.clusters:
            problem = price(graph, cluster, level="op", sharding=True)
            none = np.zeros(problem.num_groups, dtype=np.int32)
            whole = simulate(problem, none)
            cut = make_plan(problem, none, planner="hand", shards=data_parallel(problem, problem.num_devices))
            rows = simulate(problem, cut)
            paper = run_planner("pase", problem, gradient_prices=(1.0,))
            found = run_planner("pase", problem)
            used = Counter(math.prod(parts.values()) for parts in (found.plan.shards or {"": {}}).values())
            peaks = max(rows.peak_memory_bytes) / 1e9, max(found.plan.predicted.peak_memory_bytes) / 1e9
            steps = [line.step_time_s or math.inf for line in (whole, rows)]
            steps += [run.plan.predicted.step_time_s for run in (paper, found)]
            print(
                f"| {name} | {batch} | {cluster} | " + " | ".join(f"{1e3 * s:.1f}" for s in steps)
                + f" | {peaks[0]:.2f}, {peaks[1]:.2f} | {used.most_common(1)[0][0]} | {found.seconds:.1f} |"
            )  # fmt: skip


if __name__ == "__main__":
    main()
