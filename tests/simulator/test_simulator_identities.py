"""Facts about step times that hold for every problem."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import pytest

from rlplace.cluster.links import Links
from rlplace.problem import Problem
from rlplace.problem.generate import random_problem
from rlplace.simulator import default_priority, reference, simulate, simulate_many
from rlplace.simulator.reference import simulate_reference
from rlplace.simulator.timeline import resident_by_device
from tests.drawn import training_problem
from tests.toys import TOYS

SEEDS = range(8)
SHAPES = ("layered", "branchy", "chain")


def _with_links(problem: Problem, bandwidth: float, latency: float) -> Problem:
    shape = (problem.num_devices, problem.num_devices)
    return dataclasses.replace(problem, links=Links(np.full(shape, bandwidth), np.full(shape, latency)))


@pytest.mark.parametrize("seed", SEEDS)
def test_one_device_takes_the_sum_of_all_times(seed: int) -> None:
    problem = random_problem(seed, 30, 3, shape=SHAPES[seed % 3], unlike=True)
    for device in range(3):
        line = simulate(problem, [device] * 30)
        assert line.step_time_s == pytest.approx(problem.time_s[:, device].sum(), rel=1e-12)
        assert line.busy_s[device] == pytest.approx(line.step_time_s, rel=1e-12)
        assert len(line.transfer_tensor) == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_a_device_per_op_and_free_transfers_take_the_critical_path(seed: int) -> None:
    problem = random_problem(seed, 24, 24, shape=SHAPES[seed % 3], training=False)
    free = dataclasses.replace(_with_links(problem, 1.0, 0.0), tensor_bytes=np.zeros(problem.num_tensors, dtype=np.int64))
    assert simulate(free, np.arange(24)).step_time_s == pytest.approx(default_priority(free).max(), rel=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("factor", [2.0, 0.25])
def test_scaling_every_cost_scales_the_step(seed: int, factor: float) -> None:
    """By powers of two, which round nothing."""
    problem = random_problem(seed, 30, 4, shape=SHAPES[seed % 3], hosts=2, shared_parameters=3)
    links = dataclasses.replace(
        problem.links,
        bandwidth_bytes_per_s=problem.links.bandwidth_bytes_per_s / factor,
        latency_s=problem.links.latency_s * factor,
    )
    scaled = dataclasses.replace(problem, time_s=problem.time_s * factor, links=links)
    plan = np.random.default_rng(seed).integers(0, 4, 30)
    before, after = simulate(problem, plan), simulate(scaled, plan)
    assert after.step_time_s == before.step_time_s * factor
    assert (after.end_s == before.end_s * factor).all()
    assert (after.peak_memory_bytes == before.peak_memory_bytes).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_step_respects_both_lower_bounds_and_its_own_record(seed: int) -> None:
    problem = random_problem(seed, 30, 4, shape=SHAPES[seed % 3], hosts=2, shared_parameters=3)
    plan = np.random.default_rng(seed).integers(0, 4, 30)
    line = simulate(problem, plan)
    assert line.step_time_s >= line.busy_s.max()
    assert line.step_time_s >= default_priority(problem).max() * (1 - 1e-12)
    assert line.step_time_s == max(line.end_s.max(), line.transfer_end_s.max(initial=0.0))
    for device in range(4):  # one task at a time
        mine = np.flatnonzero(line.device_of_op == device)
        mine = mine[np.argsort(line.start_s[mine], kind="stable")]
        assert (line.start_s[mine[1:]] >= line.end_s[mine[:-1]]).all()
    arrival = {
        (t, d): end for t, d, end in zip(line.transfer_tensor, line.transfer_destination, line.transfer_end_s, strict=True)
    }
    assert len(arrival) == len(line.transfer_tensor)  # at most once to each device
    for tensor, op in zip(problem.edge_tensor.tolist(), problem.consumers.tolist(), strict=True):
        producer = problem.tensor_producer[tensor]
        home = line.device_of_op[producer] if producer >= 0 else plan[problem.tensor_owner[tensor]]
        here = line.device_of_op[op]
        present = arrival[tensor, here] if here != home else (line.end_s[producer] if producer >= 0 else 0.0)
        assert line.start_s[op] >= present
    for i in range(len(line.transfer_tensor)):  # one transfer at a time on every channel
        held = set(problem.links.effective_channels[line.transfer_source[i]][line.transfer_destination[i]])
        for j in range(i):
            other = problem.links.effective_channels[line.transfer_source[j]][line.transfer_destination[j]]
            if held & set(other):
                assert line.transfer_start_s[i] >= line.transfer_end_s[j]


@pytest.mark.parametrize("seed", SEEDS)
def test_memory_without_activations_is_what_is_resident(seed: int) -> None:
    problem = random_problem(seed, 30, 3, shape=SHAPES[seed % 3])
    empty = dataclasses.replace(
        problem,
        tensor_bytes=np.zeros(problem.num_tensors, dtype=np.int64),
        temporary_bytes=np.zeros(problem.num_ops, dtype=np.int64),
    )
    plan = np.random.default_rng(seed).integers(0, 3, 30)
    resident = np.bincount(plan, weights=problem.resident_bytes, minlength=3)
    assert simulate(empty, plan).peak_memory_bytes.tolist() == resident.tolist()


@pytest.mark.parametrize("name", [name for name in TOYS if name != "fork_join"])
def test_no_plan_of_a_toy_beats_its_stated_optimum(name: str) -> None:
    problem, optimum, plan = TOYS[name]()
    every = np.indices((problem.num_devices,) * problem.num_groups).reshape(problem.num_groups, -1).T
    batch = simulate_many(problem, every)
    assert batch.step_time_s[batch.feasible].min() == optimum
    line = simulate(problem, plan)
    assert line.feasible and line.step_time_s == optimum


def test_fork_join_reaches_its_optimum_for_any_width() -> None:
    for width in (1, 4, 7, 9):
        for devices in (1, 2, 4):
            problem, optimum, plan = TOYS["fork_join"](width, devices)  # type: ignore[call-arg]
            assert simulate(problem, plan).step_time_s == optimum


MANY_SEEDS = range(800)


def draw(seed: int) -> tuple[Problem, np.ndarray, dict]:
    rng = np.random.default_rng([seed, 17])
    problem = training_problem(rng)
    plan = rng.integers(0, problem.num_devices, problem.num_groups).astype(np.int32)
    options: dict = {}
    if rng.random() < 0.3:
        options["priority"] = rng.integers(0, 3, problem.num_ops).astype(np.float64)
    return problem, plan, options


@pytest.mark.slow
def test_at_the_end_only_resident_bytes_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every output, copy and temporary is freed exactly once."""
    runs: list[reference.ReferenceRun] = []

    class Watched(reference.ReferenceRun):
        def run(self) -> None:
            runs.append(self)
            super().run()

        def release(self, value: int, device: int) -> None:
            super().release(value, device)
            assert self.memory[device] >= self.least[device]

        @property
        def least(self) -> list[int]:
            return resident_by_device(problem, plan).tolist()

    monkeypatch.setattr(reference, "ReferenceRun", Watched)
    kinds: Counter[bool] = Counter()
    for seed in MANY_SEEDS:
        problem, plan, options = draw(seed)
        runs.clear()
        if simulate_reference(problem, plan, **options).step_time_s is None:
            continue
        (run,) = runs
        assert run.memory == resident_by_device(problem, plan).tolist(), seed
        assert not run.waiting and not run.busy_channels and not any(run.uses.values()), seed
        kinds[bool(problem.collectives)] += 1
    assert len(kinds) == 2 and min(kinds.values()) > 20, kinds
