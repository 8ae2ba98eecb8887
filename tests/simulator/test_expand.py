"""Replicas, sharded optimizers and their collectives, lowered to plain problems."""

import dataclasses

import numpy as np
import pytest
from toys import pipeline_chain

from rlplace.errors import InputError
from rlplace.plan import PlacementPlan, make_plan
from rlplace.plan.recompute import recompute
from rlplace.problem import BACKWARD, FORWARD, UPDATE, Problem
from rlplace.problem.build import TensorSpec, build_problem
from rlplace.problem.collectives import collective_s
from rlplace.problem.generate import random_problem
from rlplace.simulator import expand, simulate, trace_events
from rlplace.simulator.reference import simulate_reference
from rlplace.simulator.replicas import BUCKET_BYTES, gradient_buckets

MIB = 1 << 20


def two_layers(sizes=(2 * MIB, 3 * MIB), devices=2, bandwidth=1e9):
    """Two groups with forward 1 s, backward 2 s, update 0.25 s each; gradients as large as given, Adam's state twice that."""
    problem = build_problem(
        "two_layers",
        time_s=[[1.0] * devices] * 2 + [[2.0] * devices] * 2 + [[0.25] * devices] * 2,
        tensors=[
            TensorSpec(0, 8, [1, 3]),
            TensorSpec(1, 8, [2]),
            TensorSpec(2, 8, [3]),
            TensorSpec(2, 0, [5]),
            TensorSpec(3, 0, [4]),
        ],
        memory_bytes=[None] * devices,
        group=[0, 1, 1, 0, 0, 1],
        phase=[FORWARD, FORWARD, BACKWARD, BACKWARD, UPDATE, UPDATE],
        bandwidth_bytes_per_s=bandwidth,
    )
    part = np.array(sizes, dtype=np.int64)
    return dataclasses.replace(
        problem, resident_bytes=4 * part, weight_bytes=part, gradient_bytes=part.copy(), optimizer_bytes=2 * part
    )


def run(problem: Problem, plan: PlacementPlan):
    plain, lowered = expand(problem, plan)
    assert lowered.problem == plain.fingerprint
    assert lowered.replicas is None and lowered.recompute is None and not lowered.optimizer_sharding
    return plain, simulate_reference(
        plain, lowered.device_of_group, microbatches=lowered.microbatches, schedule=lowered.schedule, priority=lowered.priority
    )


def test_buckets_fill_in_the_order_in_which_gradients_are_complete():
    problem = two_layers()
    found = gradient_buckets(problem, np.zeros(2, dtype=np.int32))
    assert [(b.device, b.groups, b.size_bytes) for b in found] == [(0, (1,), 2 * MIB + MIB), (0, (0,), 2 * MIB)]
    small = two_layers((1000, 2000))
    assert [b.groups for b in gradient_buckets(small, np.zeros(2, dtype=np.int32))] == [(1, 0)]
    large = two_layers((BUCKET_BYTES, 2 * MIB))
    assert [b.size_bytes for b in gradient_buckets(large, np.zeros(2, dtype=np.int32))] == [2 * MIB, BUCKET_BYTES]
    apart = gradient_buckets(problem, np.array([0, 1], dtype=np.int32))
    assert [(b.device, b.groups) for b in apart] == [(0, (0,)), (1, (1,))]


def test_two_replicas_by_hand():
    """Backward ends at 6 s; one bucket, so nothing overlaps; then its all-reduce, then both updates."""
    problem = two_layers((1000, 2000))
    plain, line = run(problem, make_plan(problem, [0, 0], planner="hand", replicas=[[0], [1]]))
    assert line.step_time_s == pytest.approx(6.0 + collective_s(problem.links, "all_reduce", [0, 1], 3000) + 0.5, rel=1e-12)
    assert line.busy_s.tolist() == [6.5, 6.5]
    assert plain.samples_per_microbatch == line.samples == 2 * problem.samples_per_microbatch
    one = simulate_reference(problem, [0, 0])
    assert line.peak_memory_bytes.tolist() == [one.peak_memory_bytes[0]] * 2
    assert plain.num_groups == 4 and len(plain.collectives) == 1


def test_replicas_that_no_link_joins_are_infeasible():
    problem = two_layers(bandwidth=0.0)
    plan = make_plan(problem, [0, 0], planner="hand", replicas=[[0], [1]])
    line = simulate(problem, plan)
    assert line.step_time_s is None and not line.feasible
    assert "all_reduce" in line.violations[0]
    wide, plain = expand(problem, plan)
    assert simulate_reference(wide, plain.device_of_group).violations == line.violations


def test_an_early_bucket_overlaps_and_slows_the_backward_under_it():
    problem = two_layers((2 * MIB, 2 * MIB), bandwidth=4 * MIB)
    reduce_s = collective_s(problem.links, "all_reduce", [0, 1], 2 * MIB)
    assert reduce_s < 2.0
    _, line = run(problem, make_plan(problem, [0, 0], planner="hand", replicas=[[0], [1]]))
    slowed = 4.0 + 0.189 * reduce_s  # both backward ops share what one bucket costs them
    assert line.busy_s[0] == pytest.approx(2.0 + slowed + 0.5)
    # The second bucket starts after backward; the update of the first group's bucket runs meanwhile.
    assert line.step_time_s == pytest.approx(2.0 + slowed + max(reduce_s, 0.25) + 0.25, rel=1e-6)
    # A replica on a device that takes three times as long is slowed for as long, no longer.
    unlike = dataclasses.replace(problem, time_s=problem.time_s * [1.0, 3.0])
    _, line = run(unlike, make_plan(unlike, [0, 0], planner="hand", replicas=[[0], [1]]))
    assert line.busy_s.tolist() == pytest.approx([6.5 + 0.189 * reduce_s, 19.5 + 0.189 * reduce_s])


def test_gradients_are_reduced_once_after_the_last_microbatch():
    problem = two_layers((1000, 2000))
    _, line = run(problem, make_plan(problem, [0, 0], planner="hand", replicas=[[0], [1]], microbatches=3))
    assert line.step_time_s == pytest.approx(18.0 + collective_s(problem.links, "all_reduce", [0, 1], 3000) + 0.5, rel=1e-12)
    assert line.samples == 6


def test_a_sharded_optimizer_keeps_and_updates_its_share():
    problem = two_layers((1000, 2001))
    plan = make_plan(problem, [0, 0], planner="hand", replicas=[[0], [1]], optimizer_sharding=True)
    plain, line = run(problem, plan)
    scatter = collective_s(problem.links, "reduce_scatter", [0, 1], 3001)
    gather = collective_s(problem.links, "all_gather", [0, 1], 3001)
    assert line.step_time_s == pytest.approx(6.0 + scatter + 0.25 + gather, rel=1e-12)
    assert plain.optimizer_bytes.tolist() == [1000, 2001] * 2
    whole = simulate_reference(problem, [0, 0]).peak_memory_bytes[0]
    assert line.peak_memory_bytes.tolist() == [whole - 3001] * 2


@pytest.mark.parametrize("schedule", ["list", "gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble"])
@pytest.mark.parametrize("microbatches", [2, 4, 6])
def test_each_replica_of_a_pipeline_runs_as_one_alone(schedule, microbatches):
    """Nothing is exchanged here, so the copies do not know of each other."""
    problem = pipeline_chain(2, 4, split=True)
    fields = {"planner": "hand", "microbatches": microbatches, "schedule": schedule}
    alone = simulate(problem, make_plan(problem, [0, 1], **fields))
    plan = make_plan(problem, [0, 1], **fields, replicas=[[0, 1], [2, 3]])
    wide, plain = expand(problem, plan)
    other = make_plan(problem, [0, 1], planner="hand", microbatches=3, replicas=[[0, 1], [2, 3]])
    lines = [simulate(problem, plan), simulate(wide, plain)]
    lines.append(simulate(problem, other, schedule=schedule, microbatches=microbatches))
    for line in lines:
        assert line.step_time_s == alone.step_time_s
        assert line.peak_memory_bytes.tolist() == alone.peak_memory_bytes[:2].tolist() * 2


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_1f1b"])
def test_each_replica_has_stages_of_its_own(schedule):
    """Two stages a device, so the schedule goes by the plan's stages."""
    problem = pipeline_chain(4, 4, split=True)
    fields = {"planner": "hand", "microbatches": 4, "schedule": schedule, "stage_of_group": [0, 1, 2, 3]}
    alone = simulate(problem, make_plan(problem, [0, 1, 0, 1], **fields))
    plan = make_plan(problem, [0, 1, 0, 1], **fields, replicas=[[0, 1], [2, 3]])
    wide, plain = expand(problem, plan)
    assert schedule == "interleaved_1f1b" or list(plain.stage_of_group) == list(range(8))  # interleaved is an order by then
    for line in (simulate(problem, plan), simulate(wide, plain)):
        assert line.step_time_s == alone.step_time_s
        assert line.peak_memory_bytes.tolist() == alone.peak_memory_bytes[:2].tolist() * 2


def test_one_replica_elsewhere_is_the_same_plan_on_other_devices():
    problem = random_problem(7, 12, 4)
    plain, line = run(problem, make_plan(problem, [0] * 6 + [1] * 6, planner="hand", replicas=[[3, 2]]))
    assert plain is problem
    assert line.step_time_s == simulate_reference(problem, [3] * 6 + [2] * 6).step_time_s


def test_orders_and_priorities_follow_their_replica():
    problem = two_layers((1000, 2000))
    order = [[0, 1, 2, 3, 5, 4], []]
    plain, lowered = expand(problem, make_plan(problem, [0, 0], planner="hand", replicas=[[0], [1]], order=order))
    assert lowered.order == [[0, 1, 2, 3, 5, 4], [6, 7, 8, 9, 11, 10]]
    line = simulate_reference(plain, lowered.device_of_group, order=lowered.order)
    assert line.start_s[5] < line.start_s[4]
    priority = np.arange(6.0)
    plain, lowered = expand(problem, make_plan(problem, [0, 0], planner="hand", replicas=[[0], [1]], priority=priority))
    assert lowered.priority.tolist() == [*range(6), *range(6), 0, 0]


def test_recompute_segments_are_lowered_by_name():
    problem = random_problem(7, 12, 4)
    plan = make_plan(problem, [0] * 12, planner="hand", recompute=[[0, 1, 2], [3]], microbatches=2)
    plain, line = run(problem, plan)
    assert plain.fingerprint == recompute(problem, [[0, 1, 2], [3]]).fingerprint
    again = float(problem.time_s[(problem.op_phase == FORWARD) & np.isin(problem.op_group, [0, 1, 2, 3]), 0].sum())
    before = simulate_reference(problem, [0] * 12, microbatches=2)
    assert before.busy_s[0] < line.busy_s[0] <= before.busy_s[0] + 2 * again + 1e-12
    assert line.peak_memory_bytes[0] <= before.peak_memory_bytes[0]


def test_the_simulator_runs_what_expand_makes():
    problem = random_problem(7, 12, 4)
    plan = make_plan(
        problem,
        [0] * 6 + [1] * 6,
        planner="hand",
        replicas=[[0, 1], [2, 3]],
        recompute=[[0, 1, 2]],
        optimizer_sharding=True,
        microbatches=3,
        schedule="1f1b",
    )
    plain, line = run(problem, plan)
    fast = simulate(problem, plan)
    assert fast.step_time_s == line.step_time_s
    assert fast.peak_memory_bytes.tolist() == line.peak_memory_bytes.tolist()
    assert fast.samples == 6 * problem.samples_per_microbatch
    events = trace_events(plain, fast)
    assert sum(event.get("cat") == "collective" for event in events) == len(plain.collectives)
    with pytest.raises(InputError, match=r"rlplace\.expand"):
        trace_events(problem, fast)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"replicas": [[0], [0]]}, "different devices"),
        ({"replicas": [[0], [7]]}, "different devices"),
        ({"replicas": [[0], [1, 2]]}, "equal length"),
        ({"replicas": []}, "equal length"),
        ({"optimizer_sharding": True}, "optimizer_sharding"),
        ({"recompute": [[0], [0]]}, "distinct groups"),
        ({"recompute": [[9]]}, "distinct groups"),
    ],
)
def test_plans_that_make_no_sense_are_refused(fields, message):
    problem = two_layers(devices=4)
    with pytest.raises(InputError, match=message):
        make_plan(problem, [0, 0], planner="hand", **fields)


def test_fixed_groups_and_unknown_gradients_cannot_be_replicated():
    fixed = dataclasses.replace(two_layers(), group_device=np.array([0, -1], dtype=np.int32))
    with pytest.raises(InputError, match="fixed groups"):
        expand(fixed, make_plan(fixed, [0, 0], planner="hand", replicas=[[0], [1]]))
    unknown = np.full(2, -1, dtype=np.int64)
    vague = dataclasses.replace(
        two_layers(), weight_bytes=unknown, gradient_bytes=unknown.copy(), optimizer_bytes=unknown.copy()
    )
    with pytest.raises(InputError, match="how large"):
        expand(vague, make_plan(vague, [0, 0], planner="hand", replicas=[[0], [1]]))
