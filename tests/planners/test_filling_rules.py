"""m-TOPO's cap and the critical path's device, by hand."""

import numpy as np

from rlplace.planners import critical_path, m_topo
from rlplace.problem.build import TensorSpec, build_problem


def chain(sizes, memory):
    """One op of 1 s a group; groups hold `sizes` bytes."""
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
    """0 forks to the chain 1, 2, 3 (3 s each) and to 4 and 5 (1 s each); 6 joins. Sending takes 4 s, groups hold 10 bytes."""
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
