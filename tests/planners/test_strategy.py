"""A global batch split over replicas and micro-batches."""

import dataclasses

import numpy as np
import pytest
from toys import pipeline_chain

from rlplace.errors import InfeasibleError, InputError
from rlplace.planners import get_planner
from rlplace.planners.strategy.choices import StageLayout, Strategy, kind_of, layouts, strategies
from rlplace.planners.strategy.sweep import place_strategies
from rlplace.problem import Device, Problem
from rlplace.problem.generate import random_problem
from rlplace.simulator import simulate


def scaled(samples: int, **options) -> Problem:
    """One problem at several micro-batch sizes: forward and backward times and activations grow with the samples."""
    problem = random_problem(11, 12, 4, **options)
    micro = problem.op_phase != 3
    time_s = problem.time_s.copy()
    time_s[micro] *= samples / 8
    return dataclasses.replace(
        problem,
        samples_per_microbatch=samples,
        time_s=time_s,
        tensor_bytes=np.where(problem.tensor_producer >= 0, problem.tensor_bytes * samples // 8, problem.tensor_bytes),
    )


def splits(layout, share, **options):
    return [(s.microbatches, s.samples) for s in strategies(layout, share, **options)]


def test_all_splits_divide_the_share_of_a_replica():
    one = StageLayout(((0,),))
    assert splits(one, 16) == [(1, 16), (2, 8), (4, 4), (8, 2), (16, 1)]
    assert splits(one, 12, samples=4) == [(3, 4)]
    assert splits(one, 10, samples=4) == []
    assert splits(one, 10**9, samples=4) == [(25 * 10**7, 4)]
    assert [m for m, _ in splits(one, 9)] == [1, 3, 9]  # the next that divides 9 from 1, 2, 4, 8, ... on
    assert [m for m, _ in splits(one, 96)] == [1, 2, 4, 8, 16, 32]
    assert [m for m, _ in splits(one, 1009)] == [1]
    assert Strategy(StageLayout(((0, 1), (2, 3))), 4, 3).global_batch == 24


def rows_of(problem):
    return {layout.rows for layout in layouts(problem)}


def test_replicas_are_equal_blocks_of_like_devices():
    problem = random_problem(1, 6, 4)
    assert rows_of(problem) == {
        ((0,),), ((0, 1, 2, 3),), ((0, 1), (2, 3)), ((0,), (1,), (2,)), ((0,), (1,), (2,), (3,)),
    }  # fmt: skip
    fixed = dataclasses.replace(problem, group_device=np.array([0] + [-1] * 5, dtype=np.int32))
    assert rows_of(fixed) == {((0,),), ((0, 1, 2, 3),)}


def test_unlike_devices_replicate_within_a_kind_by_equal_blocks_or_one_by_one():
    """Devices 0 and 2 hold much, 1 and 3 little."""
    problem = random_problem(1, 6, 4)
    devices = tuple(Device(f"d{i}", memory_bytes=10**12 // (1 + i % 2)) for i in range(4))
    found = rows_of(dataclasses.replace(problem, devices=devices))
    assert ((0,), (2,)) in found and ((1,), (3,)) in found  # within a kind
    assert ((0, 1), (2, 3)) in found  # blocks of one sequence of kinds
    assert ((0,), (1,), (2,), (3,)) in found
    swapped = (devices[0], devices[1], devices[3], devices[2])
    assert ((0, 1), (2, 3)) not in rows_of(dataclasses.replace(problem, devices=swapped))


def test_every_block_of_replicas_can_run_every_group():
    """One group runs on devices 0 and 2 only: blocks without one of them hold no replica."""
    problem = random_problem(1, 6, 4)
    time_s = problem.time_s.copy()
    time_s[np.ix_(problem.op_group == 3, [1, 3])] = np.nan
    problem = dataclasses.replace(problem, time_s=time_s)
    found = rows_of(problem)
    assert found == {((0,),), ((0, 1, 2, 3),), ((0,), (2,)), ((0, 1), (2, 3))}
    _, plan = place_strategies(lambda samples: problem, global_batch=16, samples=8, first=problem, planner="best")
    assert plan.predicted.feasible


@pytest.mark.parametrize("seed", range(6))
def test_no_strategy_is_quicker_than_its_bound(seed):
    """Also where the devices cannot run all groups, and the single device needs help."""
    problem = random_problem(seed, 9, 2 + seed % 3, unlike=seed % 2 == 1, null_fraction=0.4)
    _, plan = place_strategies(lambda samples: problem, global_batch=24, samples=8, first=problem, planner="best")
    tried = [entry for entry in plan.predicted.strategies if entry["step_time_s"] is not None]
    assert tried and all(entry["bound_s"] <= entry["step_time_s"] * (1 + 1e-12) for entry in tried)


def test_groups_that_a_single_device_cannot_run_count_elsewhere():
    """Device 0 holds all but a heavy group that only device 1 can run."""
    problem = random_problem(1, 6, 2)
    time_s = problem.time_s.copy()
    time_s[problem.op_group == 3, 0] = np.nan
    time_s[problem.op_group != 3, 1] *= 1000.0
    resident = problem.resident_bytes.copy()
    heavy, light = 10 * int(resident.sum()), int(resident.sum() - resident[3])
    unknown = np.full(6, -1, dtype=np.int64)
    resident[3] = heavy
    problem = dataclasses.replace(
        problem, time_s=time_s, resident_bytes=resident, weight_bytes=unknown, gradient_bytes=unknown, optimizer_bytes=unknown,
        devices=(Device("small", memory_bytes=heavy), Device("large", memory_bytes=heavy + light // 2)),
    )  # fmt: skip
    _, plan = place_strategies(lambda samples: problem, global_batch=8, samples=8, first=problem, planner="best")
    entry = next(e for e in plan.predicted.strategies if e["replicas"] == 1 and e["reason"] is None)
    assert plan.device_of_group.tolist() == [0, 0, 0, 1, 0, 0] and entry["step_time_s"] is not None
    assert all("does not fit" not in (e["reason"] or "") for e in plan.predicted.strategies)


@pytest.mark.parametrize(
    ("replicas", "used", "microbatches", "kind"),
    [
        (1, 1, 4, "single device"), (1, 3, 1, "model parallel"), (1, 3, 2, "pipeline"), (4, 1, 2, "data parallel"),
        (2, 2, 1, "data parallel x model parallel"), (2, 2, 4, "data parallel x pipeline"),
    ],
)  # fmt: skip
def test_strategies_have_their_usual_names(replicas, used, microbatches, kind):
    assert kind_of(replicas, used, microbatches) == kind


def test_the_plan_is_what_the_simulator_says_and_beats_every_choice_tried():
    problem, plan = place_strategies(scaled, global_batch=32, first=scaled(8), planner="best")
    line = simulate(problem, plan)
    assert line.feasible and line.samples == 32
    assert line.step_time_s == plan.predicted.step_time_s
    tried = [entry["step_time_s"] for entry in plan.predicted.strategies]
    assert plan.predicted.step_time_s == min(step for step in tried if step is not None)
    assert tried[0] == plan.predicted.step_time_s  # the quickest comes first
    assert plan.predicted.samples_per_s == pytest.approx(32 / line.step_time_s)


def test_free_links_make_replicas_win_and_a_pipeline_beats_one_after_the_other():
    """Four stages of 3 s on four devices: four replicas take 12 s a sample each, nothing pipelined is quicker."""
    chain = dataclasses.replace(pipeline_chain(4, 4), samples_per_microbatch=1)
    _, plan = place_strategies(lambda samples: chain, global_batch=8, samples=1, first=chain, planner="best")
    assert plan.predicted.step_time_s == 2 * 12.0
    assert len(plan.replicas or []) == 4 and plan.microbatches == 2
    tight = dataclasses.replace(chain, devices=tuple(dataclasses.replace(d, memory_bytes=11) for d in chain.devices))
    heavy = dataclasses.replace(tight, resident_bytes=np.full(4, 5, dtype=np.int64))
    problem, plan = place_strategies(lambda samples: heavy, global_batch=8, samples=1, first=heavy, planner="best")
    assert plan.replicas is None or len(plan.replicas) == 2  # four groups of 5 bytes do not fit into 11
    assert simulate(problem, plan).feasible


def test_a_search_planner_works_on_the_best_choice_and_is_never_worse():
    _, floor = place_strategies(scaled, global_batch=32, first=scaled(8), planner="best")
    _, plan = place_strategies(scaled, global_batch=32, first=scaled(8), planner="annealing", calls=200)
    assert plan.planner == "annealing"
    assert plan.predicted.step_time_s <= floor.predicted.step_time_s


def test_what_cannot_be_split_or_fitted_is_refused():
    problem = scaled(8)
    with pytest.raises(InputError, match="no multiple of the micro-batch of 8 samples"):
        place_strategies(lambda samples: problem, global_batch=12, samples=8, first=problem, planner="best")
    small = dataclasses.replace(problem, devices=tuple(dataclasses.replace(d, memory_bytes=1) for d in problem.devices))
    with pytest.raises(InfeasibleError):
        place_strategies(lambda samples: small, global_batch=16, samples=8, first=small, planner="best")


def test_where_nothing_fits_smaller_micro_batches_are_tried():
    """A step of 256 samples on one device: only micro-batches of at most two samples fit, the largest wins."""

    def tight(samples):
        problem = scaled(8 * samples)
        return dataclasses.replace(problem, samples_per_microbatch=samples)

    room = simulate(tight(2), np.zeros(12, dtype=int), microbatches=128).peak_memory_bytes[0]
    assert simulate(tight(4), np.zeros(12, dtype=int), microbatches=64).peak_memory_bytes[0] > room

    def fits(samples):
        problem = tight(samples)
        devices = [dataclasses.replace(d, memory_bytes=int(room) if i == 0 else 1) for i, d in enumerate(problem.devices)]
        return dataclasses.replace(problem, devices=tuple(devices))

    problem, plan = place_strategies(fits, global_batch=256, first=fits(1), planner="best")
    assert (plan.microbatches, problem.samples_per_microbatch) == (128, 2)
    assert {c["samples"] for c in plan.predicted.strategies if c["step_time_s"] is not None} == {2}


def with_empty_groups(problem):
    """Two more groups that hold parameters and no ops."""

    def more(values, value):
        return np.concatenate([values, np.full(2, value, dtype=values.dtype)])

    return dataclasses.replace(
        problem,
        group_names=(*problem.group_names, "unused0", "unused1"),
        resident_bytes=more(problem.resident_bytes, 100),
        weight_bytes=more(problem.weight_bytes, 100),
        gradient_bytes=more(problem.gradient_bytes, 0),
        optimizer_bytes=more(problem.optimizer_bytes, 0),
        group_device=more(problem.group_device, -1),
    )


@pytest.mark.parametrize("planner", ["round_robin", "random", "metis", "best"])
def test_groups_without_ops_stay_within_their_replica(planner):
    problem = with_empty_groups(scaled(8))
    _, plan = place_strategies(lambda samples: problem, global_batch=64, samples=8, first=problem, planner=planner)
    assert simulate(problem, plan).step_time_s == plan.predicted.step_time_s
    assert len(plan.replicas or [0]) == 1 or plan.device_of_group.max() < len(plan.replicas[0])


def test_replicas_are_left_out_where_they_cannot_exchange_gradients():
    problem = scaled(8)
    unknown = np.full(problem.num_groups, -1, dtype=np.int64)
    vague = dataclasses.replace(problem, weight_bytes=unknown, gradient_bytes=unknown.copy(), optimizer_bytes=unknown.copy())
    _, plan = place_strategies(lambda samples: vague, global_batch=64, samples=8, first=vague, planner="best")
    assert plan.replicas is None and {c["replicas"] for c in plan.predicted.strategies} == {1}
    bandwidth = problem.links.bandwidth_bytes_per_s.copy()
    bandwidth[:2, 2:] = bandwidth[2:, :2] = 0.0
    split = dataclasses.replace(problem, links=dataclasses.replace(problem.links, bandwidth_bytes_per_s=bandwidth))
    _, plan = place_strategies(lambda samples: split, global_batch=64, samples=8, first=split, planner="best")
    assert simulate(split, plan).feasible and plan.replicas is None


@pytest.mark.parametrize("planner", ["metis", "best"])
def test_devices_without_room_are_left_alone(planner):
    """A device whose memory is all reserved takes no part, and no planner divides by its room."""
    problem = random_problem(5, 20, 4, memory_factor=1.5)
    devices = [dataclasses.replace(d, memory_bytes=int(d.memory_bytes * 1.4)) for d in problem.devices]
    devices[2] = dataclasses.replace(devices[2], memory_bytes=1000, reserved_bytes=1000)
    plan = get_planner(planner)(dataclasses.replace(problem, devices=tuple(devices)))
    assert 2 not in plan.device_of_group.tolist() and plan.predicted.feasible
