"""Times the compiled simulator: milliseconds per simulation by size and devices, against the reference, cold and warm start.

    python benchmarks/simulator.py [--quick]

Plans: `contiguous` cuts the groups into equal blocks, `random` deals them out (three of four tensors then move). One thread.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

import numpy as np

os.environ.setdefault("OMP_NUM_THREADS", "1")

from rlplace.problem import Problem
from rlplace.problem.toys import random_problem
from rlplace.simulator import Simulator, simulate, simulate_many
from rlplace.simulator.reference import simulate_reference

START = """
import json, time
begin = time.perf_counter()
from rlplace.problem.toys import random_problem
from rlplace.simulator import simulate
problem = random_problem(0, 32, 4)
ready = time.perf_counter()
simulate(problem, [0] * 32)
first = time.perf_counter()
simulate(problem, [0] * 32)
print(json.dumps({"import_s": ready - begin, "first_s": first - ready, "second_s": time.perf_counter() - first}))
"""


def best_ms(function, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return 1e3 * min(times)


def plans(problem: Problem) -> dict[str, np.ndarray]:
    groups, devices = problem.num_groups, problem.num_devices
    return {
        "contiguous": (np.arange(groups) * devices // groups).astype(np.int32),
        "random": np.random.default_rng(0).integers(0, devices, groups).astype(np.int32),
    }


def sizes(quick: bool) -> None:
    tasks = (30, 300, 5_000) if quick else (30, 300, 1_000, 5_000, 20_000, 100_000)
    titles = (("tasks", 8), ("devices", 7), ("shape", 8), ("plan", 10), ("evaluate ms", 11))
    titles += (("ns/task", 8), ("simulate ms", 11), ("reference", 9))
    print(" ".join(f"{title:>{width}}" for title, width in titles))
    for count in tasks:
        for devices in (1, 4, 8, 16, 64):
            for shape in ("layered", "branchy"):
                problem = random_problem(0, count // 3, devices, shape=shape, memory_factor=2.0, hosts=max(1, devices // 8))
                simulator = Simulator(problem)
                for name, plan in plans(problem).items():
                    repeats = max(5, 200_000 // count)
                    evaluate = best_ms(lambda: simulator.evaluate(plan), repeats)  # noqa: B023
                    whole = best_ms(lambda: simulate(problem, plan), repeats)  # noqa: B023
                    ratio = ""
                    if count <= 5_000 and devices in (4, 16):
                        ratio = f"{best_ms(lambda: simulate_reference(problem, plan), 2) / whole:8.0f}x"  # noqa: B023
                    print(
                        f"{problem.num_ops:8d} {devices:7d} {shape:>8} {name:>10} {evaluate:11.4f} "
                        f"{1e6 * evaluate / problem.num_ops:8.0f} {whole:11.4f} {ratio:>9}"
                    )


def batch() -> None:
    problem = random_problem(0, 200, 8)
    rows = np.random.default_rng(0).integers(0, 8, (1000, 200))
    simulator = Simulator(problem)
    many = best_ms(lambda: simulate_many(problem, rows), 5)
    one_by_one = best_ms(lambda: [simulator.evaluate(row) for row in rows], 5)
    print(f"1000 plans of 600 tasks on 8 devices: simulate_many {many:.1f} ms, Simulator.evaluate {one_by_one:.1f} ms")


def starts() -> None:
    with tempfile.TemporaryDirectory() as cache:
        for label in ("cold", "warm"):
            begin = time.perf_counter()
            output = subprocess.run(
                [sys.executable, "-c", START], env={**os.environ, "NUMBA_CACHE_DIR": cache}, check=True, capture_output=True
            ).stdout
            parts = {key: round(value, 4) for key, value in json.loads(output).items()}
            print(f"{label} start, whole process {time.perf_counter() - begin:.2f} s: {parts}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes only")
    arguments = parser.parse_args()
    starts()
    batch()
    sizes(arguments.quick)


if __name__ == "__main__":
    main()
