"""Schedules for a plan's stages, and hybrid parallelism under a batch curve."""

import dataclasses
import itertools

import numpy as np
import pytest
from toys import pipeline_chain

from rlplace.errors import InputError
from rlplace.planners import takes_microbatches
from rlplace.planners.common.groupgraph import group_graph
from rlplace.planners.strategy.choices import StageLayout, Strategy
from rlplace.planners.strategy.efficiency import BatchCurve
from rlplace.planners.strategy.one import place_one, problem_of_replica
from rlplace.planners.strategy.stages import contiguous_parts, other_schedules
from rlplace.planners.strategy.sweep import place_strategies
from rlplace.problem.build import TensorSpec, build_problem
from rlplace.problem.generate import random_problem
from rlplace.simulator import simulate


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
        ("gpipe", True), ("1f1b", True), ("interleaved", False), ("zero_bubble", True), ("zero_bubble", False),
    }  # fmt: skip
    # Two stages a device halve the bubble; a v without one leaves only the first forward and the last gradient idle.
    assert found["interleaved", False].step_time_s < found["1f1b", True].step_time_s
    assert found["zero_bubble", False].step_time_s < found["interleaved", False].step_time_s


def test_the_quickest_schedule_of_a_pipeline_is_chosen():
    chain = dataclasses.replace(pipeline_chain(4, 2, split=True), samples_per_microbatch=1)
    tight = tuple(dataclasses.replace(device, memory_bytes=100) for device in chain.devices)
    problem = dataclasses.replace(chain, devices=tight, resident_bytes=np.full(4, 40, dtype=np.int64))  # two groups a device
    strategy = Strategy(StageLayout(((0, 1),)), 4, 1)
    _, plan = place_one(problem, strategy, "balanced", seed=0, time_limit_s=None, options={})
    assert plan.schedule == "zero_bubble"
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
