"""The exact planners: time and gap against size, and how far heuristics are from proven optima.

Usage: python benchmarks/exact.py [--groups 4,6,8,10,12,16] [--devices 2,3] [--seeds 3] [--effort 20] [--coarse]

Problems are generated training steps (three ops a group); step times are makespans of the `list` executor. A row sums up the
seeds and shapes of one size: how many cp_sat proved, its largest remaining gap, seconds (median and longest), and the mean and
largest distance of `best` and of annealing (4,096 calls) from the proven optima. `--coarse` runs dlplacer against `best` and
annealing on larger problems instead.
"""

from __future__ import annotations

import argparse

import numpy as np

from rlplace.errors import InfeasibleError
from rlplace.placement import run_planner
from rlplace.problem import Problem
from rlplace.problem.generate import random_problem

SHAPES = ("layered", "branchy", "chain")


def problems(groups: int, devices: int, seeds: int) -> list[Problem]:
    """Every shape with and without tight memory, unlike devices in every second one."""
    return [
        random_problem(
            seed, groups, devices, shape=shape, memory_factor=(None, 1.5)[seed % 2], unlike=seed % 3 == 2, comm_ratio=0.5
        )
        for seed in range(seeds)
        for shape in SHAPES
    ]


def proofs(args: argparse.Namespace) -> None:
    print("groups ops devices proven  gap max  seconds median  max   best mean   max   annealing mean   max")
    for devices in map(int, args.devices.split(",")):
        for groups in map(int, args.groups.split(",")):
            gaps, seconds, far = [], [], []
            for problem in problems(groups, devices, args.seeds):
                try:
                    run = run_planner("cp_sat", problem, effort=args.effort)
                except InfeasibleError:
                    continue
                proof, step = run.plan.predicted.proof, run.plan.predicted.step_time_s
                gaps.append(proof["gap"])
                seconds.append(run.seconds)
                if proof["status"] == "optimal":
                    rivals = (("best", {}), ("annealing", {"calls": 4096}))
                    far.append([run_planner(n, problem, **o).plan.predicted.step_time_s / step - 1 for n, o in rivals])
            off = 100 * np.array(far).reshape(-1, 2)
            low, high = (off.mean(axis=0), off.max(axis=0)) if len(off) else (np.full(2, np.nan),) * 2
            print(
                f"{groups:6d} {3 * groups:3d} {devices:7d} {len(off):3d}/{len(gaps):2d} {100 * max(gaps):8.2f} % "
                f"{np.median(seconds):14.2f} {max(seconds):6.1f} {low[0]:9.2f} % {high[0]:5.2f} % "
                f"{low[1]:12.2f} % {high[1]:5.2f} %",
                flush=True,
            )


def coarse(args: argparse.Namespace) -> None:
    print("problem                          groups devices  best ms  annealing  dlplacer  coarse gap  seconds")
    for groups in (40, 60, 100, 200):
        for index, devices in enumerate((2, 4)):
            shape = SHAPES[1] if groups != 100 else SHAPES[2]
            problem = random_problem(index, groups, devices, shape=shape, memory_factor=1.5)
            floor = run_planner("best", problem).plan.predicted.step_time_s
            annealed = run_planner("annealing", problem, calls=4096).plan.predicted.step_time_s
            run = run_planner("dlplacer", problem, effort=args.effort)
            step, proof = run.plan.predicted.step_time_s, run.plan.predicted.proof
            print(
                f"{problem.name:32s} {groups:6d} {devices:7d} {1e3 * floor:8.2f} {annealed / floor:10.4f} {step / floor:9.4f} "
                f"{100 * proof['gap']:9.2f} % {run.seconds:8.1f}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", default="4,6,8,10,12,16")
    parser.add_argument("--devices", default="2,3")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--effort", type=float, default=20.0, help="the solver's deterministic seconds for each program")
    parser.add_argument("--coarse", action="store_true", help="dlplacer on larger problems")
    args = parser.parse_args()
    run_planner("best", random_problem(0, 8))  # compiles
    coarse(args) if args.coarse else proofs(args)


if __name__ == "__main__":
    main()
