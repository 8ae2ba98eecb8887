"""The compiled simulator equals the reference with micro-batches, schedules, stages, orders and collectives, ties included."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.random import Generator

from rlplace.errors import InputError
from rlplace.problem import BACKWARD, BACKWARD_WEIGHT, FORWARD, UPDATE, Collective, Links, Problem
from rlplace.problem.problem import Device
from rlplace.problem.toys import TensorSpec, build_problem
from rlplace.simulator import Simulator, Timeline, simulate, simulate_many
from rlplace.simulator.reference import STUCK_ORDER, simulate_reference

QUICK = settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def training_problem(rng: Generator) -> Problem:
    """Up to 16 ops of all phases with costs of 0 to 3 on up to 4 devices, often with collectives."""
    devices, groups, ops = (int(rng.integers(1, most)) for most in (5, 8, 17))
    phase = np.sort(rng.choice([FORWARD, FORWARD, BACKWARD, BACKWARD, BACKWARD_WEIGHT, UPDATE], ops))
    if rng.random() < 0.2:
        phase = rng.permutation(phase)  # nobody says that updates come last
    tensors = []
    for _ in range(rng.integers(0, 18)):
        producer = None if rng.random() < 0.2 else int(rng.integers(ops))
        later = rng.permutation(np.arange(0 if producer is None else producer + 1, ops))
        readers = later[rng.random(len(later)) < 0.3].tolist()
        owner = int(rng.integers(groups)) if producer is None else None
        tensors.append(TensorSpec(producer, int(rng.integers(0, 4)), readers, owner))
    times = rng.integers(0, 4, (ops, devices)).astype(np.float64)
    if rng.random() < 0.1:
        times[(rng.random(times.shape) < 0.1) & (np.arange(devices) > 0)] = np.nan
    bandwidth = rng.integers(1, 3, (devices, devices)).astype(np.float64)
    if rng.random() < 0.1:
        bandwidth[rng.random(bandwidth.shape) < 0.1] = 0.0
    most = int(rng.integers(0, 3))  # channels of one transfer; 0: every pair has its own
    channels = None
    if most:
        channels = tuple(
            tuple(tuple(rng.choice(4, rng.integers(0, most + 1), replace=False).tolist()) for _ in range(devices))
            for _ in range(devices)
        )
    problem = build_problem(
        "training",
        time_s=times,  # type: ignore[arg-type]
        tensors=tensors,
        memory_bytes=[None] * devices,
        group=rng.integers(0, groups, ops).tolist(),
        phase=phase.tolist(),
        resident_bytes=rng.integers(0, 4, groups).tolist(),
        temporary_bytes=rng.integers(0, 3, ops).tolist(),
        links=Links(bandwidth, rng.integers(0, 2, bandwidth.shape).astype(np.float64), channels),
        group_device=np.where(rng.random(groups) < 0.1, 0, -1).tolist(),
    )
    limits = [None if rng.random() < 0.5 else int(rng.integers(5, 40)) for _ in range(devices)]
    tables = rng.permutation(len(tensors))[: rng.integers(0, 2)].tolist()
    return with_collectives(rng, dataclasses.replace(
        problem,
        devices=tuple(Device(f"d{i}", limit, int(rng.integers(0, 3))) for i, limit in enumerate(limits)),
        tensor_transfer_s={tensor: rng.integers(0, 3, (devices, devices)).astype(np.float64) for tensor in tables},
    ))  # fmt: skip


def with_collectives(rng: Generator, problem: Problem) -> Problem:
    """Makes collectives of random ops of one phase; where that would be cyclic, the problem stays as it is."""
    kinds, collectives = [""] * problem.num_ops, []
    free = rng.permutation(problem.num_ops).tolist()
    for _ in range(rng.integers(0, 3)):
        if free:
            same = [op for op in free if problem.op_phase[op] == problem.op_phase[free[0]]][: rng.integers(1, 4)]
            free = [op for op in free if op not in same]
            channels = rng.choice(4, rng.integers(0, 3), replace=False).tolist()
            collectives.append(Collective(tuple(same), tuple(channels)))
            for op in same:
                kinds[op] = "collective"
    try:
        return dataclasses.replace(problem, collectives=tuple(collectives), op_kind=tuple(kinds))
    except InputError:
        return problem


def run_options(rng: Generator, problem: Problem, plan: np.ndarray) -> dict[str, Any]:
    """Micro-batches and what decides the order of tasks."""
    options: dict[str, Any] = {"microbatches": int(rng.integers(1, 6))}
    mode = rng.integers(8)
    if mode == 0:
        listed = np.ones(problem.num_ops, dtype=bool)
        listed[[op for collective in problem.collectives for op in collective.ops]] = False
        sequence = problem.topological_order if rng.random() < 0.7 else rng.permutation(problem.num_ops)
        count = options["microbatches"]
        once = problem.op_phase == UPDATE
        pairs = [(int(op), m) for m in range(count) for op in sequence if not once[op] and listed[op]]
        pairs += [(int(op), 0) for op in sequence if once[op] and listed[op]]
        host = plan[problem.op_group]
        rows = [[pair for pair in pairs if host[pair[0]] == device] for device in range(problem.num_devices)]
        options["order"] = [[op for op, _ in row] for row in rows] if count == 1 else rows
        return options
    if rng.random() < 0.3:
        options["priority"] = rng.integers(0, 3, problem.num_ops).astype(np.float64)
    options["schedule"] = ("list", "gpipe", "1f1b")[mode % 3]
    if rng.random() < 0.4:
        options["stage_of_group"] = rng.integers(0, rng.integers(1, 9), problem.num_groups).astype(np.int32)
    return options


def compare(seed: int) -> tuple[Timeline, dict[str, Any]]:
    rng = np.random.default_rng(seed)
    problem = training_problem(rng)
    plan = rng.integers(0, problem.num_devices, problem.num_groups)
    options = run_options(rng, problem, plan)
    ours, theirs = simulate(problem, plan, **options), simulate_reference(problem, plan, **options)
    for item in dataclasses.fields(Timeline):
        got, wanted = getattr(ours, item.name), getattr(theirs, item.name)
        if isinstance(wanted, np.ndarray):
            same = got.dtype == wanted.dtype and got.shape == wanted.shape and got.tobytes() == wanted.tobytes()
        else:
            same = got == wanted
        assert same, (seed, item.name, got, wanted)
    return ours, options | {"collectives": len(problem.collectives)}


def test_fast_equals_reference_on_seeds() -> None:
    kinds: Counter[str] = Counter()
    for seed in range(1500):
        line, options = compare(seed)
        kinds[options.get("schedule", "order")] += 1
        kinds["collectives"] += options["collectives"] > 0
        kinds["micro-batches"] += options["microbatches"] > 1
        kinds["stages"] += "stage_of_group" in options
        kinds["feasible"] += line.feasible
        kinds["stuck"] += STUCK_ORDER in line.violations
        kinds["cannot run"] += line.step_time_s is None and STUCK_ORDER not in line.violations
        kinds["busy links"] += len(line.transfer_tensor) > 5
    assert min(kinds.values()) > 20 and len(kinds) == 11, kinds  # every kind is there often enough to mean something


@pytest.mark.slow
def test_fast_equals_reference_on_more_seeds() -> None:
    for seed in range(1500, 15000):
        compare(seed)


@QUICK
@given(st.integers(0, 2**32 - 1))
def test_fast_equals_reference_on_drawn_seeds(seed: int) -> None:
    compare(seed)


@settings(QUICK, max_examples=100)
@given(st.integers(0, 2**32 - 1))
def test_batch_and_simulator_equal_single_simulations(seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = training_problem(rng)
    plans = rng.integers(0, problem.num_devices, (4, problem.num_groups))
    options = {"microbatches": int(rng.integers(1, 5)), "schedule": ("list", "gpipe", "1f1b")[rng.integers(3)]}
    batch = simulate_many(problem, plans, **options, threads=int(rng.integers(1, 4)))
    simulator = Simulator(problem, **options)
    for row, plan in enumerate(plans):
        line = simulate(problem, plan, **options)
        step, _ = simulator.evaluate(plan)
        assert batch[row].step_time_s == line.step_time_s
        assert step == (np.inf if line.step_time_s is None else line.step_time_s)
        assert batch[row].feasible == line.feasible
        for peaks, busy in (
            (batch[row].peak_memory_bytes, batch[row].busy_s),
            (simulator.peak_memory_bytes, simulator.busy_s),
        ):
            assert peaks.tolist() == line.peak_memory_bytes.tolist()
            assert busy.tobytes() == line.busy_s.tobytes()
