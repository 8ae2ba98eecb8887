"""The compiled simulator equals the reference on thousands of seeded problems, denser than those hypothesis likes to draw.

Hypothesis (`test_twin.py`) finds small counterexamples; these find rare ones: several transfers that one event lets start,
tasks on several devices that end together and queue for one channel.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from drawn import dense_problem

from rlplace.simulator import Timeline, simulate
from rlplace.simulator.reference import STUCK_ORDER, simulate_reference


def run_both(seed: int) -> tuple[Timeline, Timeline]:
    rng = np.random.default_rng(seed)
    problem = dense_problem(rng)
    plan = rng.integers(0, problem.num_devices, problem.num_groups)
    options: dict[str, Any] = {}
    mode = rng.integers(3)
    if mode == 1:
        options["priority"] = rng.integers(0, 3, problem.num_ops).astype(np.float64)
    if mode == 2:
        valid = rng.random() < 0.7
        sequence = problem.topological_order if valid else rng.permutation(problem.num_ops)
        host = plan[problem.op_group]
        options["order"] = [[int(op) for op in sequence if host[op] == device] for device in range(problem.num_devices)]
    return simulate(problem, plan, **options), simulate_reference(problem, plan, **options)


def compare(seeds: range) -> list[Timeline]:
    lines = []
    for seed in seeds:
        ours, theirs = run_both(seed)
        for item in dataclasses.fields(Timeline):
            got, wanted = getattr(ours, item.name), getattr(theirs, item.name)
            if isinstance(wanted, np.ndarray):
                same = got.dtype == wanted.dtype and got.shape == wanted.shape and got.tobytes() == wanted.tobytes()
            else:
                same = got == wanted
            assert same, (seed, item.name, got, wanted)
        lines.append(ours)
    return lines


def test_fast_equals_reference_on_seeds() -> None:
    lines = compare(range(2500))
    kinds = [
        sum(line.feasible for line in lines),
        sum(line.step_time_s is not None and not line.feasible for line in lines),
        sum(line.step_time_s is None for line in lines),
        sum(STUCK_ORDER in line.violations for line in lines),
        sum(len(line.transfer_tensor) > 5 for line in lines),
    ]
    assert min(kinds) > 50, kinds  # every outcome is there often enough to mean something


@pytest.mark.slow
def test_fast_equals_reference_on_more_seeds() -> None:
    compare(range(2500, 12500))
