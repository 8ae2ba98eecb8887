"""Stages and schedules of strategies, and the curves of epochs that choose a global batch."""

import dataclasses
import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from toys import pipeline_chain

from rlplace.errors import InputError
from rlplace.planners import takes_microbatches
from rlplace.planners.common.groupgraph import group_graph
from rlplace.planners.strategy.choices import StageLayout, Strategy
from rlplace.planners.strategy.one import place_one, problem_of_replica
from rlplace.planners.strategy.stages import contiguous_parts, other_schedules
from rlplace.planners.strategy.sweep import place_strategies
from rlplace.problem.build import TensorSpec, build_problem
from rlplace.problem.generate import random_problem
from rlplace.simulator import simulate
from rlplace.strategy.efficiency import BatchCurve


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_contiguous_parts_have_the_smallest_largest_time(seed, parts):
    problem = random_problem(seed, 9, 2, shape="branchy")
    found = contiguous_parts(problem, parts)
    graph = group_graph(problem)
    weight = graph.mean_time_s[graph.order]
    assert (np.diff(found[graph.order]) >= 0).all() and sorted(set(found.tolist())) == list(range(parts))
    largest = max(weight[found[graph.order] == part].sum() for part in range(parts))
    best = min(
        max(weight[a:b].sum() for a, b in itertools.pairwise([0, *cuts, 9]))
        for cuts in itertools.combinations(range(1, 9), parts - 1)
    )
    assert largest == pytest.approx(best, rel=1e-9)


def test_fewer_groups_than_parts_cannot_be_cut():
    assert contiguous_parts(random_problem(0, 3, 2), 4) is None


def test_all_schedules_of_a_chain_are_found_and_simulated():
    chain = pipeline_chain(4, 2, split=True)
    found = {
        (p.schedule, p.stage_of_group is None): p.line
        for p in other_schedules(chain, np.array([0, 0, 1, 1], dtype=np.int32), 4, known="list")
    }
    assert set(found) == {
        ("gpipe", True), ("1f1b", True), ("interleaved_1f1b", False), ("interleaved_zero_bubble", True), ("zbv", False),
    }  # fmt: skip
    # Two stages a device halve the bubble; a v without one leaves only the first forward and the last gradient idle.
    assert found["interleaved_1f1b", False].step_time_s < found["1f1b", True].step_time_s
    assert found["zbv", False].step_time_s < found["interleaved_1f1b", False].step_time_s


def test_the_quickest_schedule_of_a_pipeline_is_chosen():
    chain = dataclasses.replace(pipeline_chain(4, 2, split=True), samples_per_microbatch=1)
    tight = tuple(dataclasses.replace(device, memory_bytes=100) for device in chain.devices)
    problem = dataclasses.replace(chain, devices=tight, resident_bytes=np.full(4, 40, dtype=np.int64))  # two groups a device
    strategy = Strategy(StageLayout(((0, 1),)), 4, 1)
    _, plan = place_one(problem, strategy, "balanced", seed=0, time_limit_s=None, options={})
    assert plan.schedule == "zbv"
    line = simulate(problem, plan)
    assert line.feasible and line.step_time_s == plan.predicted.step_time_s


def test_a_single_device_has_nothing_to_schedule():
    chain = pipeline_chain(4, 2)
    assert list(other_schedules(chain, np.zeros(4, dtype=np.int32), 4, known="list")) == []


def test_the_problem_of_a_replica_is_the_problem_on_its_devices():
    problem = random_problem(4, 12, 4, unlike=True, hosts=2)
    small = problem_of_replica(problem, (3, 1))
    devices = np.array([0, 1] * 6, dtype=np.int32)
    there = np.array([3, 1], dtype=np.int32)[devices]
    assert simulate(small, devices).step_time_s == simulate(problem, there).step_time_s


def branches():
    """Two equal branches of 8 s between ops of 1 s: one device takes 18 s, two take 10 s."""
    return dataclasses.replace(
        build_problem(
            "branches",
            time_s=[[1.0] * 4, [8.0] * 4, [8.0] * 4, [1.0] * 4],
            tensors=[TensorSpec(0, 1, [1, 2]), TensorSpec(1, 1, [3]), TensorSpec(2, 1, [3])],
            memory_bytes=[None] * 4,
            bandwidth_bytes_per_s=1e12,
        ),
        samples_per_microbatch=8,
    )


def placed(curve):
    problem = branches()
    return place_strategies(lambda samples: problem, first=problem, samples=8, curve=curve, planner="best")[1]


def test_a_hybrid_wins_where_larger_batches_need_more_epochs():
    """Up to 16 samples the epochs stay, then they double with the batch: four replicas gain nothing over two.

    Two replicas of two devices are then 18 / 10 times as quick, just what two devices bring to one replica.
    """
    plan = placed(BatchCurve(points=((8, 10), (16, 10), (32, 20), (64, 40))))
    assert len(plan.replicas) == 2 and len(plan.replicas[0]) == 2
    entries = plan.predicted.strategies
    assert entries[0]["kind"] == "data parallel x model parallel" and entries[0]["epochs"] == 10
    pure = next(e for e in entries if e["kind"] == "data parallel")
    assert pure["cost"] / entries[0]["cost"] == pytest.approx(1.8)


def test_pure_data_parallelism_wins_where_epochs_never_rise():
    plan = placed(BatchCurve(points=((8, 10),)))
    assert len(plan.replicas) == 4 and len(plan.replicas[0]) == 1


def test_one_replica_wins_where_every_larger_batch_costs_more_than_it_brings():
    plan = placed(BatchCurve(points=((8, 10), (16, 21), (32, 44))))
    assert plan.replicas is None and len(np.unique(plan.device_of_group)) == 2


def test_batch_and_curve_exclude_each_other():
    problem = branches()
    curve = BatchCurve(points=((8, 10),))
    for arguments in ({}, {"global_batch": 8, "curve": curve}):
        with pytest.raises(InputError, match="either a global batch, or a batch curve"):
            place_strategies(lambda samples: problem, first=problem, planner="best", **arguments)


def test_planners_say_whether_they_take_microbatches():
    assert takes_microbatches("heft") and takes_microbatches("agent")


STEP = BatchCurve(points=((64, 10.0), (1024, 10.0), (2048, 20.0)))


def test_law_of_the_critical_batch():
    curve = BatchCurve(min_epochs=10.0, critical_batch=1000.0)
    assert curve.epochs(1000) == 20.0 and curve.epochs(500) == 15.0
    assert curve.efficiency(1000, 500) == pytest.approx(0.75)
    assert BatchCurve(min_epochs=10.0, critical_batch=math.inf).epochs(1e9) == 10.0


def test_the_inverse_law_is_the_same_law():
    updates, samples, size = 500.0, 2e6, 1e5
    curve = BatchCurve.from_updates(updates, samples, size)
    for batch in (1, 64, 4000, 10**6):
        assert curve.epochs(batch) == pytest.approx((updates + samples / batch) * batch / size)
    assert BatchCurve.from_updates(0, samples, size).epochs(10**6) == pytest.approx(20.0)


def test_points_are_met_exactly_and_joined_by_power_laws():
    for batch, epochs in STEP.points:
        assert STEP.epochs(batch) == epochs
    assert STEP.epochs(300) == pytest.approx(10.0)
    assert STEP.epochs(1024 * math.sqrt(2)) == pytest.approx(10.0 * math.sqrt(2))


def test_outside_the_points_epochs_never_shrink():
    assert STEP.epochs(1) == 10.0
    assert STEP.epochs(8192) == pytest.approx(80.0)  # the last slope goes on: twice the batch, twice the epochs
    assert BatchCurve(points=((64, 12.0), (128, 9.0))).epochs(1024) == 9.0
    assert BatchCurve(points=((64, 12.0),)).epochs(1024) == 12.0
    assert STEP.covers(64) and STEP.covers(2048) and not STEP.covers(2049)


def test_points_may_come_in_any_order():
    assert BatchCurve(points=((2048, 20.0), (64, 10.0), (1024, 10.0))) == STEP


@given(least=st.floats(0.1, 1e3), critical=st.floats(10, 1e6))
def test_fit_recovers_the_law(least, critical):
    law = BatchCurve(min_epochs=least, critical_batch=critical)
    batches = [critical / 8, critical / 2, critical, 4 * critical]
    found = BatchCurve.fit(batches, [law.epochs(b) for b in batches])
    assert found.min_epochs == pytest.approx(least, rel=1e-6)
    assert found.critical_batch == pytest.approx(critical, rel=1e-6)


def test_fit_of_noisy_and_of_flat_epochs():
    rng = np.random.default_rng(0)
    batches = [2.0**k for k in range(6, 15)]
    noisy = [8.0 * (1 + b / 4096) * rng.uniform(0.97, 1.03) for b in batches]
    found = BatchCurve.fit(batches, noisy)
    assert found.min_epochs == pytest.approx(8.0, rel=0.03) and found.critical_batch == pytest.approx(4096, rel=0.1)
    flat = BatchCurve.fit([64, 128, 256], [7.0, 7.0, 6.9])
    assert flat.critical_batch == math.inf and 6.9 < flat.epochs(64) < 7.0
    with pytest.raises(InputError, match="grow faster than the batch"):
        BatchCurve.fit([64, 128, 256], [1.0, 4.0, 16.0])
    with pytest.raises(InputError, match="two different batches"):
        BatchCurve.fit([64, 64], [1.0, 2.0])


@pytest.mark.parametrize(
    "curve",
    [
        STEP,
        BatchCurve(min_epochs=3.5, critical_batch=777.0, name="gnmt"),
        BatchCurve(min_epochs=3.5, critical_batch=math.inf),
    ],
)
def test_files_come_back_as_they_were(tmp_path, curve):
    curve.save(tmp_path / "c.json")
    assert BatchCurve.load(tmp_path / "c.json") == curve


HEADER = {"format": "rlplace.batch_curve", "version": 1}


def write(tmp_path, data):
    path = tmp_path / "c.json"
    path.write_text(json.dumps(HEADER | data))
    return path


def test_file_of_the_inverse_law(tmp_path):
    data = {"updates_floor": 500, "updates_samples": 2e6, "samples_per_epoch": 1e5}
    assert BatchCurve.load(write(tmp_path, data)) == BatchCurve.from_updates(500, 2e6, 1e5)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "give one form"),
        ({"points": [[1, 2]], "min_epochs": 1}, "give one form"),
        ({"min_epochs": 1}, "give one form"),
        ({"points": []}, r"points: expected a list of 1 or more, found \[\]"),
        ({"points": [[1, 2, 3]]}, r"points\[0\]: expected a list of 2 values, found \[1, 2, 3\]"),
        ({"points": [[0, 2]]}, r"points\[0\]\[0\]: expected a number in 1e-12..1e\+18, found 0"),
        ({"points": [[1, 2], [1, 3]]}, "once"),
        ({"min_epochs": -1, "critical_batch": 5}, "min_epochs: expected a number in 1e-12"),
        ({"min_epochs": None, "critical_batch": 5}, "min_epochs: expected a number"),
        ({"updates_floor": -3, "updates_samples": 5, "samples_per_epoch": 5}, "updates_floor: expected a number in 0"),
    ],
)
def test_malformed_files_are_refused_in_one_line(tmp_path, data, message):
    with pytest.raises(InputError, match=message) as raised:
        BatchCurve.load(write(tmp_path, data))
    assert "\n" not in str(raised.value) and "c.json" in str(raised.value)


def test_a_batch_must_be_a_positive_number():
    for batch in (0, -5, math.nan, math.inf, True):
        with pytest.raises(InputError):
            STEP.epochs(batch)
    with pytest.raises(InputError, match="either points"):
        BatchCurve()
    with pytest.raises(InputError, match="either points"):
        BatchCurve(points=((1, 1),), min_epochs=3, critical_batch=4)
