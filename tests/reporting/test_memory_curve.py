"""Memory over time: its maximum is the compiled simulator's peak, and everything but resident bytes is free at the end."""

import dataclasses

import numpy as np
import pytest

from rlplace.plan.plan import make_plan
from rlplace.problem.build import TensorSpec, build_problem
from rlplace.problem.generate import SHAPES, random_problem
from rlplace.reporting.memory_curve import MemoryCurve, memory_curves
from rlplace.simulator import expand, simulate


def curves_of(problem, plan, line):
    curves = memory_curves(problem, plan, line)
    assert [curve.peak_bytes for curve in curves] == line.peak_memory_bytes.tolist()
    return curves


@pytest.mark.parametrize("seed", range(12))
def test_the_largest_value_is_the_peak(seed):
    problem = random_problem(
        seed,
        num_groups=14 + seed,
        num_devices=2 + seed % 3,
        shape=SHAPES[seed % 5],
        hosts=1 + seed % 2,
        shared_parameters=seed % 4,
        memory_factor=(None, 1.2)[seed % 2],
    )
    devices = np.random.default_rng(seed).integers(0, problem.num_devices, problem.num_groups).astype(np.int32)
    microbatches, schedule = ((1, "list"), (3, "gpipe"), (3, "1f1b"), (2, "list"))[seed % 4]
    plan = make_plan(problem, devices, planner="hand", microbatches=microbatches, schedule=schedule)
    if simulate(problem, plan).step_time_s is None:  # gates that never open
        plan = dataclasses.replace(plan, schedule="list")
    line = simulate(problem, plan)
    curves = curves_of(problem, plan, line)
    for curve in curves:
        assert (np.diff(curve.time_s) >= 0).all() and curve.time_s[-1] == line.step_time_s
        assert curve.in_use_bytes[-1] == curve.in_use_bytes[0], "everything but resident bytes is free at the end"


def test_plans_with_an_order_or_a_schedule_of_actions():
    problem = random_problem(4, num_groups=16, num_devices=4, shape="chain")
    fields = {"planner": "hand", "microbatches": 4, "schedule": "interleaved_1f1b", "stage_of_group": np.arange(16) // 2}
    plan = make_plan(problem, np.arange(16) // 2 % 4, **fields)
    line = simulate(problem, plan)
    assert line.step_time_s is not None
    curves_of(problem, plan, line)
    devices = np.arange(16, dtype=np.int32) // 4
    free = simulate(problem, devices)
    order = [sorted(np.flatnonzero(free.device_of_op == d).tolist(), key=lambda op: free.start_s[op]) for d in range(4)]
    plan = make_plan(problem, devices, planner="hand", order=order)
    line = simulate(problem, plan)
    assert line.step_time_s is not None
    curves_of(problem, plan, line)


@pytest.mark.parametrize("sharded", [False, True])
def test_replicas_with_collectives(sharded):
    problem = random_problem(5, num_groups=24, num_devices=4)
    fields = {"microbatches": 2, "replicas": [[0, 1], [2, 3]], "optimizer_sharding": sharded}
    plan = make_plan(problem, np.arange(24) * 2 // 24, planner="hand", **fields)
    drawn, plain = expand(problem, plan)
    assert drawn.collectives
    curves_of(drawn, plain, simulate(drawn, plain))


def test_recomputed_segments():
    problem = random_problem(6, num_groups=20, num_devices=2, shape="chain")
    plan = make_plan(problem, np.arange(20) // 10, planner="hand", recompute=[[2, 3, 4], [12, 13]])
    drawn, plain = expand(problem, plan)
    curves_of(drawn, plain, simulate(drawn, plain))


def test_a_peak_that_lasts_no_time_is_kept():
    """Op 1 takes 70 bytes and no time; while it runs, 170 are in use."""
    problem = build_problem(
        "instant",
        time_s=[[1.0], [0.0], [1.0]],
        tensors=[TensorSpec(0, 100, [2]), TensorSpec(0, 0, [1]), TensorSpec(1, 0, [2])],
        memory_bytes=[None],
        temporary_bytes=[0, 70, 0],
    )
    plan = make_plan(problem, [0, 0, 0], planner="hand")
    (curve,) = curves_of(problem, plan, simulate(problem, plan))
    assert curve.peak_bytes == 170
    assert [(t, v) for t, v in zip(curve.time_s, curve.in_use_bytes, strict=True) if t == 1.0] == [(1.0, 170), (1.0, 100)]


def test_a_step_that_does_not_complete_shows_resident_bytes():
    problem = build_problem("broken", time_s=[[1.0, np.nan]], tensors=[], memory_bytes=[None, 50], resident_bytes=[30])
    plan = make_plan(problem, [1], planner="hand")
    line = simulate(problem, plan)
    assert line.step_time_s is None
    curves = curves_of(problem, plan, line)
    assert [curve.in_use_bytes.tolist() for curve in curves] == [[0], [30]]


@pytest.mark.parametrize("points", [8, 100, 999])
def test_thinning_keeps_peak_ends_and_order(points):
    rng = np.random.default_rng(0)
    time = np.sort(rng.random(1000))
    curve = MemoryCurve(time, rng.integers(0, 10**12, 1000))
    thin = curve.thinned(points)
    assert len(thin.time_s) <= points
    assert thin.peak_bytes == curve.peak_bytes
    assert thin.time_s[0] == time[0] and thin.time_s[-1] == time[-1]
    pairs = set(zip(curve.time_s.tolist(), curve.in_use_bytes.tolist(), strict=True))
    assert set(zip(thin.time_s.tolist(), thin.in_use_bytes.tolist(), strict=True)) <= pairs
    assert curve.thinned(1000) is curve
    assert dataclasses.is_dataclass(thin)
