"""Collectives by hand: they start together, hold their channels, occupy no device."""

import numpy as np
import pytest

from rlplace.errors import InputError
from rlplace.problem import BACKWARD, FORWARD, UPDATE, Links, problem_from_dict, problem_to_dict
from rlplace.problem.build import TensorSpec, build_problem
from rlplace.simulator.reference import simulate_reference

PAIR = Links(np.array([[0.0, 4.0], [4.0, 0.0]]), np.zeros((2, 2)), (((), (0,)), ((1,), ())))


def two_replicas(channels=(0, 1), time_s=3.0):
    """Two replicas of backward, all-reduce, update; the first backward takes 1 s, the second 2 s."""
    return build_problem(
        "replicas",
        time_s=[[1.0] * 2, [2.0] * 2, [time_s] * 2, [time_s] * 2, [0.5] * 2, [0.5] * 2],
        tensors=[TensorSpec(0, 0, [2]), TensorSpec(1, 0, [3]), TensorSpec(2, 0, [4]), TensorSpec(3, 0, [5])],
        memory_bytes=[None, None],
        group=[0, 1, 0, 1, 0, 1],
        phase=[BACKWARD, BACKWARD, UPDATE, UPDATE, UPDATE, UPDATE],
        links=PAIR,
        collectives=[([2, 3], channels)],
    )


def test_a_collective_starts_when_its_last_op_has_its_inputs_and_ends_all_of_them():
    line = simulate_reference(two_replicas(), [0, 1])
    assert line.start_s.tolist() == [0.0, 0.0, 2.0, 2.0, 5.0, 5.0]
    assert line.step_time_s == 5.5
    assert line.busy_s.tolist() == [1.5, 2.5]  # the collective occupies no device


def test_with_several_microbatches_it_runs_once_after_the_last():
    line = simulate_reference(two_replicas(), [0, 1], microbatches=3)
    assert line.step_time_s == 3 * 2.0 + 3.0 + 0.5
    assert line.task_op.tolist().count(2) == 1


def test_transfers_and_collectives_wait_for_each_other_on_a_channel():
    """An 8-byte tensor takes 2 s from device 0 to 1 on channel 0; the collective wants it too and queues behind."""

    def problem(channel):
        return build_problem(
            "channel",
            time_s=[[1.0] * 2, [3.0] * 2, [3.0] * 2, [1.0] * 2],
            tensors=[TensorSpec(0, 8, [3]), TensorSpec(0, 0, [1, 2])],
            memory_bytes=[None, None],
            group=[0, 0, 2, 1],
            resident_bytes=[0, 0, 0],
            phase=[FORWARD] * 4,
            links=PAIR,
            collectives=[([1, 2], [channel])],
        )

    line = simulate_reference(problem(0), [0, 1, 0])
    assert line.transfer_start_s.tolist() == [1.0]
    assert line.start_s.tolist() == [0.0, 3.0, 3.0, 3.0]
    assert simulate_reference(problem(1), [0, 1, 0]).start_s.tolist() == [0.0, 1.0, 1.0, 3.0]


def test_its_ops_take_memory_while_it_runs():
    problem = build_problem(
        "memory",
        time_s=[[1.0] * 2, [1.0] * 2, [1.0] * 2, [1.0] * 2],
        tensors=[TensorSpec(0, 5, [2]), TensorSpec(1, 7, [3])],
        memory_bytes=[None, None],
        group=[0, 1, 0, 1],
        temporary_bytes=[0, 0, 16, 32],
        phase=[FORWARD] * 4,
        links=PAIR,
        collectives=[([2, 3], [0, 1])],
    )
    line = simulate_reference(problem, [0, 1])
    assert line.peak_memory_bytes.tolist() == [21, 39]


def test_a_file_keeps_them():
    problem = two_replicas()
    again = problem_from_dict(problem_to_dict(problem))
    assert again.collectives == problem.collectives
    assert again.fingerprint == problem.fingerprint != two_replicas(channels=(0,)).fingerprint


@pytest.mark.parametrize(
    ("collectives", "message"),
    [
        ([([2, 9], [0])], "needs ops in"),
        ([([2, 2], [0])], "takes part twice"),
        ([([2, 3], [0]), ([3], [0])], "takes part twice"),
        ([([1, 3], [0])], "one phase"),
        ([([2, 3], [0, 0])], "distinct"),
        ([([], [0])], "needs ops in"),
    ],
)
def test_malformed_ones_are_refused(collectives, message):
    data = problem_to_dict(two_replicas())
    data["collectives"] = [{"ops": ops, "channels": channels} for ops, channels in collectives]
    with pytest.raises(InputError, match=message):
        problem_from_dict(data)


def test_membership_and_kind_go_together():
    data = problem_to_dict(two_replicas())
    del data["collectives"]
    with pytest.raises(InputError, match="go together"):
        problem_from_dict(data)


def test_a_cycle_through_a_collective_is_found():
    """Op 3 waits for the collective of ops 1 and 2, and op 2 for op 3."""
    with pytest.raises(InputError, match="cyclic"):
        build_problem(
            "cycle",
            time_s=[[1.0] * 2] * 4,
            tensors=[TensorSpec(0, 0, [1]), TensorSpec(1, 0, [3]), TensorSpec(3, 0, [2])],
            memory_bytes=[None, None],
            links=PAIR,
            collectives=[([1, 2], [0])],
        )
