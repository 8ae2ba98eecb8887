"""The compiled simulator and the benchmark's C++ one equal the reference bit for bit, where ties are the rule."""

from __future__ import annotations

import dataclasses
import importlib.util
import shutil
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from drawn import dense_problem, training_problem
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import Generator
from toys import pipeline_chain

from benchmarks.chain_order import schedule_order
from rlplace.problem import UPDATE, Problem
from rlplace.problem.generate import random_problem
from rlplace.schedule import SCHEDULES
from rlplace.simulator import Simulator, Timeline, default_priority, simulate, simulate_many
from rlplace.simulator.reference import STUCK_ORDER, simulate_reference
from rlplace.simulator.schedules import reference_priority

DRAWS = {"training": training_problem, "dense": dense_problem}
QUICK = settings(max_examples=200, derandomize=True)
SEED = st.integers(0, 2**32 - 1)


def drawn_plan(draw: str, seed: int) -> tuple[Generator, Problem, np.ndarray]:
    rng = np.random.default_rng(seed)
    problem = DRAWS[draw](rng)
    return rng, problem, rng.integers(0, problem.num_devices, problem.num_groups)


def run_options(rng: Generator, problem: Problem, plan: np.ndarray) -> dict[str, Any]:
    """Micro-batches and what decides the order of tasks."""
    options: dict[str, Any] = {"microbatches": int(rng.integers(1, 6)) if rng.random() < 0.7 else 1}
    mode = rng.integers(6)
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
    if rng.random() < 0.4:
        options["priority"] = rng.choice([-1.0, -0.0, 0.0, 0.5, 2.0], problem.num_ops)
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


def compare(draw: str, seed: int) -> tuple[Timeline, dict[str, Any]]:
    rng, problem, plan = drawn_plan(draw, seed)
    options = run_options(rng, problem, plan)
    ours = simulate(problem, plan, **options)
    assert_same(ours, simulate_reference(problem, plan, **options), (draw, seed))
    return ours, options | {"collectives": len(problem.collectives)}


@pytest.mark.parametrize("draw", DRAWS)
def test_fast_equals_reference_on_seeds(draw: str) -> None:
    """Seeds find rare cases: several transfers that one event lets start, tasks on several devices that queue for a channel."""
    kinds: Counter[str] = Counter()
    for seed in range(1500):
        line, options = compare(draw, seed)
        stuck = STUCK_ORDER in line.violations
        kinds[options.get("schedule", "order")] += 1
        kinds.update(
            name
            for name, holds in {
                "collectives": options["collectives"] > 0,
                "micro-batches": options["microbatches"] > 1,
                "stages": "stage_of_group" in options,
                "feasible": line.feasible,
                "short of memory": line.step_time_s is not None and not line.feasible,
                "stuck": stuck,
                "cannot run": line.step_time_s is None and not stuck,
                "busy links": len(line.transfer_tensor) > 5,
            }.items()
            if holds
        )
    assert min(kinds.values()) > 20, kinds  # every kind is there often enough to mean something
    assert len(kinds) == (12 if draw == "training" else 11), kinds


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("draw", DRAWS)
def test_fast_equals_reference_on_more_seeds(draw: str) -> None:
    for seed in range(1500, 8000):
        compare(draw, seed)


@QUICK
@given(draw=st.sampled_from(sorted(DRAWS)), seed=SEED)
def test_fast_equals_reference_on_drawn_seeds(draw: str, seed: int) -> None:
    compare(draw, seed)


@settings(QUICK, max_examples=100)
@given(draw=st.sampled_from(sorted(DRAWS)), seed=SEED)
def test_default_priority_equals_reference(draw: str, seed: int) -> None:
    _, problem, _ = drawn_plan(draw, seed)
    assert default_priority(problem).tobytes() == reference_priority(problem).tobytes()


@QUICK
@given(draw=st.sampled_from(sorted(DRAWS)), seed=SEED)
def test_batch_and_simulator_equal_single_simulations(draw: str, seed: int) -> None:
    rng, problem, _ = drawn_plan(draw, seed)
    plans = rng.integers(0, problem.num_devices, (5, problem.num_groups))
    options = {"microbatches": int(rng.integers(1, 5)), "schedule": ("list", "gpipe", "1f1b")[rng.integers(3)]}
    if rng.random() < 0.5:
        options["priority"] = rng.integers(0, 3, problem.num_ops).astype(np.float64)
    batch = simulate_many(problem, plans, **options, threads=int(rng.integers(1, 4)))
    simulator = Simulator(problem, **options)
    for row, plan in enumerate(plans):
        line = simulate(problem, plan, **options)
        step, overflow = simulator.evaluate(plan)
        assert np.isnan(batch.step_time_s[row]) if line.step_time_s is None else batch.step_time_s[row] == line.step_time_s
        assert step == (np.inf if line.step_time_s is None else line.step_time_s)
        assert batch.feasible[row] == line.feasible
        short = [
            max(0, int(peak) - d.memory_bytes) / d.memory_bytes
            for d, peak in zip(problem.devices, line.peak_memory_bytes, strict=True)
            if d.memory_bytes is not None
        ]
        assert overflow == pytest.approx(sum(short), rel=1e-12, abs=0.0)
        for peak, busy in ((batch.peak_memory_bytes[row], batch.busy_s[row]), (simulator.peak_memory_bytes, simulator.busy_s)):
            assert peak.tolist() == line.peak_memory_bytes.tolist()
            assert busy.tobytes() == line.busy_s.tobytes()
    step, overflow = simulator.evaluate_many(plans)
    assert np.array_equal(step, np.where(np.isnan(batch.step_time_s), np.inf, batch.step_time_s))
    assert [simulator.evaluate(plan)[1] for plan in plans] == overflow.tolist()
    assert simulator.calls == 3 * len(plans)


@pytest.mark.parametrize("schedule", ["list", "gpipe", "1f1b"])
def test_random_costs_on_larger_graphs_equal_reference(schedule: str) -> None:
    """Costs that are no small integers: sums must run in the same order to agree in the last bit."""
    for seed in range(6):
        problem = random_problem(
            seed, 40, 4, shape=("layered", "branchy", "chain")[seed % 3], unlike=True, hosts=1 + seed % 2, memory_factor=1.5,
            shared_parameters=6, comm_ratio=1.0,
        )  # fmt: skip
        plan = np.random.default_rng(seed).integers(0, 4, 40)
        plan = np.sort(plan) if seed % 2 else plan
        options = {"microbatches": 1 + seed, "schedule": schedule}
        assert_same(simulate(problem, plan, **options), simulate_reference(problem, plan, **options), seed)


@pytest.mark.parametrize(
    ("schedule", "devices"),
    [
        ("looped_bfs", [0, 1, 2] * 2),
        ("interleaved_1f1b", [0, 1, 2]),
        ("interleaved_1f1b", [0, 1, 2] * 2),
        ("interleaved_1f1b", [1, 0, 2]),
        ("interleaved_zero_bubble", [0, 1, 2]),
        ("interleaved_zero_bubble", [0, 1, 2] * 2),
        ("zbv", [0, 1, 2, 2, 1, 0]),
        ("dualpipev", [0, 1, 2, 2, 1, 0]),
    ],
)
def test_action_schedules_equal_reference(schedule: str, devices: list[int]) -> None:
    split = SCHEDULES[schedule].splits_backward
    problem = pipeline_chain(len(devices), 3, split=split, forward_s=1.1, input_s=1.3, weight_s=0.7)
    stages = np.arange(len(devices), dtype=np.int32)
    for microbatches in (6, 9) if schedule == "dualpipev" else (3, 6, 9):
        order = schedule_order(problem, np.array(devices), schedule, microbatches, stages, default_priority(problem))
        options: dict[str, Any] = {"microbatches": microbatches, "order": order}
        assert_same(simulate(problem, devices, **options), simulate_reference(problem, devices, **options), microbatches)


@pytest.fixture(scope="module")
def driver() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "simulator_cpp" / "driver.py"
    spec = importlib.util.spec_from_file_location("simulator_cpp_driver", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="no C++ compiler")
def test_plain_cpp_equals_the_compiled_simulator(driver: ModuleType, tmp_path: Path) -> None:
    executable = driver.compile_simulator(tmp_path)
    shapes = ("layered", "branchy", "chain")
    for seed in range(30):
        rng = np.random.default_rng(seed)
        devices = int(rng.integers(1, 9))
        problem = random_problem(
            seed, int(rng.integers(1, 120)), devices, shape=shapes[seed % 3], unlike=seed % 2 == 0, memory_factor=1.5,
            hosts=1 + seed % min(2, devices), shared_parameters=seed % 7, null_fraction=0.01 * (seed % 5 == 0),
        )  # fmt: skip
        plans = rng.integers(0, devices, (6, problem.num_groups))
        ours = simulate_many(problem, plans)
        with driver.PlainCpp(executable, tmp_path, problem, plans) as cpp:
            cpp.seconds()
            outcome, step, peak, busy = cpp.results()
        done = outcome == 0
        assert (done == ~np.isnan(ours.step_time_s)).all()
        assert (step[done] == ours.step_time_s[done]).all()
        assert (peak[done] == ours.peak_memory_bytes[done]).all()
        assert busy[done].tobytes() == ours.busy_s[done].tobytes()
