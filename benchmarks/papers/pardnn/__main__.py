"""ParDNN on captured steps of the paper's models: speed-ups, planning time, batches, the larger variants.

    python -m benchmarks.papers.pardnn [--models A,B]    rows are added to study.jsonl, those that stand are skipped
    python -m benchmarks.papers.pardnn --table           the tables of the docs
    python -m benchmarks.papers.pardnn --time            planning time of generated graphs of the paper's sizes

Steps are captured op by op (`real`), every op or parameter a node, on V100s of 32 GB with NVLink whose host takes 5 us to
launch a kernel. Single pass: one slicing and mapping as the paper does; planner: the best of rlplace's candidates. CP is the
paper's baseline, LC linear clustering. Batches are powers of two: the largest that fits, and throughput there over that of the
fewest devices at theirs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

import rlplace
from benchmarks.harness import Row, add_row, arguments, markdown, missing, one_thread, read_rows, timed
from benchmarks.papers.pardnn.baselines import critical_path_first, linear_clustering, measures
from benchmarks.papers.pardnn.real import MODELS, make
from rlplace.cost.foreign import with_host
from rlplace.errors import InfeasibleError
from rlplace.model.graph.opgraph import OpGraph
from rlplace.model.graph.rescale import rescale
from rlplace.placement import run_planner
from rlplace.placement.published.pardnn import place_clusters
from rlplace.placement.published.pardnn.nodegraph import op_graph
from rlplace.placement.published.pardnn.slicing import slice_graph
from rlplace.problem import Problem
from rlplace.problem.generate import random_problem
from rlplace.simulator import simulate

ROWS = Path(__file__).with_name("study.jsonl")
COUNTS, LARGER_COUNTS, MOST = (2, 4, 8), (4, 8), 4096
LAUNCH_S = 5e-6
OPTIMIZER = {"WRN": "momentum", "TRN": "adam"}


class Steps:
    """A model's step at any batch: captured at two, computed between."""

    def __init__(self, name: str, larger: bool) -> None:
        self.graphs = []
        self.capture_s = time.perf_counter()
        for batch in (4, 8):
            module, inputs, loss = make(name, batch, larger=larger)
            self.parameters = sum(parameter.numel() for parameter in module.parameters())
            optimizer = OPTIMIZER.get(name, "sgd")
            self.graphs.append(rlplace.capture(module, inputs, loss=loss, name=name, optimizer=optimizer))
        self.capture_s = time.perf_counter() - self.capture_s

    def at(self, batch: int) -> OpGraph:
        """Returns the graph of a batch."""
        small, large = self.graphs
        return {small.samples: small, large.samples: large}.get(batch) or rescale(small, large, batch)

    def priced(self, batch: int, count: int) -> Problem:
        """Returns every op a node of its own, on so many devices."""
        costs = with_host(None, ["v100"], op_s=LAUNCH_S)
        return rlplace.price(self.at(batch), f"v100:{count}", level="op", groups=10**6, costs=costs)


def speedups(steps: Steps, batch: int, counts: Sequence[int]) -> list[dict[str, Any]]:
    """Returns one row a number of devices."""
    rows = []
    for count in counts:
        problem = steps.priced(batch, count)
        graph = op_graph(problem, range(count))
        found = measures(graph)
        one_s = simulate(problem, np.zeros(problem.num_groups, dtype=np.int32)).step_time_s
        once, once_s = timed(lambda p=problem, g=graph: place_clusters(p, g, slice_graph(g)))
        linear, linear_s = timed(lambda p=problem, g=graph: linear_clustering(p, g))
        run = run_planner("pardnn", problem)
        row = {
            "devices": count, "nodes": graph.num_nodes, "parallelism": found.parallelism,
            "communication": found.communication_ratio, "one_s": one_s, "pass_s": simulate(problem, once).step_time_s,
            "planner_s": run.plan.predicted.step_time_s,
            "cp_s": simulate(problem, critical_path_first(problem, graph)).step_time_s,
            "lc_s": simulate(problem, linear).step_time_s, "pass_takes_s": once_s, "lc_takes_s": linear_s,
            "planner_takes_s": run.seconds,
        }  # fmt: skip
        rows.append({key: None if isinstance(value, float) and not np.isfinite(value) else value for key, value in row.items()})
    return rows


def batches(steps: Steps, counts: Sequence[int]) -> list[dict[str, Any]]:
    """Returns the largest power of two that fits, and samples a second there."""
    rows, batch = [], 1
    for count in counts:
        best: dict[str, Any] | None = None
        while batch <= MOST:
            step_s = _fitting_s(steps.priced(batch, count))
            if step_s is None:
                break
            best, batch = {"devices": count, "batch": batch, "samples_per_s": batch / step_s}, 2 * batch
        if best is not None:
            rows.append(best)
            batch = best["batch"]
    return rows


def _fitting_s(problem: Problem) -> float | None:
    if problem.num_devices == 1:
        line = simulate(problem, np.zeros(problem.num_groups, dtype=np.int32))
        return line.step_time_s if line.feasible else None
    try:
        return run_planner("pardnn", problem).plan.predicted.step_time_s
    except InfeasibleError:
        return None


def tables() -> list[str]:
    """Makes the tables of the docs: graphs, speed-ups, largest batches."""
    rows = {(row["model"], row["larger"]): row for row in read_rows(ROWS)}
    graphs, speeds, large = [], [], []
    for (name, larger), row in rows.items():
        said, first = MODELS[name], row["speedups"][0]
        paper = (f"{said.parallelism:g}", f"{said.communication:g}") if not larger else ("-", "-")
        graphs.append([
            name + "-2" * larger, f"{first['nodes']:,} ({said.nodes[larger]:,})",
            f"{row['parameters'] / 1e9:.2f} ({said.parameters[larger]:g})", f"{first['parallelism']:.1f} ({paper[0]})",
            f"{first['communication']:.1f} ({paper[1]})", f"{row['capture_s'] / 2:.0f}",
            " / ".join(f"{one['pass_takes_s']:.2f}" for one in row["speedups"]),
            " / ".join(f"{one['planner_takes_s']:.1f}" for one in row["speedups"]),
        ])  # fmt: skip
        speeds.append([
            name + "-2" * larger, " / ".join(str(one["devices"]) for one in row["speedups"]),
            *(" / ".join(f"{one['one_s'] / one[key]:.2f}" for one in row["speedups"]) for key in ("pass_s", "planner_s")),
            *(" / ".join(f"{one[key] / one['planner_s']:.2f}" for one in row["speedups"]) for key in ("cp_s", "lc_s")),
            " / ".join(f"{x:g}" for x in said.over_cp) if not larger else "-",
        ])  # fmt: skip
        if row["batches"]:
            begin = row["batches"][0]
            large.append([
                name + "-2" * larger, " / ".join(f"{one['devices']}: {one['batch']}" for one in row["batches"]),
                " / ".join(f"{one['samples_per_s'] / begin['samples_per_s']:.2f}" for one in row["batches"]),
            ])  # fmt: skip
    heads = ["model", "nodes (paper)", "1e9 parameters", "DoP", "CCR", "capture s", "one pass s", "planner s"]
    speed = ["model", "devices", "one pass", "planner", "over CP", "over LC", "paper over CP"]
    batch = ["model", "largest batch", "throughput over the first"]
    return [markdown(heads, graphs), markdown(speed, speeds), markdown(batch, large)]


def planning_time(devices: int = 8) -> None:
    """Prints seconds of one slicing and mapping, as the paper does, and of the planner with all its candidates."""
    print(f"\nplanning time on {devices} devices, one core")
    for groups in (400, 3_400, 33_400, 66_800):
        problem = random_problem(0, groups, devices, shape="branchy", width=8)
        start_s = time.perf_counter()
        graph = op_graph(problem, range(devices))
        place_clusters(problem, graph, slice_graph(graph))
        once_s = time.perf_counter() - start_s
        run = run_planner("pardnn", problem)
        print(
            f"{problem.name:24s} {problem.num_ops:7d} ops: one pass {once_s:6.3f} s "
            f"({1e6 * once_s / problem.num_ops:5.2f} us an op), planner {run.seconds:6.2f} s "
            f"({1e6 * run.seconds / problem.num_ops:6.1f} us an op), {run.simulator_calls} simulations"
        )


if __name__ == "__main__":
    options = arguments(__doc__, models=(tuple(MODELS), "names", MODELS), table="only the tables", time="only planning time")
    one_thread()
    if options.time:
        run_planner("pardnn", random_problem(0, 30, 2, memory_factor=2.0))  # compiles
        planning_time()
        sys.exit()
    for name, larger in () if options.table else missing(ROWS, product(options.models, (False, True)), "model", "larger"):
        steps = Steps(name, larger)
        row: Row = {"model": name, "larger": larger, "parameters": steps.parameters, "capture_s": steps.capture_s}
        row["speedups"] = speedups(steps, MODELS[name].batch, LARGER_COUNTS if larger else COUNTS)
        row["batches"] = batches(steps, LARGER_COUNTS if larger else (1, *COUNTS))
        add_row(ROWS, row)
    print("\n\n".join(tables()))
