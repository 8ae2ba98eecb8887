"""Scheduling assistants on steps that can be followed by hand."""

import numpy as np
import pytest

from benchmarks.papers.compiler.assist import simulate_assisted
from rlplace.errors import InputError
from rlplace.plan import make_plan
from rlplace.problem import BACKWARD, FORWARD, UPDATE
from rlplace.problem.build import TensorSpec, build_problem

ALL = {"only_late": False}


def queue(length=4, latency_s=0.0, memory_bytes=(None, None), **fields):
    """Returns independent ops of a second, all planned on the first of two devices."""
    return build_problem(
        "queue", time_s=[[1.0, 1.0]] * length, tensors=[], memory_bytes=list(memory_bytes), latency_s=latency_s, **fields
    )


def everything(problem):
    return np.ones(problem.num_groups, dtype=bool)


def test_an_idle_device_shares_the_queue():
    """Four ops wait on one device; the idle one takes the last two, for which it gains most, one after the other."""
    problem = queue()
    found = simulate_assisted(problem, [0] * 4, movable=everything(problem), **ALL)
    assert found.step_time_s == 2.0
    assert [(s.op, s.source, s.destination, s.time_s, s.gain_s) for s in found.steals] == [
        (3, 0, 1, 0.0, 3.0),
        (2, 0, 1, 1.0, 1.0),
    ]
    assert found.timeline.busy_s.tolist() == [2.0, 2.0]


def test_the_margin_holds_it_back():
    problem = queue()
    found = simulate_assisted(problem, [0] * 4, movable=everything(problem), margin_s=1.0, **ALL)
    assert [s.op for s in found.steals] == [3] and found.step_time_s == 3.0
    found = simulate_assisted(problem, [0] * 4, movable=everything(problem), margin_s=3.0, **ALL)
    assert found.steals == () and found.step_time_s == 4.0


def test_only_movable_groups_on_devices_that_can_run_them():
    problem = queue()
    movable = np.array([True, True, False, False])
    assert {s.op for s in simulate_assisted(problem, [0] * 4, movable=movable, **ALL).steals} <= {0, 1}
    barred = build_problem("barred", time_s=[[1.0, np.nan]] * 4, tensors=[], memory_bytes=[None, None])
    assert simulate_assisted(barred, [0] * 4, movable=everything(barred), **ALL).steals == ()
    fixed = queue(group_device=[0] * 4)
    assert simulate_assisted(fixed, [0] * 4, movable=everything(fixed), **ALL).steals == ()


def test_what_is_late_is_taken():
    """The first op takes 5 seconds instead of 1. That is seen once it should have ended: at 1.0 nothing happens on the idle
    device; it decides when its own op ends at 2.0, when the op after is a second late and expected to start then.
    """
    problem = build_problem(
        "late", time_s=[[1.0, 1.0]] * 3 + [[2.0, 2.0]], tensors=[], memory_bytes=[None, None], latency_s=0.1
    )  # fmt: skip
    actual = problem.time_s.copy()
    actual[0] = 5.0
    found = simulate_assisted(problem, [0, 0, 0, 1], movable=everything(problem), actual_time_s=actual)
    assert [(s.op, s.time_s) for s in found.steals] == [(2, 2.0)]
    # op 2 was planned third (2.0 to 3.0) and is expected at 3.0 behind op 1; moved, it ends at 3.0 instead of 7.0
    assert found.timeline.end_s.tolist() == [5.0, 6.0, 3.0, 2.0]


def test_decisions_do_not_see_the_future():
    """Two futures that agree in what has ended until then lead to the same first decision."""
    problem = queue(6)
    steals = []
    for last in (0.1, 9.0):
        actual = problem.time_s.copy()
        actual[0], actual[1:] = 1.0, last
        found = simulate_assisted(problem, [0] * 6, movable=everything(problem), actual_time_s=actual, **ALL)
        steals.append(found.steals[0])
    assert steals[0] == steals[1]


def reader_chain(size_bytes):
    """Returns op 0 feeds ops 1 and 2, planned on its device, over a link of a byte a second."""
    return build_problem(
        "readers",
        time_s=[[1.0, 1.0], [2.0, 2.0], [2.0, 2.0]],
        tensors=[TensorSpec(0, size_bytes, [1, 2])],
        memory_bytes=[None, None],
    )


def test_inputs_are_sent_and_waited_for():
    found = simulate_assisted(reader_chain(1), [0, 0, 0], movable=np.array([False, True, True]), **ALL)
    # Op 2 would end at 5.0; its input is there at 2.0, so on the other device it ends at 4.0.
    assert found.step_time_s == 4.0 and found.timeline.device_of_op.tolist() == [0, 0, 1]
    line = found.timeline
    assert (line.transfer_source.tolist(), line.transfer_destination.tolist()) == ([0], [1])
    assert (line.transfer_start_s.tolist(), line.transfer_end_s.tolist()) == ([1.0], [2.0])
    found = simulate_assisted(reader_chain(2), [0, 0, 0], movable=np.array([False, True, True]), **ALL)
    assert found.steals == () and found.step_time_s == 5.0  # it would end at 5.0 there, too


def test_results_that_are_read_at_home_count_with_their_way_back():
    tensors = [TensorSpec(i, 2, [4]) for i in range(4)]
    problem = build_problem("join", time_s=[[1.0, 1.0]] * 5, tensors=tensors, memory_bytes=[None, None])
    found = simulate_assisted(problem, [0] * 5, movable=everything(problem), **ALL)
    # Only op 3 gains: it ends at 1.0 and is back at 3.0 instead of 4.0; op 2 would be back at 4.0 instead of 3.0.
    assert [s.op for s in found.steals] == [3] and found.step_time_s == 4.0


def test_memory_must_fit():
    problem = queue(4, memory_bytes=(100, 9), temporary_bytes=[10] * 4)
    found = simulate_assisted(problem, [0] * 4, movable=everything(problem), **ALL)
    assert found.steals == () and found.timeline.feasible
    problem = queue(4, memory_bytes=(100, 10), temporary_bytes=[10] * 4)
    found = simulate_assisted(problem, [0] * 4, movable=everything(problem), **ALL)
    # What moved once counts for good, so that there is room for one op only.
    assert len(found.steals) == 1 and found.timeline.feasible and found.timeline.peak_memory_bytes.tolist() == [10, 10]


def training(resident=0):
    """Returns three groups of a forward, a backward and an update op on one device; forward outputs of 1 byte are saved."""
    tensors = []
    for g in range(3):
        tensors += [TensorSpec(3 * g, 1, [3 * g + 1]), TensorSpec(3 * g + 1, 0, [3 * g + 2])]
    return build_problem(
        "training",
        time_s=[[4.0, 4.0], [4.0, 4.0], [1.0, 1.0]] * 3,
        tensors=tensors,
        memory_bytes=[None, None],
        group=[0, 0, 0, 1, 1, 1, 2, 2, 2],
        phase=[FORWARD, BACKWARD, UPDATE] * 3,
        resident_bytes=[resident] * 3,
    )


def test_backward_follows_and_the_update_stays():
    problem = training()
    found = simulate_assisted(problem, [0] * 3, movable=everything(problem), **ALL)
    first = found.steals[0]
    assert problem.op_phase[first.op] == FORWARD and first.followers == (first.op + 1,)
    assert found.timeline.device_of_op[[first.op, first.op + 1, first.op + 2]].tolist() == [1, 1, 0]
    assert (found.timeline.device_of_op[2::3] == 0).all()
    assert found.step_time_s < simulate_assisted(problem, [0] * 3, movable=~everything(problem)).step_time_s


def test_parameters_stay_unless_their_way_is_paid():
    problem = training(resident=2)
    assert simulate_assisted(problem, [0] * 3, movable=everything(problem), **ALL).steals == ()
    found = simulate_assisted(problem, [0] * 3, movable=everything(problem), move_weights=True, **ALL)
    first = found.steals[0]
    group = problem.op_group[first.op]
    assert found.weight_transfers[0] == (group, 0, 1, 0.0, 2.0)  # 2 bytes at a byte a second
    line = found.timeline
    assert line.start_s[first.op] == 2.0
    back = line.transfer_source == 1
    assert (line.transfer_end_s - line.transfer_start_s)[back][0] == 2.0  # the gradient goes home
    # On the other device: weights, the saved output, and the gradient from the backward's start on.
    assert line.peak_memory_bytes[1] == 5 and line.peak_memory_bytes[0] >= 6


def test_bad_arguments():
    problem = queue()
    with pytest.raises(InputError, match="movable must hold true or false for each of 4 groups"):
        simulate_assisted(problem, [0] * 4, movable=[True])
    with pytest.raises(InputError, match="margin_s"):
        simulate_assisted(problem, [0] * 4, movable=everything(problem), margin_s=-1.0)
    with pytest.raises(InputError, match="4 x 2 seconds"):
        simulate_assisted(problem, [0] * 4, movable=everything(problem), actual_time_s=np.ones(4))
    plan = make_plan(problem, [0] * 4, planner="hand", order=[[0, 1, 2, 3], []])
    with pytest.raises(InputError, match="has an order"):
        simulate_assisted(problem, plan, movable=everything(problem))
    plan = make_plan(problem, [0] * 4, planner="hand", priority=[4.0, 3.0, 2.0, 1.0])
    assert simulate_assisted(problem, plan, movable=~everything(problem)).step_time_s == 4.0
