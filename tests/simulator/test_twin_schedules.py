"""The compiled simulator equals the reference with micro-batches, schedules, stages, orders and collectives, ties included."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import Generator
from toys import pipeline_chain

from rlplace.problem import UPDATE, Problem
from rlplace.problem.generate import random_problem
from rlplace.simulator import Simulator, Timeline, simulate, simulate_many
from rlplace.simulator.reference import STUCK_ORDER, simulate_reference

Draw = Callable[[Generator], Problem]
QUICK = settings(max_examples=300, derandomize=True)


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


def assert_same(ours: Timeline, theirs: Timeline, case: object) -> None:
    for item in dataclasses.fields(Timeline):
        got, wanted = getattr(ours, item.name), getattr(theirs, item.name)
        if isinstance(wanted, np.ndarray):
            same = got.dtype == wanted.dtype and got.shape == wanted.shape and got.tobytes() == wanted.tobytes()
        else:
            same = got == wanted
        assert same, (case, item.name, got, wanted)


def compare(training_problem: Draw, seed: int) -> tuple[Timeline, dict[str, Any]]:
    rng = np.random.default_rng(seed)
    problem = training_problem(rng)
    plan = rng.integers(0, problem.num_devices, problem.num_groups)
    options = run_options(rng, problem, plan)
    ours = simulate(problem, plan, **options)
    assert_same(ours, simulate_reference(problem, plan, **options), seed)
    return ours, options | {"collectives": len(problem.collectives)}


def test_fast_equals_reference_on_seeds(training_problem: Draw) -> None:
    kinds: Counter[str] = Counter()
    for seed in range(1500):
        line, options = compare(training_problem, seed)
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
def test_fast_equals_reference_on_more_seeds(training_problem: Draw) -> None:
    for seed in range(1500, 4000):
        compare(training_problem, seed)


@QUICK
@given(seed=st.integers(0, 2**32 - 1))
def test_fast_equals_reference_on_drawn_seeds(training_problem: Draw, seed: int) -> None:
    compare(training_problem, seed)


@settings(QUICK, max_examples=100)
@given(seed=st.integers(0, 2**32 - 1))
def test_batch_and_simulator_equal_single_simulations(training_problem: Draw, seed: int) -> None:
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


@pytest.mark.parametrize("schedule", ["list", "gpipe", "1f1b"])
def test_random_costs_on_larger_graphs_equal_reference(schedule: str) -> None:
    """Costs that are no small integers: sums must run in the same order to agree in the last bit."""
    for seed in range(6):
        problem = random_problem(
            seed, 30, 4, shape=("layered", "branchy", "chain")[seed % 3], unlike=True, hosts=1 + seed % 2, memory_factor=1.5,
            shared_parameters=4,
        )  # fmt: skip
        plan = np.random.default_rng(seed).integers(0, 4, 30)
        plan = np.sort(plan) if seed % 2 else plan
        options = {"microbatches": 2 + seed, "schedule": schedule}
        assert_same(simulate(problem, plan, **options), simulate_reference(problem, plan, **options), seed)


@pytest.mark.parametrize("devices", [[0, 1, 2], [0, 1, 2] * 2, [0, 1, 2, 2, 1, 0]])
@pytest.mark.parametrize("schedule", ["interleaved", "zero_bubble"])
def test_action_schedules_equal_reference(schedule: str, devices: list[int]) -> None:
    if schedule == "interleaved" and devices[3:] == [2, 1, 0]:
        devices = [1, 0, 2]
    problem = pipeline_chain(len(devices), 3, split=schedule == "zero_bubble", forward_s=1.1, input_s=1.3, weight_s=0.7)
    stages = np.arange(len(devices), dtype=np.int32)
    for microbatches in (3, 6, 9):
        options: dict[str, Any] = {"microbatches": microbatches, "schedule": schedule}
        line = simulate(problem, devices, stage_of_group=stages, **options)
        assert_same(line, simulate_reference(problem, devices, stage_of_group=stages, **options), microbatches)
        if len(devices) == 3:  # stages are devices
            assert Simulator(problem, **options).evaluate(devices)[0] == line.step_time_s
            batch = simulate_many(problem, [devices, devices[::-1]], **options)
            assert batch.step_time_s.tolist() == [line.step_time_s] * 2
