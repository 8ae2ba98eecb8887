"""The realised critical path: links follow one another without gaps, and what happened is what they say."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rlplace.cluster.links import Links
from rlplace.explanation.bounds import step_bounds
from rlplace.plan import make_plan
from rlplace.problem.build import TensorSpec, build_problem
from rlplace.problem.generate import random_problem
from rlplace.simulator.path import CAUSES, CHANNEL, COLLECTIVE, COMPUTE, DEVICE, ORDER, TRANSFER, realised_path
from rlplace.simulator.simulated_plan import run_plan
from tests.drawn import training_problem
from tests.toys import fork_join, two_device_chain


def path_of(problem, devices, **fields):
    run = run_plan(problem, make_plan(problem, devices, planner="test", **fields))
    return run, realised_path(run)


def check(run, path):
    """Links cover the step from 0 to its end, each where the timeline has it."""
    line = run.line
    if not line.step_time_s:
        assert path == ()
        return
    assert path[0].start_s == 0.0 and path[-1].end_s == line.step_time_s
    assert all(a.end_s == b.start_s for a, b in itertools.pairwise(path))
    computed = set(zip(range(run.problem.num_ops), line.start_s.tolist(), line.end_s.tolist(), strict=True))
    moved = set(
        zip(
            line.transfer_source.tolist(), line.transfer_destination.tolist(),
            line.transfer_start_s.tolist(), line.transfer_end_s.tolist(), strict=True,
        )
    )  # fmt: skip
    for link in path:
        assert link.cause in CAUSES and link.end_s > link.start_s
        if link.cause in (COMPUTE, COLLECTIVE):
            assert (link.op, link.start_s, link.end_s) in computed
        elif link.cause == TRANSFER:
            assert (link.device, link.destination, link.start_s, link.end_s) in moved
        elif link.cause == DEVICE:
            assert line.device_of_op[link.blocker] == link.device
            assert link.blocker != link.op
        elif link.cause == ORDER:
            assert run.plan.order is not None
    bounds = step_bounds(run)
    assert sum(part.seconds for part in bounds.path) == pytest.approx(line.step_time_s, rel=1e-12)
    assert bounds.story[0].start_s == 0.0 and bounds.story[-1].end_s == line.step_time_s
    assert bounds.lower_bound_s <= line.step_time_s * (1 + 1e-9)


def through_devices(problem, devices):
    """The chain through what kept devices busy covers the step as well, and nothing in it waits for a device."""
    run = run_plan(problem, make_plan(problem, devices, planner="test"))
    path = realised_path(run, through_devices=True)
    check(run, path)
    assert all(link.cause != DEVICE for link in path)


@settings(max_examples=40)
@given(seed=st.integers(0, 10**6))
def test_links_cover_the_step_where_ties_are_the_rule(seed):
    rng = np.random.default_rng(seed)
    problem = training_problem(rng)
    devices = np.where(
        problem.group_device >= 0, problem.group_device, rng.integers(0, problem.num_devices, problem.num_groups)
    )
    check(*path_of(problem, devices))
    through_devices(problem, devices)


@settings(max_examples=15)
@given(seed=st.integers(0, 10**6), shape=st.sampled_from(["layered", "branchy", "wavefront"]))
def test_links_cover_the_step_of_training_steps(seed, shape):
    problem = random_problem(seed, 12, 3, shape=shape, hosts=2, shared_parameters=2)
    devices = np.random.default_rng(seed).integers(0, 3, 12)
    check(*path_of(problem, devices))
    through_devices(problem, devices)


def test_a_chain_on_one_device_only_computes():
    toy = two_device_chain(6)
    run, path = path_of(toy.problem, [0] * 6)
    assert {link.cause for link in path} == {COMPUTE} and len(path) == 6
    bounds = step_bounds(run)
    assert [(p.cause, p.where, p.seconds) for p in bounds.path] == [(COMPUTE, "gpu0", 6.0)]
    assert bounds.channels == () and bounds.lower_bound_s == 6.0 and bounds.most_gain == 0.0


def test_a_cut_adds_its_transfer():
    run, path = path_of(two_device_chain(4).problem, [0, 0, 1, 1])
    assert [(link.cause, link.start_s, link.end_s) for link in path] == [
        (COMPUTE, 0.0, 1.0), (COMPUTE, 1.0, 2.0), (TRANSFER, 2.0, 4.0), (COMPUTE, 4.0, 5.0), (COMPUTE, 5.0, 6.0),
    ]  # fmt: skip
    assert (path[2].device, path[2].destination, path[2].op) == (0, 1, 1)
    story = [(s.where, s.start_s, s.end_s) for s in step_bounds(run).story]
    assert story == [("gpu0", 0.0, 2.0), ("gpu0->gpu1", 2.0, 4.0), ("gpu1", 4.0, 6.0)]


def test_branches_on_one_device_wait_for_it():
    run, path = path_of(fork_join(5, 2).problem, [0] * 7)
    assert [link.cause for link in path] == [COMPUTE, *[DEVICE] * 4, COMPUTE, COMPUTE]
    assert run.line.step_time_s == 7.0
    waits = [link for link in path if link.cause == DEVICE]
    assert sum(link.seconds for link in waits) == 4.0
    assert len({link.blocker for link in waits}) == 4  # each of the other branches is named once
    assert "busy with op" in step_bounds(run).story[0].sentence


def test_a_transfer_waits_for_its_channel():
    """Two ops on two devices send 4 bytes each to a third one over a channel that they share: the second waits."""
    shared = ((), (), (7,)), ((), (), (7,)), ((), (), ())
    links = Links(np.ones((3, 3)), np.zeros((3, 3)), shared)
    problem = build_problem(
        "queue",
        time_s=[[1.0] * 3, [2.0] * 3, [1.0] * 3],
        tensors=[TensorSpec(0, 4, [2]), TensorSpec(1, 4, [2])],
        memory_bytes=[None] * 3,
        links=links,
    )
    run, path = path_of(problem, [0, 1, 2])
    assert [(link.cause, link.start_s, link.end_s, link.blocker) for link in path] == [
        (COMPUTE, 0.0, 2.0, -1), (CHANNEL, 2.0, 5.0, 0), (TRANSFER, 5.0, 9.0, -1), (COMPUTE, 9.0, 10.0, -1),
    ]  # fmt: skip
    bounds = step_bounds(run)
    assert bounds.channels[0].name == "into gpu2" and bounds.channels[0].busy_s == 8.0
    assert bounds.channels[0].size_bytes == 8 and bounds.channels[0].transfers == 2


def test_an_order_leaves_a_device_idle():
    """gpu1 must run op 1, which needs op 0 from gpu0, before op 2, which is ready at once."""
    problem = build_problem(
        "order", time_s=[[3.0] * 2, [1.0] * 2, [1.0] * 2], tensors=[TensorSpec(0, 0, [1])], memory_bytes=[None] * 2
    )
    run, path = path_of(problem, [0, 1, 1], order=[[0], [1, 2]])
    assert run.line.step_time_s == 5.0
    assert [(link.cause, link.start_s, link.end_s) for link in path] == [
        (ORDER, 0.0, 3.0),
        (DEVICE, 3.0, 4.0),
        (COMPUTE, 4.0, 5.0),
    ]
    assert "idle until its turn comes" in step_bounds(run).story[0].sentence


def test_links_without_cost():
    problem = random_problem(3, 12, 3)
    free = dataclasses.replace(problem, links=Links(np.full((3, 3), 1e300), np.zeros((3, 3))))
    run, path = path_of(free, np.arange(12) % 3)
    check(run, path)
    assert sum(link.seconds for link in path if link.cause == TRANSFER) < 1e-200


def test_a_step_that_cannot_complete_has_no_path():
    problem = build_problem("null", time_s=[[1.0, np.nan]], tensors=[], memory_bytes=[None, None])
    assert path_of(problem, [1])[1] == ()


@settings(max_examples=20)
@given(seed=st.integers(0, 10**6))
def test_orders_of_their_own(seed):
    """An order that was right for other times makes devices wait while they are idle."""
    from rlplace.simulator import simulate

    rng = np.random.default_rng(seed)
    problem = training_problem(rng)
    devices = np.where(
        problem.group_device >= 0, problem.group_device, rng.integers(0, problem.num_devices, problem.num_groups)
    )
    line = simulate(problem, devices, priority=rng.random(problem.num_ops))
    assume(line.step_time_s is not None)
    members = {op for collective in problem.collectives for op in collective.ops}
    order = [[] for _ in problem.devices]
    for op in np.lexsort((line.end_s, line.start_s)).tolist():
        if op not in members:
            order[line.device_of_op[op]].append(op)
    slow = dataclasses.replace(problem, time_s=problem.time_s * rng.integers(1, 4, problem.time_s.shape))
    check(*path_of(slow, devices, order=order))
