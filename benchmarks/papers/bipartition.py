"""Bi-Partition on public PipeDream profiles: optima of the chain, and planning time.

    python -m benchmarks.papers.bipartition [--large]

The table divides the layer-wise optimum by that of bi-partition, compute only. `--large` times the planner on 5,000 ops.
"""

from __future__ import annotations

from benchmarks.harness import arguments, markdown
from rlplace.cost.contract import split_backward
from rlplace.placement import run_planner
from rlplace.placement.published.bipartition.solve import bi_partition, layer_wise
from rlplace.problem.generate import random_problem
from tests.placement.pipedream import PROFILES, profile_chain, read_profile

WORKERS, GAPS = (2, 3, 4, 8), (0, 1, 2, 4, 8)


def optima() -> list[list[str]]:
    """Finds both optima of every profile, and milliseconds of four workers by gap."""
    rows = []
    for path in sorted(PROFILES.glob("*.txt")):
        chain = profile_chain(read_profile(path))
        gains = [layer_wise(chain, count).bottleneck_s / bi_partition(chain, count).bottleneck_s for count in WORKERS]
        by_gap = [bi_partition(chain, 4, gap) for gap in GAPS]
        ratio = float(chain.backward_s.sum() / chain.forward_s.sum())
        shown = [*(f"{gain:.3f}" for gain in gains), *(f"{1e3 * cuts.bottleneck_s:.2f}" for cuts in by_gap if cuts)]
        rows.append([path.stem, str(chain.num_layers), f"{ratio:.2f}", *shown])
    return rows


def large() -> list[list[str]]:
    """Times the planner on about 5,000 ops."""
    run_planner("bipartition", split_backward(random_problem(0, 20, 4)))  # compiles
    rows = []
    for devices in (8, 16):
        for shape in ("layered", "branchy", "chain"):
            split = split_backward(random_problem(1, 1667, devices, shape=shape, memory_factor=4.0, hosts=2))
            run = run_planner("bipartition", split)
            rows.append([str(devices), shape, f"{run.seconds:.2f}", str(run.simulator_calls)])
    return rows


if __name__ == "__main__":
    if arguments(__doc__, large="planning time on 5,000 ops").large:
        print(markdown(["devices", "shape", "seconds", "calls"], large()))
    else:
        heads = [*(f"gain, N = {count}" for count in WORKERS), *(f"ms, N = 4, gap {gap}" for gap in GAPS)]
        print(markdown(["profile", "layers", "BP/FP", *heads], optima()))
