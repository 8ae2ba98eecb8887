"""Assisted simulation: the ordinary one when nothing moves, consistent when ops do, and what it recovers when costs drift."""

import dataclasses
import itertools

import numpy as np
import pytest

from benchmarks.papers.compiler.assist import simulate_assisted
from benchmarks.papers.compiler.assist_rule import AssistedRun
from benchmarks.papers.compiler.movable import movable, move_costs, prepare_assistants
from rlplace.planners import get_planner
from rlplace.problem import UPDATE
from rlplace.problem.build import TensorSpec, build_problem
from rlplace.problem.generate import random_problem
from rlplace.simulator import default_priority, simulate
from rlplace.simulator.timeline import resident_by_device


def drifted(problem, seed, spread=0.3):
    """Actual times: every op by up to `spread` more or less than planned."""
    factor = np.random.default_rng(seed).uniform(1 - spread, 1 + spread, problem.num_ops)
    return problem.time_s * factor[:, None]


def assert_same(found, expected):
    for field in dataclasses.fields(expected):
        np.testing.assert_array_equal(getattr(found, field.name), getattr(expected, field.name), err_msg=field.name)


@pytest.mark.parametrize("seed", range(8))
def test_without_movable_groups_it_is_the_ordinary_simulator(seed):
    problem = random_problem(seed, 40, 4, shape=("layered", "branchy")[seed % 2], shared_parameters=2, hosts=1 + seed % 2)
    devices = np.random.default_rng(seed).integers(0, 4, 40)
    none = np.zeros(40, dtype=bool)
    found = simulate_assisted(problem, devices, movable=none)
    assert_same(found.timeline, simulate(problem, devices))
    assert found.steals == () and found.weight_transfers == ()
    actual = drifted(problem, seed)
    found = simulate_assisted(problem, devices, movable=none, actual_time_s=actual)
    really = dataclasses.replace(problem, time_s=actual)
    assert_same(found.timeline, simulate(really, devices, priority=default_priority(problem)))


def check_consistent(problem, devices, found, actual):
    """Rules that hold whatever the assistants decide, from the record alone."""
    line = found.timeline
    moved = {op for steal in found.steals for op in (steal.op, *steal.followers)}
    home = devices[problem.op_group]
    stayed = np.array([op not in moved for op in range(problem.num_ops)])
    np.testing.assert_array_equal(line.device_of_op[stayed], home[stayed])
    assert (problem.op_phase[sorted(moved)] != UPDATE).all()
    seconds = actual[np.arange(problem.num_ops), line.device_of_op]
    members = {op for collective in problem.collectives for op in collective.ops}
    alone = [op for op in range(problem.num_ops) if op not in members]
    np.testing.assert_allclose((line.end_s - line.start_s)[alone], seconds[alone], atol=1e-12)
    for device in range(problem.num_devices):  # one task at a time
        mine = [op for op in alone if line.device_of_op[op] == device and seconds[op] > 0]
        order = sorted(mine, key=lambda op: line.start_s[op])
        for a, b in itertools.pairwise(order):
            assert line.end_s[a] <= line.start_s[b] + 1e-12
    arrivals = {}  # (tensor, device) -> moments from which a copy is there
    for op in range(problem.num_ops):
        for tensor in np.flatnonzero(problem.tensor_producer == op):
            arrivals.setdefault((tensor, line.device_of_op[op]), []).append(line.end_s[op])
    for tensor in np.flatnonzero(problem.tensor_owner >= 0):
        arrivals.setdefault((tensor, devices[problem.tensor_owner[tensor]]), []).append(0.0)
    sent = sorted(
        zip(line.transfer_end_s, line.transfer_start_s, line.transfer_tensor, line.transfer_source, line.transfer_destination,
            strict=True)
    )  # fmt: skip
    for end, start, tensor, source, destination in sent:  # a sender has what it sends
        assert min(arrivals[tensor, source]) <= start + 1e-12
        arrivals.setdefault((tensor, destination), []).append(end)
    for tensor, reader in zip(problem.edge_tensor, problem.consumers, strict=True):
        assert min(arrivals[tensor, line.device_of_op[reader]]) <= line.start_s[reader] + 1e-12
    transfers = [(s, e, a, b) for e, s, _, a, b in sent] + [(s, e, a, b) for _, a, b, s, e in found.weight_transfers]
    channels = problem.links.effective_channels
    held = {}
    for start, end, a, b in sorted(transfers):
        for channel in channels[a][b]:
            assert held.get(channel, 0.0) <= start + 1e-12
            held[channel] = end
    weights = {(group, to): end for group, _, to, _, end in reversed(found.weight_transfers)}
    for op in moved:  # weights come before the first op that needs them
        group, to = problem.op_group[op], line.device_of_op[op]
        if to != devices[group] and (
            problem.weight_bytes[group] > 0 or problem.resident_bytes[group] > 0 > problem.weight_bytes[group]
        ):
            assert weights[group, to] <= line.start_s[op] + 1e-12


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("move_weights", [False, True])
def test_ops_that_move_keep_the_rules(seed, move_weights):
    shape = ("layered", "branchy")[seed % 2]
    problem = random_problem(
        seed, 40, 2 + seed % 3, shape=shape, width=6, unlike=seed % 5 == 0, hosts=1 + (seed % 4 == 3),
        null_fraction=0.1 * (seed % 2), memory_factor=(None, 1.6)[seed % 2], comm_ratio=(0.1, 1.0)[seed % 3 == 0],
        shared_parameters=seed % 2,
    )  # fmt: skip
    devices = np.array([np.flatnonzero(row)[(7 * g) % row.sum()] for g, row in enumerate(problem.group_allowed)])
    actual = drifted(problem, seed)
    everything = np.ones(40, dtype=bool)
    for only_late in (False, True):
        found = simulate_assisted(
            problem, devices, movable=everything, actual_time_s=actual, move_weights=move_weights, only_late=only_late
        )
        check_consistent(problem, devices, found, actual)


@pytest.mark.parametrize("seed", range(20))
def test_all_memory_is_given_back(seed):
    problem = random_problem(seed, 40, 3, shape=("layered", "branchy")[seed % 2], width=6, shared_parameters=1)
    devices = np.random.default_rng(seed).integers(0, 3, 40).astype(np.int32)
    actual = dataclasses.replace(problem, time_s=drifted(problem, seed))
    everything = np.ones(40, dtype=bool)
    run = AssistedRun(problem, actual, devices, default_priority(problem), everything, None, True, False)
    run.run()
    assert run.done == problem.num_ops and run.steals
    np.testing.assert_array_equal(run.memory, resident_by_device(problem, devices))
    assert all(count == 0 for (value, _), count in run.uses.items() if value not in run.weight_group)


def test_assistants_recover_half_of_what_planning_anew_would():
    """The stale plan against the better of itself and a plan made for the actual costs, both at the actual costs."""
    compiler = get_planner("compiler")
    for shape in ("layered", "branchy"):
        problem = random_problem(1, 120, 4, shape=shape, width=8)
        plan = compiler(problem)
        options = prepare_assistants(problem, plan.device_of_group).options
        gap = recovered = 0.0
        for seed in range(4):
            actual = problem.time_s * np.random.default_rng(seed).uniform(0.7, 1.3, problem.num_ops)[:, None]
            really = dataclasses.replace(problem, time_s=actual)
            stale = simulate(really, plan.device_of_group, priority=default_priority(problem)).step_time_s
            line = simulate_assisted(problem, plan, actual_time_s=actual, **options).timeline
            assert line.feasible
            gap += stale - min(stale, compiler(really).predicted.step_time_s)
            recovered += stale - line.step_time_s
        assert recovered >= 0.5 * gap > 0.0


def test_assistants_do_not_slow_what_goes_as_planned():
    problems = [
        random_problem(
            seed, 60, 2 + seed % 3, shape=("layered", "branchy")[seed % 2], width=8, unlike=seed % 3 == 0,
            training=seed % 4 != 0, comm_ratio=(0.3, 2.0)[seed % 5 == 0],
        )
        for seed in range(8)
    ]  # fmt: skip
    rehearsals = []
    for index, problem in enumerate(problems):
        plan = get_planner(("metis", "compiler")[index % 2])(problem)
        for move_weights in (False, True):
            help_ = prepare_assistants(problem, plan.device_of_group, move_weights=move_weights)
            found = simulate_assisted(problem, plan, **help_.options)
            assert found.step_time_s == help_.rehearsed_s <= plan.predicted.step_time_s
            rehearsals.append(help_.only_late)
            if help_.only_late:
                assert found.steals == ()
    assert not all(rehearsals)


@pytest.mark.parametrize("seed", range(12))
def test_nothing_is_late_in_a_step_that_goes_as_planned(seed):
    """Whatever the plan: assistants that take only what is late leave the planned step alone."""
    problem = random_problem(seed, 50, 2 + seed % 3, shape=("layered", "branchy")[seed % 2], hosts=1 + seed % 2)
    devices = np.random.default_rng(seed).integers(0, problem.num_devices, 50)
    for margin_s in (None, 0.0):
        found = simulate_assisted(problem, devices, movable=np.ones(50, dtype=bool), move_weights=True, margin_s=margin_s)
        assert found.steals == () and found.step_time_s == simulate(problem, devices).step_time_s


@pytest.mark.parametrize("seed", range(6))
def test_move_costs_are_differences_of_cuts(seed):
    problem = random_problem(
        seed, 14, 3, shape=("layered", "branchy")[seed % 2], shared_parameters=seed % 3, hosts=1 + 2 * (seed % 2)
    )
    devices = np.random.default_rng(seed).integers(0, 3, 14).astype(np.int32)

    def cut(where):
        total = 0.0
        for tensor in range(problem.num_tensors):
            producer, owner = problem.tensor_producer[tensor], problem.tensor_owner[tensor]
            source = int(where[problem.op_group[producer] if producer >= 0 else owner])
            readers = problem.consumers[problem.consumer_ptr[tensor] : problem.consumer_ptr[tensor + 1]]
            for to in {int(where[problem.op_group[reader]]) for reader in readers} - {source}:
                total += problem.links.transfer_s(source, to, int(problem.tensor_bytes[tensor]))
        return total

    costs, before = move_costs(problem, devices), cut(devices)
    for group in range(14):
        for device in range(3):
            where = devices.copy()
            where[group] = device
            assert costs[group, device] == pytest.approx(cut(where) - before, abs=1e-12)


def test_tags_by_hand():
    """A chain on one device: its ends cost one transfer to move, the middle two; parameters and fixed groups stay."""
    problem = build_problem(
        "chain",
        time_s=[[10.0, 10.0]] * 5,
        tensors=[TensorSpec(i, 1, [i + 1]) for i in range(4)],
        memory_bytes=[None, None],
        resident_bytes=[0, 0, 0, 0, 3],
        group_device=[-1, -1, 0, -1, -1],
    )
    tags = [movable(problem, [0] * 5, delta=delta).tolist() for delta in (0.01, 0.03, 0.05)]
    assert tags[0] == [False] * 5
    assert tags[1] == [True, False, False, False, False]
    assert tags[2] == [True, True, False, True, False]
    weights = movable(problem, [0] * 5, delta=0.15, move_weights=True)
    assert weights.tolist() == [True, True, False, True, True]  # the last: one transfer and 3 bytes each way, 7 of 50 seconds
