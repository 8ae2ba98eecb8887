"""Times the compiled simulator: by size, on two threads, against the reference, from a cold start.

    python -m benchmarks.simulator [--quick]

Problems come from `random_problem`, with three tasks a group (forward, backward, update). Plans: `blocks` cuts the groups into
blocks, `random` deals them out (most tensors then move). What is compared runs in turns, round by round. Times are the shortest
of all rounds, which other work on the machine disturbs least; `spread` is by how much the median exceeds it. One thread unless
it says otherwise.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import numpy as np

from benchmarks.harness import arguments, one_thread
from rlplace.problem import Problem
from rlplace.problem.generate import random_problem
from rlplace.simulator import Simulator, simulate, simulate_many
from rlplace.simulator.lowering import lower
from rlplace.simulator.reference import simulate_reference

START = """
import json, time
begin = time.perf_counter()
from rlplace.problem.generate import random_problem
from rlplace.simulator import simulate
problem = random_problem(0, 32, 4)
ready = time.perf_counter()
simulate(problem, [0] * 32)
first = time.perf_counter()
simulate(problem, [0] * 32)
print(json.dumps({"import_s": ready - begin, "first_s": first - ready, "second_s": time.perf_counter() - first}))
"""


def in_turns(*timers: Callable[[], float], rounds: int) -> list[np.ndarray]:
    """Times of several timers that run one after the other, round by round."""
    times = np.array([[timer() for timer in timers] for _ in range(rounds)])
    return list(times.T)


def clock(function: Callable[[], object]) -> Callable[[], float]:
    def timer() -> float:
        begin = time.perf_counter()
        function()
        return time.perf_counter() - begin

    return timer


def spread(times: np.ndarray) -> str:
    return f"{100 * (float(np.median(times)) / float(times.min()) - 1):.0f}%"


def plans_of(problem: Problem, kind: str, count: int) -> np.ndarray:
    dealt = np.random.default_rng(0).integers(0, problem.num_devices, (count, problem.num_groups)).astype(np.int32)
    return np.sort(dealt, axis=1) if kind == "blocks" else dealt


def starts() -> None:
    with tempfile.TemporaryDirectory() as cache:
        for label in ("cold", "warm"):
            begin = time.perf_counter()
            output = subprocess.run(
                [sys.executable, "-c", START], env={**os.environ, "NUMBA_CACHE_DIR": cache}, check=True, capture_output=True
            ).stdout
            parts = {key: round(value, 4) for key, value in json.loads(output).items()}
            print(f"{label} start, whole process {time.perf_counter() - begin:.2f} s: {parts}")


def buffers(sizes: tuple[int, ...]) -> None:
    print("\nLayered, 8 devices, blocks, one evaluate a plan; bytes of buffers and of the problem")
    print("     ops  evaluate ms   ns/op spread simulations/s  bytes/simulation  shared bytes")
    for count in sizes:
        problem = random_problem(0, count // 3, 8, memory_factor=2.0)
        plan = plans_of(problem, "blocks", 1)[0]
        simulator = Simulator(problem)
        simulator.evaluate(plan)
        (times,) = in_turns(clock(lambda: simulator.evaluate(plan)), rounds=max(7, 100_000 // count))  # noqa: B023
        shortest, lowered = float(times.min()), lower(problem)
        held = simulator.work, (*lowered.graph, lowered.value, lowered.ranks)
        own, shared = (sum(array.nbytes for array in arrays) for arrays in held)
        print(
            f"{problem.num_ops:8d} {1e3 * shortest:12.4f} {1e9 * shortest / problem.num_ops:7.1f} {spread(times):>6} "
            f"{1 / shortest:13.0f} {own:17,d} {shared:13,d}",
            flush=True,
        )


def threads(sizes: tuple[int, ...]) -> None:
    print("\nsimulate_many on one thread and on two, layered, 8 devices, random plans")
    for count in sizes:
        problem = random_problem(0, count // 3, 8, memory_factor=2.0)
        plans = plans_of(problem, "random", max(6, 500_000 // count))
        one, two = (clock(lambda n=n: simulate_many(problem, plans, threads=n)) for n in (1, 2))  # noqa: B023
        in_turns(one, two, rounds=1)
        single, double = (1e3 * float(times.min()) for times in in_turns(one, two, rounds=9))
        print(f"{problem.num_ops:8d} tasks, {len(plans)} plans: {single:.1f} ms, {double:.1f} ms, gain {single / double:.2f}")


def against_reference() -> None:
    print("\nsimulate (with timeline) against the reference in plain Python, layered, 8 devices, blocks")
    for count in (300, 3_000):
        problem = random_problem(0, count // 3, 8, memory_factor=2.0)
        plan = plans_of(problem, "blocks", 1)[0]
        fast = clock(lambda: [simulate(problem, plan) for _ in range(20)])  # noqa: B023
        plain = clock(lambda: simulate_reference(problem, plan))  # noqa: B023
        fast()
        ours, theirs = (1e3 * float(times.min()) for times in in_turns(fast, plain, rounds=3))
        ours /= 20
        print(f"{problem.num_ops:8d} ops: {ours:.3f} ms, {theirs:.1f} ms, {theirs / ours:.0f}x")


if __name__ == "__main__":
    sizes = (500, 5_000) if arguments(__doc__, quick="small sizes only").quick else (500, 5_000, 100_000)
    one_thread()
    starts()
    buffers(sizes)
    threads(sizes)
    against_reference()
