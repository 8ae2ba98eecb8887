"""The exact planners: time and gap against size, and how far heuristics are from proven optima.

    python -m benchmarks.exact [--groups 4 6 8 10 12 16] [--devices 2 3] [--seeds 3] [--effort 20] [--coarse]

Problems are generated training steps (three ops a group); step times are makespans of the `list` executor. A row sums up the
seeds and shapes of one size: how many cp_sat proved, its largest remaining gap, seconds (median and longest), and the mean and
largest distance of `best` and of annealing (4,096 calls) from the proven optima. `--coarse` runs dlplacer against `best` and
annealing on larger problems instead.
"""

from __future__ import annotations

import argparse
import itertools

import numpy as np

from benchmarks.harness import arguments, markdown
from rlplace.errors import InfeasibleError
from rlplace.placement import run_planner
from rlplace.problem import Problem
from rlplace.problem.generate import random_problem

SHAPES = ("layered", "branchy", "chain")


def problems(groups: int, devices: int, seeds: int) -> list[Problem]:
    """Makes every shape with and without tight memory, unlike devices in every second one."""
    return [
        random_problem(
            seed, groups, devices, shape=shape, memory_factor=(None, 1.5)[seed % 2], unlike=seed % 3 == 2, comm_ratio=0.5
        )
        for seed in range(seeds)
        for shape in SHAPES
    ]


def proofs(options: argparse.Namespace) -> str:
    """Proves optima by size, and says how far heuristics are from them."""
    rows = []
    for devices, groups in itertools.product(options.devices, options.groups):
        gaps, seconds, far = [], [], []
        for problem in problems(groups, devices, options.seeds):
            try:
                run = run_planner("cp_sat", problem, effort=options.effort)
            except InfeasibleError:
                continue
            proof, step = run.plan.predicted.proof, run.plan.predicted.step_time_s
            gaps.append(proof["gap"])
            seconds.append(run.seconds)
            if proof["status"] == "optimal":
                rivals = (("best", {}), ("annealing", {"calls": 4096}))
                far.append([run_planner(n, problem, **o).plan.predicted.step_time_s / step - 1 for n, o in rivals])
        off = 100 * np.array(far).reshape(-1, 2)
        ends = [f"{x:.2f} %" for column in off.T for x in (column.mean(), column.max())] if far else ["-"] * 4
        spent = [f"{np.median(seconds):.2f}", f"{max(seconds):.1f}"]
        rows.append([groups, 3 * groups, devices, f"{len(off)}/{len(gaps)}", f"{100 * max(gaps):.2f} %", *spent, *ends])
    heads = ["groups", "ops", "devices", "proven", "gap, most", "seconds, median", "most"]
    return markdown([*heads, "best, mean", "most", "annealing, mean", "most"], rows)


def coarse(options: argparse.Namespace) -> str:
    """Compares dlplacer with `best` and annealing on larger problems."""
    rows = []
    for groups, (index, devices) in itertools.product((40, 60, 100, 200), enumerate((2, 4))):
        shape = SHAPES[1] if groups != 100 else SHAPES[2]
        problem = random_problem(index, groups, devices, shape=shape, memory_factor=1.5)
        floor = run_planner("best", problem).plan.predicted.step_time_s
        annealed = run_planner("annealing", problem, calls=4096).plan.predicted.step_time_s / floor
        run = run_planner("dlplacer", problem, effort=options.effort)
        step, gap = run.plan.predicted.step_time_s / floor, f"{100 * run.plan.predicted.proof['gap']:.2f} %"
        figures = [f"{1e3 * floor:.2f}", f"{annealed:.4f}", f"{step:.4f}", gap, f"{run.seconds:.1f}"]
        rows.append([problem.name, groups, devices, *figures])
    heads = ["problem", "groups", "devices", "best ms", "annealing", "dlplacer", "gap of the coarse program", "seconds"]
    return markdown(heads, rows)


if __name__ == "__main__":
    options = arguments(
        __doc__,
        groups=((4, 6, 8, 10, 12, 16), "sizes"),
        devices=((2, 3), "numbers of devices"),
        seeds=(3, "of every size and shape"),
        effort=(20.0, "the solver's deterministic seconds for each program"),
        coarse="dlplacer on larger problems",
    )
    run_planner("best", random_problem(0, 8))  # compiles
    print(coarse(options) if options.coarse else proofs(options))
