"""The compiled simulator equals the reference bit for bit, on thousands of random problems where ties are the rule.

Among them are rare cases: several transfers that one event lets start, tasks on several devices that end together and queue
for one channel.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from drawn import assert_same, dense_problem

from rlplace.simulator import Timeline, default_priority, simulate
from rlplace.simulator.priority import default_priority as plain_priority
from rlplace.simulator.reference import STUCK_ORDER, simulate_reference


def run_both(seed: int) -> tuple[Timeline, Timeline]:
    rng = np.random.default_rng(seed)
    problem = dense_problem(rng)
    plan = rng.integers(0, problem.num_devices, problem.num_groups)
    options: dict[str, Any] = {}
    mode = rng.integers(3)
    if mode == 1:
        options["priority"] = rng.choice([-1.0, -0.0, 0.0, 0.5, 2.0], problem.num_ops)
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
        assert_same(ours, theirs, seed)
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


def test_default_priority_equals_reference() -> None:
    for seed in range(300):
        problem = dense_problem(np.random.default_rng(seed))
        assert default_priority(problem).tobytes() == plain_priority(problem).tobytes(), seed
