"""m-SCT: favorite children by hand, the awake device by hand, an instance where it beats ETF, contraction."""

import numpy as np
import pytest

from rlplace.planners import get_planner
from rlplace.planners.common.oparrays import earliest_schedule
from rlplace.planners.m_sct.m_sct import favorite_children, favorites, leading_edges
from rlplace.problem.build import TensorSpec, build_problem
from rlplace.problem.generate import random_problem
from rlplace.simulator import simulate_many


def solve(time, edges, transfer, **options):
    source, target = np.array(edges, dtype=np.int32).reshape(-1, 2).T
    return favorite_children(np.array(time, dtype=float), source, target, np.array(transfer, dtype=float), **options)


def test_a_chain_follows_itself():
    found = solve([1, 2, 3], [(0, 1), (1, 2)], [5, 5])
    assert found.child.tolist() == [1, 2, -1]
    assert found.makespan == pytest.approx(6)
    np.testing.assert_allclose(found.x, 0, atol=1e-7)


def test_a_fork_keeps_the_child_that_ends_last():
    """x_01 + x_02 >= 1 and w >= 4 + 2 x_01, 2 + 2 x_02: the only optimum, w = 4, has x_01 = 0."""
    found = solve([1, 3, 1], [(0, 1), (0, 2)], [2, 2])
    assert found.child.tolist() == [1, -1, -1]
    assert found.makespan == pytest.approx(4)


def test_a_join_follows_its_latest_parent():
    """w >= 3 + 2 x_02 + 1 and 1 + 2 x_12 + 1 with x_02 + x_12 >= 1."""
    found = solve([3, 1, 1], [(0, 2), (1, 2)], [2, 2])
    assert found.child.tolist() == [2, -1, -1]
    assert found.makespan == pytest.approx(4)


def test_a_tie_is_split_and_rounded_to_one_favorite():
    """w >= 4 + 2 x for both children and x_01 + x_02 >= 1: x = 1/2 each, w = 5; both round to favorites, one holds."""
    found = solve([1, 3, 3], [(0, 1), (0, 2)], [2, 2])
    np.testing.assert_allclose(found.x, 0.5, atol=1e-6)
    assert found.makespan == pytest.approx(5)
    assert found.child[0] in (1, 2)
    assert solve([1, 3, 3], [(0, 1), (0, 2)], [2, 2], threshold=0.1).child.tolist() == [-1, -1, -1]


def test_edges_within_a_group_are_free_and_no_favorites():
    found = solve([1, 3, 1], [(0, 1), (0, 2)], [2, 2], bound=np.array([True, False]))
    assert found.child.tolist() == [2, -1, -1]
    assert found.makespan == pytest.approx(4)


def test_out_of_time_gives_nothing():
    problem = random_problem(0, 400, 4, training=False)
    ops, source, target, transfer = leading_edges(problem)
    assert favorite_children(np.ones(len(ops)), source, target, transfer, time_limit_s=0.0) is None
    # The planner then solves smaller graphs and still answers.
    assert get_planner("m_sct")(problem, time_limit_s=0.0).predicted.feasible


@pytest.mark.parametrize("setting", [{}, {"training": False}, {"shared_parameters": 2}, {"shape": "branchy"}])
@pytest.mark.parametrize("max_nodes", [6000, 17, 2])
def test_favorites_are_readers_in_another_group(setting, max_nodes):
    problem = random_problem(4, 60, 3, **setting)
    favorite = favorites(problem, max_nodes=max_nodes)
    taken = np.flatnonzero(favorite >= 0)
    assert len(taken) > 0
    assert len(set(favorite[taken].tolist())) == len(taken)
    ops, source, target, _ = leading_edges(problem)
    edges = set(zip(ops[source].tolist(), ops[target].tolist(), strict=True))
    for op in taken.tolist():
        assert (op, int(favorite[op])) in edges
        assert problem.op_group[op] != problem.op_group[favorite[op]]


def fork(shares):
    """Chain 0, 1, then 2 and 3 read 1 and run for 2 s as all do; sending to 3 takes 2 s, the others 1 s."""
    return build_problem(
        "fork", time_s=[[2.0] * shares] * 4, memory_bytes=[None] * shares,
        tensors=[TensorSpec(0, 1, [1]), TensorSpec(1, 1, [2]), TensorSpec(1, 2, [3])],
    )  # fmt: skip


def test_favorites_beat_earliest_task_first_and_reach_the_optimum():
    """Ops 0 and 1 take 4 s. Then 2 and 3 share a device and end at 8 s or later, or one of them sits away from 1 and ends at
    4 + 1 + 2 = 7 s or later. ETF keeps op 2, which comes first, beside op 1, and waits 2 s for the transfer to op 3.
    """
    problem = fork(2)
    everything = np.array(np.meshgrid(*[[0, 1]] * 4)).reshape(4, -1).T
    assert simulate_many(problem, everything).step_time_s.min() == 7.0
    assert favorites(problem).tolist() == [1, 3, -1, -1]
    assert get_planner("m_sct")(problem).predicted.step_time_s == 7.0
    assert get_planner("m_etf")(problem).predicted.step_time_s == 8.0


def waiting(apart_s):
    """Ops 0 and 1 run side by side for 2 s. Op 2 reads both (2 s from 0, 1 s from 1); op 3 reads 0 (`apart_s`), takes 3 s."""
    return build_problem(
        "waiting", time_s=[[2.0] * 2, [2.0] * 2, [2.0] * 2, [3.0] * 2], memory_bytes=[None] * 2, bandwidth_bytes_per_s=2.0,
        tensors=[TensorSpec(0, 4, [2]), TensorSpec(1, 2, [2]), TensorSpec(0, int(2 * apart_s), [3])],
    )  # fmt: skip


def test_an_awake_device_waits_for_its_favorite():
    """At 2 s, device 0 could run op 3. Its favorite 2 can start there at 3 s, elsewhere at 4 s; op 3 anywhere by 3.5 s."""
    problem = waiting(1.5)
    _, start, _, waits = earliest_schedule(problem, [0, 1])
    assert (start.tolist(), waits) == ([0, 0, 4, 2], 0)
    devices, start, finish, waits = earliest_schedule(problem, [0, 1], favorite=np.array([2, -1, -1, -1], dtype=np.int32))
    assert devices.tolist() == [0, 1, 0, 1]
    assert start.tolist() == [0, 0, 3, 3.5]
    assert finish.tolist() == [2, 2, 5, 6.5]
    assert waits == 1


def test_an_awake_device_takes_an_urgent_op():
    """Now every device could have started op 3 by 2.5 s, before the favorite is ready."""
    devices, start, _, waits = earliest_schedule(waiting(0.5), [0, 1], favorite=np.array([2, -1, -1, -1], dtype=np.int32))
    assert devices.tolist() == [0, 1, 1, 0]
    assert start.tolist() == [0, 0, 4, 2.5]
    assert waits == 1


def test_groups_without_ops_and_single_ops_are_placed():
    problem = build_problem("one", time_s=[[1.0, 1.0]], tensors=[], memory_bytes=[None, None], resident_bytes=[0, 5], group=[0])
    assert get_planner("m_sct")(problem).predicted.step_time_s == 1.0
