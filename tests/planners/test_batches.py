"""A global batch split over replicas and micro-batches."""

import dataclasses

import numpy as np
import pytest

from rlplace.errors import InfeasibleError, InputError
from rlplace.planners import get_planner
from rlplace.planners.batches import Choice, choices, devices_alike, place_batches
from rlplace.problem import Device, Problem
from rlplace.problem.generate import random_problem
from rlplace.problem.toys import pipeline_chain
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


def test_all_splits_divide_the_global_batch_and_the_devices():
    found = choices(16, 4, alike=True)
    assert all(c.replicas * c.microbatches * c.samples == 16 and 4 % c.replicas == 0 for c in found)
    assert {c.replicas for c in found} == {1, 2, 4}
    assert Choice(4, 4, 1) in found and Choice(1, 1, 16) in found
    assert {c.replicas for c in choices(16, 4, alike=False)} == {1}
    assert choices(12, 2, alike=True, samples=4) == [Choice(1, 3, 4)]
    assert choices(10, 2, alike=True, samples=4) == []
    assert choices(10**9, 1, alike=True, samples=4) == [Choice(1, 25 * 10**7, 4)]
    assert [c.microbatches for c in choices(9, 1, alike=True)] == [1, 3, 9]  # the next that divides 9 from 1, 2, 4, 8, ... on
    assert [c.microbatches for c in choices(96, 1, alike=True)] == [1, 2, 4, 8, 16, 32]
    assert [c.microbatches for c in choices(1009, 1, alike=True)] == [1]


def test_devices_are_alike_when_times_and_memory_are():
    problem = random_problem(1, 6, 3)
    assert devices_alike(problem)
    assert not devices_alike(random_problem(1, 6, 3, unlike=True))
    devices = (*problem.devices[:2], Device("small", memory_bytes=10**12))
    assert not devices_alike(dataclasses.replace(problem, devices=devices))
    assert not devices_alike(dataclasses.replace(problem, group_device=np.array([0] + [-1] * 5, dtype=np.int32)))


def test_the_plan_is_what_the_simulator_says_and_beats_every_choice_tried():
    problem, plan = place_batches(scaled, 32, first=scaled(8), planner="best")
    line = simulate(problem, plan)
    assert line.feasible and line.samples == 32
    assert line.step_time_s == plan.predicted["step_time_s"]
    tried = [choice["step_time_s"] for choice in plan.predicted["choices"]]
    assert plan.predicted["step_time_s"] == min(tried)
    assert plan.predicted["samples_per_s"] == pytest.approx(32 / line.step_time_s)


def test_free_links_make_replicas_win_and_a_pipeline_beats_one_after_the_other():
    """Four stages of 3 s on four devices: four replicas take 12 s a sample each, nothing pipelined is quicker."""
    chain = dataclasses.replace(pipeline_chain(4, 4), samples_per_microbatch=1)
    _, plan = place_batches(lambda samples: chain, 8, samples=1, first=chain, planner="best")
    assert plan.predicted["step_time_s"] == 2 * 12.0
    assert len(plan.replicas or []) == 4 and plan.microbatches == 2
    tight = dataclasses.replace(chain, devices=tuple(dataclasses.replace(d, memory_bytes=11) for d in chain.devices))
    heavy = dataclasses.replace(tight, resident_bytes=np.full(4, 5, dtype=np.int64))
    problem, plan = place_batches(lambda samples: heavy, 8, samples=1, first=heavy, planner="best")
    assert plan.replicas is None or len(plan.replicas) == 2  # four groups of 5 bytes do not fit into 11
    assert simulate(problem, plan).feasible


def test_a_search_planner_works_on_the_best_choice_and_is_never_worse():
    _, floor = place_batches(scaled, 32, first=scaled(8), planner="best")
    _, plan = place_batches(scaled, 32, first=scaled(8), planner="annealing", calls=200)
    assert plan.planner == "annealing"
    assert plan.predicted["step_time_s"] <= floor.predicted["step_time_s"]


def test_what_cannot_be_split_or_fitted_is_refused():
    problem = scaled(8)
    with pytest.raises(InputError, match="no multiple of the micro-batch of 8 samples"):
        place_batches(lambda samples: problem, 12, samples=8, first=problem, planner="best")
    small = dataclasses.replace(problem, devices=tuple(dataclasses.replace(d, memory_bytes=1) for d in problem.devices))
    with pytest.raises(InfeasibleError):
        place_batches(lambda samples: small, 16, samples=8, first=small, planner="best")


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

    problem, plan = place_batches(fits, 256, first=fits(1), planner="best")
    assert (plan.microbatches, problem.samples_per_microbatch) == (128, 2)
    assert [c["samples"] for c in plan.predicted["choices"] if c["step_time_s"] is not None] == [2]


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
    _, plan = place_batches(lambda samples: problem, 64, samples=8, first=problem, planner=planner)
    assert simulate(problem, plan).step_time_s == plan.predicted["step_time_s"]
    assert len(plan.replicas or [0]) == 1 or plan.device_of_group.max() < len(plan.replicas[0])


def test_replicas_are_left_out_where_they_cannot_exchange_gradients():
    problem = scaled(8)
    unknown = np.full(problem.num_groups, -1, dtype=np.int64)
    vague = dataclasses.replace(problem, weight_bytes=unknown, gradient_bytes=unknown.copy(), optimizer_bytes=unknown.copy())
    _, plan = place_batches(lambda samples: vague, 64, samples=8, first=vague, planner="best")
    assert plan.replicas is None and {c["replicas"] for c in plan.predicted["choices"]} == {1}
    bandwidth = problem.links.bandwidth_bytes_per_s.copy()
    bandwidth[:2, 2:] = bandwidth[2:, :2] = 0.0
    split = dataclasses.replace(problem, links=dataclasses.replace(problem.links, bandwidth_bytes_per_s=bandwidth))
    _, plan = place_batches(lambda samples: split, 64, samples=8, first=split, planner="best")
    assert simulate(split, plan).feasible and plan.replicas is None


@pytest.mark.parametrize("planner", ["metis", "best"])
def test_devices_without_room_are_left_alone(planner):
    """A device whose memory is all reserved takes no part, and no planner divides by its room."""
    problem = random_problem(5, 20, 4, memory_factor=1.5)
    devices = [dataclasses.replace(d, memory_bytes=int(d.memory_bytes * 1.4)) for d in problem.devices]
    devices[2] = dataclasses.replace(devices[2], memory_bytes=1000, reserved_bytes=1000)
    plan = get_planner(planner)(dataclasses.replace(problem, devices=tuple(devices)))
    assert 2 not in plan.device_of_group.tolist() and plan.predicted["feasible"]
