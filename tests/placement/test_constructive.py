"""Single planners against the papers' examples, brute force and arithmetic by hand."""

import itertools

import numpy as np
import pytest

from rlplace.placement import get_planner
from rlplace.placement.common import bounds
from rlplace.placement.common.floor import device_order, device_subsets, map_parts
from rlplace.placement.common.groupgraph import group_graph
from rlplace.placement.common.oparrays import by_rank, upward_rank
from rlplace.placement.list_scheduling import critical_ops, critical_path, earliest_finish, earliest_start
from rlplace.placement.metis import metis_partition
from rlplace.placement.simple import m_topo
from rlplace.problem import problem_from_dict, problem_to_dict
from rlplace.problem.build import TensorSpec, build_problem
from rlplace.problem.generate import random_problem
from rlplace.simulator import simulate


def topcuoglu():
    """Returns the ten-task example of Topcuoglu, Hariri, Wu (2002), figure 2 and table 1."""
    times = [
        [14, 16, 9], [13, 19, 18], [11, 13, 19], [13, 8, 17], [12, 13, 10],
        [13, 16, 9], [7, 15, 11], [5, 11, 14], [18, 12, 20], [21, 7, 16],
    ]  # fmt: skip
    edges = {
        (1, 2): 18, (1, 3): 12, (1, 4): 9, (1, 5): 11, (1, 6): 14, (2, 8): 19, (2, 9): 16, (3, 7): 23,
        (4, 8): 27, (4, 9): 23, (5, 9): 13, (6, 8): 15, (7, 10): 17, (8, 10): 11, (9, 10): 13,
    }  # fmt: skip
    tensors = [TensorSpec(a - 1, size, [b - 1]) for (a, b), size in edges.items()]
    return build_problem("topcuoglu", time_s=times, tensors=tensors, memory_bytes=[None] * 3)


def test_heft_reproduces_its_papers_example():
    problem = topcuoglu()
    rank = upward_rank(problem, communication=True)
    expected = [108.0, 77.0, 80.0, 80.0, 69.0, 63.333, 42.667, 35.667, 44.333, 14.667]
    np.testing.assert_allclose(rank, expected, atol=5e-4)
    result = earliest_finish(problem, by_rank(problem, rank), range(3), contention=False)
    assert result.finish.max() == 80.0
    # Figure 3a of the paper, processors P1 to P3 as 0 to 2.
    assert result.devices.tolist() == [2, 0, 2, 1, 2, 1, 2, 0, 1, 1]


def test_heft_own_schedule_is_valid():
    """No two ops overlap on a device, and no op starts before its inputs can be there."""
    problem = random_problem(4, 40, 3, shape="branchy")
    for contention in (False, True):
        result = earliest_finish(
            problem, by_rank(problem, upward_rank(problem, communication=True)), range(3), contention=contention
        )
        device = result.devices[problem.op_group]
        for d in range(3):
            ops = np.flatnonzero((device == d) & (result.finish > result.start))
            ops = ops[np.argsort(result.start[ops])]
            assert (result.start[ops[1:]] >= result.finish[ops[:-1]] - 1e-12).all()
        for tensor, op in zip(problem.edge_tensor, problem.consumers, strict=True):
            producer = problem.tensor_producer[tensor]
            if producer >= 0:
                a, b = int(device[producer]), int(device[op])
                sent = 0.0 if a == b else problem.links.transfer_s(a, b, int(problem.tensor_bytes[tensor]))
                assert result.start[op] >= result.finish[producer] + sent - 1e-12


def test_m_etf_by_hand():
    """c (3 s, longest) starts first on device 0, a on device 1; b waits for a there rather than 5 s for a transfer."""
    problem = build_problem("etf", time_s=[[1.0, 1.0], [1.0, 1.0], [3.0, 3.0]], tensors=[TensorSpec(0, 5, [1])],
                            memory_bytes=[None, None])  # fmt: skip
    _, devices, _, start, finish, *_ = earliest_start(problem, [0, 1])
    assert devices.tolist() == [1, 1, 0]
    assert start.tolist() == [0.0, 1.0, 0.0] and finish.tolist() == [1.0, 2.0, 3.0]


def test_m_etf_respects_memory():
    """Device 0 has room for one group of 6, so the other two queue on device 1 although it is busy until 2 s."""
    problem = build_problem("etf", time_s=[[2.0, 2.0]] * 3, tensors=[], memory_bytes=[6, 12], resident_bytes=[6, 6, 6])
    _, devices, _, start, *_ = earliest_start(problem, [0, 1])
    assert devices.tolist() == [0, 1, 1]
    assert start.tolist() == [0.0, 0.0, 2.0]


def test_single_takes_the_fastest_device_that_fits():
    problem = build_problem(
        "single", time_s=[[3.0, 1.0, 2.0]] * 2, tensors=[], memory_bytes=[50, 15, 50], resident_bytes=[10, 10]
    )
    plan = get_planner("single")(problem)
    assert plan.device_of_group.tolist() == [2, 2]
    assert plan.predicted.step_time_s == 4.0


def test_round_robin_deals_in_topological_order():
    problem = random_problem(1, 7, 3)
    plan = get_planner("round_robin")(problem)
    assert plan.device_of_group[group_graph(problem).order].tolist() == [0, 1, 2, 0, 1, 2, 0]


def test_metis_separates_two_cliques():
    tensors = [TensorSpec(a, 100, [b]) for half in (0, 4) for a, b in itertools.combinations(range(half, half + 4), 2)]
    problem = build_problem(
        "cliques", time_s=[[1.0, 1.0]] * 8, tensors=[*tensors, TensorSpec(3, 1, [4])], memory_bytes=[None] * 2
    )
    part = metis_partition(problem, np.ones(8), np.array([0.5, 0.5]), 50, seed=0)
    assert len(set(part[:4])) == len(set(part[4:])) == 1 and part[0] != part[4]


def test_parts_go_where_their_links_are_quick():
    """Parts 0-1 and 2-3 talk; devices 0-2 and 1-3 are linked well."""
    bandwidth = np.full((4, 4), 1.0)
    for a, b in ((0, 2), (1, 3)):
        bandwidth[a, b] = bandwidth[b, a] = 100.0
    problem = build_problem("hosts", time_s=[[1.0] * 4] * 4, tensors=[TensorSpec(0, 50, [1]), TensorSpec(2, 50, [3])],
                            memory_bytes=[None] * 4, bandwidth_bytes_per_s=bandwidth.tolist())  # fmt: skip
    devices = map_parts(problem, np.arange(4, dtype=np.int32), [0, 1, 2, 3])
    assert sorted(devices.tolist()) == [0, 1, 2, 3]
    assert all(bandwidth[devices[a], devices[b]] == 100.0 for a, b in ((0, 1), (2, 3)))
    assert set(device_order(problem)[:2]) in ({0, 2}, {1, 3})


def test_device_subsets_cover_large_clusters_sparsely():
    problem = build_problem("many", time_s=[[1.0] * 64] * 2, tensors=[], memory_bytes=[None] * 64)
    sizes = [len(subset) for subset in device_subsets(problem)]
    assert sizes[0] == 1 and sizes[-1] == 64 and len(sizes) <= 12 and sizes == sorted(set(sizes))


def test_critical_ops_form_a_longest_path():
    problem = topcuoglu()
    rank = upward_rank(problem, communication=True)
    assert [op + 1 for op in critical_ops(problem, rank)] in ([1, 3, 7, 10], [1, 4, 9, 10], [1, 2, 9, 10])
    assert critical_ops(problem, rank)[0] == 0


def test_transfer_tables_count_in_ranks_and_traffic():
    data = problem_to_dict(
        build_problem("table", time_s=[[1.0, 1.0]] * 2, tensors=[TensorSpec(0, 1, [1])], memory_bytes=[None] * 2)
    )
    data["tensors"][0]["transfer_s"] = [[0.0, 7.0], [9.0, 0.0]]
    problem = problem_from_dict(data)
    assert upward_rank(problem, communication=True).tolist() == [10.0, 1.0]
    assert group_graph(problem).edge_s(5.0, 5.0).tolist() == [8.0]
    assert get_planner("best")(problem).predicted.step_time_s == 2.0


@pytest.mark.parametrize("setting", [{}, {"unlike": True, "null_fraction": 0.2}, {"shape": "chain"}, {"shape": "branchy"}])
def test_bounds_hold_for_random_plans(setting):
    for seed in range(4):
        problem = random_problem(seed, 12, 3, **setting)
        bound = bounds.lower_bounds(problem)
        rng = np.random.default_rng(seed)
        for _ in range(20):
            devices = [int(rng.choice(np.flatnonzero(row))) for row in problem.group_allowed]
            line = simulate(problem, devices)
            assert line.step_time_s >= bound.step_time_s * (1 - 1e-12)
            assert line.peak_memory_bytes.sum() >= bound.resident_bytes + bound.live_bytes


def test_work_bound_is_exact_for_divisible_work_on_uniform_devices():
    problem = build_problem("work", time_s=[[4.0, 1.0]] * 50, tensors=[], memory_bytes=[None] * 2)
    assert bounds.lower_bounds(problem).work_s == pytest.approx(50 / (1 + 0.25))


def test_metis_keeps_its_warnings_off_stdout(capfd):
    """A part that is to hold nothing makes METIS complain; results are printed there."""
    problem = random_problem(3, 6, 4)
    print("before", end="")
    metis_partition(problem, np.ones(6), np.array([1.0, 0.0, 0.0, 0.0]), 50, 0)
    print("after", end="")
    assert capfd.readouterr().out == "beforeafter"


def chain(sizes, memory):
    """Returns a chain of one op of 1 s a group; groups hold `sizes` bytes."""
    count = len(sizes)
    return build_problem(
        "chain", time_s=[[1.0] * len(memory)] * count, memory_bytes=memory, resident_bytes=sizes,
        tensors=[TensorSpec(op, 0, [op + 1]) for op in range(count - 1)],
    )  # fmt: skip


def plans(problem):
    return {len(set(devices.tolist())): devices.tolist() for devices in m_topo.candidates(problem, 0)}


def test_m_topo_moves_on_when_an_equal_share_and_the_largest_group_are_exceeded():
    """60 bytes on two devices: 30 + 20 each, so 10 + 20 + 20 fit and the next group does not. On three: 20 + 20."""
    found = plans(chain([10, 20, 20, 10], [None] * 3))
    assert found[1] == [0, 0, 0, 0]
    assert found[2] == [0, 0, 0, 1]
    assert 3 not in found  # 10 + 20, then 20 + 10: the third device stays empty
    assert [0, 0, 1, 1] in [devices.tolist() for devices in m_topo.candidates(chain([10, 20, 20, 10], [None] * 3), 0)]


def test_m_topo_shares_follow_unlike_memory():
    """Limits of 15 and 45 share 40 bytes as 10 and 30; with the largest group the first device takes 15."""
    assert plans(chain([5] * 8, [15, 45]))[2] == [0, 0, 0, 1, 1, 1, 1, 1]


def branches(memory):
    """Returns a fork of 0 to the chain 1, 2, 3 (3 s each), and to 4 and 5 (1 s each); 6 joins. Groups hold 10 bytes."""
    times = [1.0, 3.0, 3.0, 3.0, 1.0, 1.0, 1.0]
    edges = [(0, [1, 4, 5]), (1, [2]), (2, [3]), (3, [6]), (4, [6]), (5, [6])]
    return build_problem(
        "branches", time_s=[[t] * 2 for t in times], memory_bytes=memory, resident_bytes=[10] * 7,
        tensors=[TensorSpec(op, 4, readers) for op, readers in edges],
    )  # fmt: skip


def test_the_critical_path_stays_together():
    for devices in critical_path.candidates(branches([None, None]), 0):
        assert len(set(devices[[0, 1, 2, 3, 6]].tolist())) == 1


def test_the_critical_path_leaves_its_device_when_that_is_full():
    """Footprints are 10 bytes; the first device holds three of the path's five groups, in path order."""
    for devices in critical_path.candidates(branches([30, 100]), 0):
        home = np.flatnonzero(devices == 0)
        assert home.tolist() == [0, 1, 2]
