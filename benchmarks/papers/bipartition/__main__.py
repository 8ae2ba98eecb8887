"""Bi-Partition on public PipeDream profiles: optima of the chain, and planning time.

    python -m benchmarks.papers.bipartition [--profiles DIR] [--large]

The table divides the layer-wise optimum by that of bi-partition, compute only. `--large` times the planner on 5,000 ops.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from benchmarks.papers.bipartition.profile import profile_chain, read_profile
from rlplace.cost.split import split_backward
from rlplace.placement import run_planner
from rlplace.placement.published.bipartition.solve import bi_partition, layer_wise
from rlplace.problem.generate import random_problem

PROFILES = Path(__file__).resolve().parents[3] / "tests" / "planners" / "profiles"
GAPS = (0, 1, 2, 4, 8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profiles", type=Path, default=PROFILES, help="folder of profiles in PipeDream's text format")
    parser.add_argument("--large", action="store_true", help="planning time on 5,000 ops")
    args = parser.parse_args()
    if args.large:
        large()
        return
    files = sorted(args.profiles.glob("*.txt"))
    optima(files)


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


def large() -> None:
    run_planner("bipartition", split_backward(random_problem(0, 20, 4)))  # compiles
    for devices in (8, 16):
        for shape in ("layered", "branchy", "chain"):
            split = split_backward(random_problem(1, 1667, devices, shape=shape, memory_factor=4.0, hosts=2))
            began = time.perf_counter()
            run = run_planner("bipartition", split)
            seconds = time.perf_counter() - began
            print(f"{devices:2d} devices {shape:8s} {seconds:6.2f} s {run.simulator_calls:4d} calls")


if __name__ == "__main__":
    main()
