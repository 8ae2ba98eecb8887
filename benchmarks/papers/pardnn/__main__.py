"""ParDNN: planning time, graphs at the paper's scale, speed-ups, largest batches.

Usage: python -m benchmarks.papers.pardnn [SECTION ...] [--models a,b] [--devices 2,4,8]

Sections: graphs, time, speedups, baselines, memory, batches; without one, all of them.

Step times are makespans by the `list` executor on the reconstructed graphs of
`benchmarks.papers.pardnn.models`; DoP and CCR are the paper's measures.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.papers.pardnn.baselines import critical_path_first, linear_clustering, measures
from benchmarks.papers.pardnn.fifo import FifoStep, fifo
from benchmarks.papers.pardnn.models import MODELS, char_crn, trn, word_rnn, wrn
from benchmarks.papers.pardnn.tape import Chip
from rlplace.errors import InfeasibleError
from rlplace.planners import run_planner
from rlplace.planners.common.evaluate import Assignment
from rlplace.planners.common.repair import repair
from rlplace.planners.pardnn.memory import limits, peak_bytes, reduce_peaks
from rlplace.planners.pardnn.nodegraph import op_graph
from rlplace.planners.pardnn.pardnn import place_clusters
from rlplace.planners.pardnn.slicing import slice_graph
from rlplace.problem import Problem
from rlplace.problem.generate import random_problem
from rlplace.simulator import simulate

MAX_BATCH = 1 << 16

SMALL = Chip(memory_bytes=(32 << 30) // 10), Chip(memory_bytes=(32 << 30) // 8)
BATCH_BUILDS: dict[str, Callable[[int, int], Problem]] = {
    "word_rnn": word_rnn,
    "char_crn": char_crn,
    "wrn": lambda batch, count: wrn(batch, count, units=10, small=1.0, chip=SMALL[0]),
    "trn": lambda batch, count: trn(batch, count, layers=6, small=3.0, vocabulary=1_000, chip=SMALL[1]),
}
"""Models whose largest batch is looked for; the deep ones with a tenth of their depth or memory, or a little more."""


def graphs(names: list[str]) -> None:
    """Node counts, DoP, CCR and parameters beside the paper's."""
    print("\nmodel      nodes (paper)  DoP (paper)  CCR (paper)  parameters (paper)")
    for name in names:
        model = MODELS[name]
        problem = model.build()
        graph = op_graph(problem, [0, 1])
        found = measures(graph)
        print(
            f"{name:10s} {graph.num_nodes} ({model.nodes})  {found.parallelism:.2f} ({model.parallelism:.2f})  "
            f"{found.communication_ratio:.2f} ({model.communication_ratio:.2f})  "
            f"{problem.weight_bytes.sum() / 4e9:.2f}e9 ({model.parameters / 1e9:.2f}e9)"
        )


def planning_time(devices: int = 8) -> None:
    """Seconds of one slicing and mapping, as the paper does, and of the planner with all its candidates."""
    print(f"\nplanning time on {devices} devices, one core")
    problems = [wrn(num_devices=devices, units=units) for units in (1, 5, 10, 25, 50, 101)]
    problems += [MODELS["trn"].build(num_devices=devices)]
    problems += [random_problem(0, groups, devices, shape="branchy", width=8) for groups in (400, 3_400, 33_400, 66_800)]
    for problem in problems:
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


def one_device_s(problem: Problem) -> float:
    return float(simulate(problem, np.zeros(problem.num_groups, dtype=np.int32)).step_time_s or np.inf)


def speedups(names: list[str], counts: list[int]) -> None:
    """Equal batch on one device (memory not counted there), by the critical-path heuristics and by ParDNN."""
    print("\nspeed-up over one device at the small batch; CP: the paper's baseline; cp: rlplace's critical_path")
    for name in names:
        for count in counts:
            problem = MODELS[name].build(num_devices=count)
            single = one_device_s(problem)
            graph = op_graph(problem, range(count))
            plain = simulate(problem, critical_path_first(problem, graph)).step_time_s or np.inf
            ours = float(run_planner("pardnn", problem).plan.predicted.step_time_s)
            row = f"{name:10s} {count:2d} devices: one {single:.3f} s, ParDNN {ours:.3f} s, "
            row += f"speed-up {single / ours:5.2f}, over CP {plain / ours:5.2f}"
            if problem.num_ops < 30_000:
                heuristic = float(run_planner("critical_path", problem).plan.predicted.step_time_s)
                row += f", over cp {heuristic / ours:5.2f}"
            print(row, flush=True)


def baselines(names: list[str], counts: list[int]) -> None:
    """Linear clustering with GLB mapping: its time and makespan beside one pass of ParDNN and the planner."""
    print("\nlinear clustering (LC) + GLB")
    for name in names:
        for count in counts:
            problem = MODELS[name].build(num_devices=count) if name != "wrn" else wrn(num_devices=count, units=10)
            graph = op_graph(problem, range(count))
            linear_s, linear = _timed(lambda p, g: linear_clustering(p, g), problem, graph)
            pass_s, _ = _timed(lambda p, g: place_clusters(p, g, slice_graph(g)), problem, graph)
            run = run_planner("pardnn", problem)
            ours = float(run.plan.predicted.step_time_s)
            print(
                f"{problem.name:10s} {problem.num_ops:6d} ops {count:2d} devices: LC {linear:.4f} s in {linear_s:6.2f} s; "
                f"ParDNN {ours:.4f} s (LC / ParDNN {linear / ours:.2f}), one pass in {pass_s:.3f} s "
                f"({linear_s / pass_s:.0f} times less), planner {run.seconds:.1f} s",
                flush=True,
            )


def _timed(build: Callable[..., Any], problem: Problem, graph: Any) -> tuple[float, float]:
    start_s = time.perf_counter()
    devices = build(problem, graph)
    return time.perf_counter() - start_s, float(simulate(problem, devices).step_time_s or np.inf)


def memory() -> None:
    """H1 under the FIFO emulator: peaks within nine tenths of the memory, share of ops moved."""
    print("\nH1 (FIFO emulator, limit 0.9 x memory)")
    cases = (
        (word_rnn(num_devices=4), "word_rnn x 4"),
        (random_problem(1, 1_000, 4, shape="branchy", width=8), "branchy 3,000 ops x 4"),
        (random_problem(2, 1_000, 4, width=12), "layered 3,000 ops x 4"),
    )
    for tight in (0.95, 0.85, 0.75):
        for problem, name in cases:
            graph = op_graph(problem, range(problem.num_devices))
            devices = place_clusters(problem, graph, slice_graph(graph))
            peak = peak_bytes(problem, devices, fifo(problem, devices)).max()
            limited = with_memory(problem, int(tight * peak / 0.9))
            rounds: list[FifoStep] = []

            def run_of(devices: Assignment, limited: Problem = limited, rounds: list[FifoStep] = rounds) -> Any:
                rounds.append(fifo(limited, devices))
                return rounds[-1]

            relieved = reduce_peaks(limited, devices, run_of)
            run = fifo(limited, relieved)
            fits = bool((peak_bytes(limited, relieved, run) <= limits(limited)).all())
            moved = float((relieved != devices)[limited.op_group].mean())
            print(
                f"{name:24s} limit {tight:.2f} x peak: fits {fits}, {100 * moved:5.2f} % of ops moved, "
                f"{len(rounds)} rounds, makespan {run.end_s.max() / rounds[0].end_s.max():.3f} x"
            )


def with_memory(problem: Problem, memory_bytes: int) -> Problem:
    """The problem with other memory on every device."""
    from dataclasses import replace

    return replace(problem, devices=tuple(replace(d, memory_bytes=memory_bytes) for d in problem.devices))


def batches(names: list[str], counts: list[int]) -> None:
    """Largest power of two that fits, and throughput there relative to one device at its own largest batch."""
    print("\nlargest batch and speed-up at it (throughput relative to one device at its largest batch)")
    for name in names:
        first = 0.0
        cells = []
        batch = 1
        for count in [1, *counts]:
            best: tuple[int, float] | None = None
            while batch <= MAX_BATCH:
                step = _fits(BATCH_BUILDS[name](batch, count))
                if step is None:
                    break
                best, batch = (batch, step), 2 * batch
            if best is None:
                cells.append(f"{count}: none")
                continue
            batch = best[0]
            throughput = best[0] / best[1]
            first = first or throughput
            cells.append(f"{count}: batch {best[0]:5d} ({best[0] / count:7.2f} a device), speed-up {throughput / first:6.2f}")
            print(f"{name:10s} {cells[-1]}", flush=True)


def _fits(problem: Problem) -> float | None:
    """Step time of a plan within memory, None if there is none."""
    if problem.num_devices == 1:
        line = simulate(problem, np.zeros(problem.num_groups, dtype=np.int32))
        return line.step_time_s if line.feasible else None
    try:
        return float(run_planner("pardnn", problem).plan.predicted.step_time_s)
    except InfeasibleError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", help="graphs, time, speedups, baselines, memory, batches")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--devices", default="2,4,8")
    args = parser.parse_args()
    names, counts = args.models.split(","), [int(count) for count in args.devices.split(",")]
    sections = args.sections or ["graphs", "time", "speedups", "baselines", "memory", "batches"]
    warm = word_rnn(num_devices=2, layers=2, steps=3)
    run_planner("pardnn", with_memory(warm, 1 << 30))
    repair(warm, np.zeros(warm.num_groups, dtype=np.int32))
    for section in sections:
        {
            "graphs": lambda: graphs(names),
            "time": planning_time,
            "speedups": lambda: speedups(names, counts),
            "baselines": lambda: baselines(names, counts),
            "memory": memory,
            "batches": lambda: batches(names, counts),
        }[section]()


if __name__ == "__main__":
    main()
