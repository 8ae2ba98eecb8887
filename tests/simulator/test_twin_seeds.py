"""The compiled simulator equals the reference on thousands of seeded problems, denser than those hypothesis likes to draw.

Hypothesis (`test_twin.py`) finds small counterexamples; these find rare ones: several transfers that one event lets start,
tasks on several devices that end together and queue for one channel.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from numpy.random import Generator

from rlplace.problem import Links, Problem
from rlplace.problem.build import TensorSpec, build_problem
from rlplace.problem.problem import Device
from rlplace.simulator import Timeline, simulate
from rlplace.simulator.reference import STUCK_ORDER, simulate_reference


def dense_problem(rng: Generator) -> Problem:
    """Up to 14 ops and 15 tensors with costs of 0 to 3 on up to 5 devices that share up to 4 channels."""
    devices, groups, ops = (int(rng.integers(1, most)) for most in (6, 9, 15))
    tensors = []
    for _ in range(rng.integers(0, 16)):
        producer = None if rng.random() < 0.25 else int(rng.integers(ops))
        later = rng.permutation(np.arange(0 if producer is None else producer + 1, ops))
        readers = later[rng.random(len(later)) < 0.3].tolist()
        owner = int(rng.integers(groups)) if producer is None else None
        tensors.append(TensorSpec(producer, int(rng.integers(0, 4)), readers, owner))
    times = rng.integers(0, 4, (ops, devices)).astype(np.float64)
    if rng.random() < 0.2:
        times[(rng.random(times.shape) < 0.1) & (np.arange(devices) > 0)] = np.nan
    bandwidth = rng.integers(1, 3, (devices, devices)).astype(np.float64)
    if rng.random() < 0.2:
        bandwidth[rng.random(bandwidth.shape) < 0.1] = 0.0
    most = int(rng.integers(0, 4))  # channels of one transfer; 0: every pair has its own
    channels = None
    if most:
        channels = tuple(
            tuple(tuple(rng.choice(4, rng.integers(0, most + 1), replace=False).tolist()) for _ in range(devices))
            for _ in range(devices)
        )
    problem = build_problem(
        "dense",
        time_s=times,  # type: ignore[arg-type]
        tensors=tensors,
        memory_bytes=[None] * devices,
        group=rng.integers(0, groups, ops).tolist(),
        resident_bytes=rng.integers(0, 4, groups).tolist(),
        temporary_bytes=rng.integers(0, 3, ops).tolist(),
        links=Links(bandwidth, rng.integers(0, 2, bandwidth.shape).astype(np.float64), channels),
        group_device=np.where(rng.random(groups) < 0.1, 0, -1).tolist(),
    )
    limits = [None if rng.random() < 0.5 else int(rng.integers(5, 30)) for _ in range(devices)]
    tables = [tensor for tensor in range(len(tensors)) if rng.random() < 0.1]
    return dataclasses.replace(
        problem,
        devices=tuple(Device(f"d{i}", limit, int(rng.integers(0, 3))) for i, limit in enumerate(limits)),
        tensor_transfer_s={tensor: rng.integers(0, 3, (devices, devices)).astype(np.float64) for tensor in tables},
    )


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
