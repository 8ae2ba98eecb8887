"""The compiled simulator equals the reference bit for bit, on random problems where ties are the rule."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlplace.problem import Links, Problem
from rlplace.problem.build import TensorSpec, build_problem
from rlplace.problem.problem import Device
from rlplace.simulator import Simulator, Timeline, default_priority, simulate, simulate_many
from rlplace.simulator import reference as plain
from rlplace.simulator.priority import reference_priority as plain_priority

QUICK = settings(max_examples=300, derandomize=True)
THOUSANDS = settings(max_examples=1500, derandomize=True)

small = st.integers(0, 3)


def _matrix(draw: Any, devices: int, values: Any) -> np.ndarray:
    row = st.lists(values, min_size=devices, max_size=devices)
    return np.array(draw(st.lists(row, min_size=devices, max_size=devices)), dtype=np.float64)


@st.composite
def problems(draw: Any) -> Problem:
    """Few ops with costs of 0 to 3, so that many things end at once."""
    devices, groups, ops = draw(st.integers(1, 4)), draw(st.integers(1, 6)), draw(st.integers(1, 12))
    times = draw(st.lists(st.lists(small, min_size=devices, max_size=devices), min_size=ops, max_size=ops))
    times = np.array(times, dtype=np.float64)
    if draw(st.integers(0, 4)) == 0:  # null times, never on every device
        times[draw(st.integers(0, ops - 1)), draw(st.integers(0, devices - 1))] = np.nan if devices > 1 else 1.0
    tensors = []
    transfer_s = {}
    for number in range(draw(st.integers(0, 12))):
        owned = draw(st.integers(0, 3)) == 0
        first = 0 if owned else draw(st.integers(0, ops - 1))
        allowed = range(0 if owned else first + 1, ops)
        consumers = draw(st.lists(st.sampled_from(allowed), unique=True, max_size=5)) if len(allowed) else []
        producer, owner = (None, draw(st.integers(0, groups - 1))) if owned else (first, None)
        tensors.append(TensorSpec(producer, draw(small), consumers, owner))
        if draw(st.integers(0, 7)) == 0:
            transfer_s[number] = _matrix(draw, devices, small)
    kind = draw(st.sampled_from(["private", "shared", "several", "none"]))
    channels = None
    if kind != "private":
        held = {
            "shared": st.tuples(st.integers(0, 1)),
            "several": st.lists(st.integers(0, 3), unique=True, max_size=3).map(tuple),
            "none": st.just(()),
        }[kind]
        channels = tuple(tuple(draw(held) for _ in range(devices)) for _ in range(devices))
    bandwidth = _matrix(draw, devices, st.integers(1, 2))
    if draw(st.integers(0, 5)) == 0:
        bandwidth[draw(st.integers(0, devices - 1)), draw(st.integers(0, devices - 1))] = 0.0
    problem = build_problem(
        "random",
        time_s=times,
        tensors=tensors,
        memory_bytes=[None] * devices,
        group=draw(st.lists(st.integers(0, groups - 1), min_size=ops, max_size=ops)),
        resident_bytes=draw(st.lists(small, min_size=groups, max_size=groups)),
        temporary_bytes=draw(st.lists(small, min_size=ops, max_size=ops)),
        links=Links(bandwidth, _matrix(draw, devices, st.integers(0, 1)), channels),
        group_device=draw(st.lists(st.sampled_from([-1, -1, -1, 0]), min_size=groups, max_size=groups)),
    )
    limits = draw(st.lists(st.sampled_from([None, 4, 8, 16]), min_size=devices, max_size=devices))
    machines = tuple(Device(f"d{i}", limit, draw(small)) for i, limit in enumerate(limits))
    return dataclasses.replace(problem, devices=machines, tensor_transfer_s=transfer_s)


@st.composite
def runs(draw: Any) -> tuple[Problem, list[int], dict[str, Any]]:
    """A problem, a plan and how ties between ready ops are settled."""
    problem = draw(problems())
    ops, devices = problem.num_ops, problem.num_devices
    groups = problem.num_groups
    plan = draw(st.lists(st.integers(0, devices - 1), min_size=groups, max_size=groups))
    mode = draw(st.sampled_from(["default", "priority", "order", "deadlocking order"]))
    if mode == "default":
        return problem, plan, {}
    if mode == "priority":
        values = draw(st.lists(st.sampled_from([-1.0, -0.0, 0.0, 0.5, 2.0]), min_size=ops, max_size=ops))
        return problem, plan, {"priority": np.array(values)}
    sequence = draw(st.permutations(range(ops))) if mode != "order" else problem.topological_order.tolist()
    host = [plan[group] for group in problem.op_group]
    return problem, plan, {"order": [[op for op in sequence if host[op] == device] for device in range(devices)]}


def assert_same(ours: Timeline, theirs: Timeline) -> None:
    for item in dataclasses.fields(Timeline):
        got, wanted = getattr(ours, item.name), getattr(theirs, item.name)
        if isinstance(wanted, np.ndarray):
            assert got.dtype == wanted.dtype, item.name
            assert got.shape == wanted.shape, item.name
            assert got.tobytes() == wanted.tobytes(), (item.name, got, wanted)
        else:
            assert got == wanted, (item.name, got, wanted)


def _check(run: tuple[Problem, list[int], dict[str, Any]]) -> None:
    problem, plan, options = run
    assert_same(simulate(problem, plan, **options), plain.simulate_reference(problem, plan, **options))


@QUICK
@given(runs())
def test_fast_equals_reference(run: tuple[Problem, list[int], dict[str, Any]]) -> None:
    _check(run)


@pytest.mark.slow
@pytest.mark.long
@THOUSANDS
@given(runs())
def test_fast_equals_reference_on_thousands(run: tuple[Problem, list[int], dict[str, Any]]) -> None:
    _check(run)


@settings(QUICK, max_examples=100)
@given(problems())
def test_default_priority_equals_reference(problem: Problem) -> None:
    assert default_priority(problem).tobytes() == plain_priority(problem).tobytes()


@settings(QUICK, max_examples=100)
@given(problems(), st.integers(0, 2**32 - 1))
def test_batch_and_simulator_equal_single_simulations(problem: Problem, seed: int) -> None:
    rng = np.random.default_rng(seed)
    plans = rng.integers(0, problem.num_devices, (5, problem.num_groups))
    priority = rng.integers(0, 3, problem.num_ops).astype(np.float64)
    for options in ({}, {"priority": priority}):
        batch = simulate_many(problem, plans, **options)
        simulator = Simulator(problem, **options)
        for row, plan in enumerate(plans):
            line = simulate(problem, plan, **options)
            assert batch[row].step_time_s == line.step_time_s
            assert np.isnan(batch.step_time_s[row]) == (line.step_time_s is None)
            assert batch[row].peak_memory_bytes.tolist() == line.peak_memory_bytes.tolist()
            assert batch[row].busy_s.tobytes() == line.busy_s.tobytes()
            assert batch[row].feasible == line.feasible
            step, overflow = simulator.evaluate(plan)
            assert step == (np.inf if line.step_time_s is None else line.step_time_s)
            short = [
                max(0, int(peak) - d.memory_bytes) / d.memory_bytes
                for d, peak in zip(problem.devices, line.peak_memory_bytes, strict=True)
                if d.memory_bytes is not None
            ]
            assert overflow == pytest.approx(sum(short), rel=1e-12, abs=0.0)
            assert (simulator.peak_memory_bytes == line.peak_memory_bytes).all()
        step, overflow = simulator.evaluate_many(plans)
        assert np.array_equal(step, np.where(np.isnan(batch.step_time_s), np.inf, batch.step_time_s))
        assert [simulator.evaluate(plan)[1] for plan in plans] == overflow.tolist()
        assert simulator.calls == 3 * len(plans)


def test_random_costs_on_larger_graphs_equal_reference() -> None:
    """Costs that are no small integers: sums must run in the same order to agree in the last bit."""
    from rlplace.problem.generate import random_problem

    for seed in range(12):
        problem = random_problem(
            seed, 40, 4, shape=("layered", "branchy", "chain")[seed % 3], unlike=True, hosts=1 + seed % 2,
            memory_factor=1.5, shared_parameters=6, comm_ratio=1.0,
        )  # fmt: skip
        plan = np.random.default_rng(seed).integers(0, 4, 40)
        assert_same(simulate(problem, plan), plain.simulate_reference(problem, plan))
