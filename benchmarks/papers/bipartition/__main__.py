"""Bi-Partition, PipeDream and GPipe on public PipeDream profiles: optima of the chain, simulated throughput, planning time.

    python -m benchmarks.papers.bipartition [--profiles DIR] [--microbatches 32] [--large]

The first table divides the layer-wise optimum by that of bi-partition, compute only. The second is seconds a micro-batch in the
simulator, one step of many micro-batches, with free links and with links of 12.5 GB/s; "equal" has as many layers on every
device, the gain is that of gap 8 over gap 0. `--large` times the planners on 5,000 ops instead.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.papers.bipartition.profile import profile_chain, profile_problem, read_profile
from rlplace.cost.split import split_backward
from rlplace.planners import NEEDS_SPLIT, run_planner
from rlplace.planners.bipartition.layers import layer_orders, make_layers
from rlplace.planners.bipartition.solve import Cuts, bi_partition, layer_wise
from rlplace.problem import Problem
from rlplace.problem.generate import random_problem
from rlplace.simulator import simulate

PROFILES = Path(__file__).resolve().parents[3] / "tests" / "planners" / "profiles"
GAPS = (0, 1, 2, 4, 8)
PLANNED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("gpipe", {}),
    ("pipedream", {}),
    ("bipartition", {"gap": 0}),
    ("bipartition", {"gap": 8}),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profiles", type=Path, default=PROFILES, help="folder of profiles in PipeDream's text format")
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--large", action="store_true", help="planning time on 5,000 ops")
    args = parser.parse_args()
    if args.large:
        large()
        return
    files = sorted(args.profiles.glob("*.txt"))
    optima(files)
    throughput(files, args.microbatches)


def optima(files: list[Path]) -> None:
    print(f"{'profile':10s} {'layers':>6s} {'BP/FP':>6s}  layer-wise / bi-partition for N = 2, 3, 4, 8")
    for path in files:
        chain = profile_chain(read_profile(path))
        ratio = float(chain.backward_s.sum() / chain.forward_s.sum())
        gains = []
        for workers in (2, 3, 4, 8):
            plain, apart = layer_wise(chain, workers), bi_partition(chain, workers)
            assert plain is not None and apart is not None
            gains.append(plain.bottleneck_s / apart.bottleneck_s)
        print(f"{path.stem:10s} {chain.num_layers:6d} {ratio:6.2f}  " + "  ".join(f"{gain:.3f}" for gain in gains))
        by_gap = [bi_partition(chain, 4, gap) for gap in GAPS]
        print(
            " " * 26
            + "N = 4, ms by gap: "
            + ", ".join(f"{g}: {1e3 * c.bottleneck_s:.2f}" for g, c in zip(GAPS, by_gap, strict=True) if c)
        )


def equal_layers(problem: Problem, run: dict[str, Any]) -> float:
    layers = make_layers(problem, layer_orders(problem)[0], range(problem.num_devices))
    ends = np.linspace(0, layers.chain.num_layers, problem.num_devices + 1).round().astype(int).tolist()
    step = simulate(problem, layers.assign(problem, Cuts(tuple(ends), tuple(ends), 0.0)), **run).step_time_s
    return float("nan") if step is None else step


def throughput(files: list[Path], microbatches: int) -> None:
    print(f"\nmilliseconds a micro-batch of {microbatches}, executor list")
    columns = ("equal", "gpipe", "pipedream", "gap 0", "gap 8")
    print(f"{'profile':10s} {'D':>2s} {'GB/s':>5s} {'schedule':8s}" + "".join(f"{name:>10s}" for name in columns) + "    gain")
    for path in files:
        nodes = read_profile(path)
        for devices in (4, 8):
            for name, bandwidth in (("free", float("inf")), ("12.5", 12.5e9)):
                split = split_backward(profile_problem(nodes, devices, bandwidth_bytes_per_s=bandwidth, name=path.stem))
                for schedule in ("1f1b", "list"):
                    run = {"microbatches": microbatches, "schedule": schedule}
                    steps = [equal_layers(split, run)]
                    for planner, options in PLANNED:
                        steps.append(float(run_planner(planner, split, **options, **run).plan.predicted.step_time_s))
                    each = "".join(f"{1e3 * step / microbatches:10.2f}" for step in steps)
                    print(f"{path.stem:10s} {devices:2d} {name:>5s} {schedule:8s}{each} {steps[-2] / steps[-1]:7.3f}")


def large() -> None:
    for name in ("gpipe", "pipedream", "bipartition"):
        run_planner(name, split_backward(random_problem(0, 20, 4)), microbatches=4)  # compiles
    for devices in (8, 16):
        for shape in ("layered", "branchy", "chain"):
            problem = random_problem(1, 1667, devices, shape=shape, memory_factor=4.0, hosts=2)
            split = split_backward(problem)
            for name in ("gpipe", "pipedream", "bipartition"):
                for microbatches in (1, 4):
                    target = split if name in NEEDS_SPLIT else problem
                    began = time.perf_counter()
                    run = run_planner(name, target, microbatches=microbatches)
                    seconds = time.perf_counter() - began
                    calls = run.simulator_calls
                    print(f"{devices:2d} devices {shape:8s} {name:12s} M={microbatches} {seconds:6.2f} s {calls:4d} calls")


if __name__ == "__main__":
    main()
