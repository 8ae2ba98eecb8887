"""ParDNN: planning time at the paper's sizes, and its first memory heuristic.

Usage: python -m benchmarks.papers.pardnn [time] [memory]; speed-ups, batches and rivals: `benchmarks.papers.pardnn.study`.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from typing import Any

from benchmarks.papers.pardnn.fifo import FifoStep, fifo
from benchmarks.papers.pardnn.study import Steps
from rlplace.placement import run_planner
from rlplace.placement.common.evaluate import Assignment
from rlplace.placement.published.pardnn import place_clusters
from rlplace.placement.published.pardnn.memory import limits, peak_bytes, reduce_peaks
from rlplace.placement.published.pardnn.nodegraph import op_graph
from rlplace.placement.published.pardnn.slicing import slice_graph
from rlplace.problem import Problem
from rlplace.problem.generate import random_problem


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


def memory() -> None:
    """Prints H1 under the FIFO emulator: peaks within nine tenths of the memory, share of ops moved."""
    print("\nH1 (FIFO emulator, limit 0.9 x memory)")
    cases = (
        (Steps("Word-RNN", False).priced(16, 4), "Word-RNN x 4"),
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
    """Returns the problem with other memory on every device."""
    devices = tuple(replace(device, memory_bytes=memory_bytes, reserved_bytes=0) for device in problem.devices)
    return replace(problem, devices=devices)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", default=["time", "memory"])
    run_planner("pardnn", with_memory(random_problem(0, 30, 2), 1 << 40))  # compiles
    for section in parser.parse_args().sections:
        {"time": planning_time, "memory": memory}[section]()


if __name__ == "__main__":
    main()
