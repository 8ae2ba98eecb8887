"""Timelines small enough to be worked out on paper, in both simulators, and collectives by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rlplace.cluster.links import Links
from rlplace.errors import InputError
from rlplace.problem import BACKWARD, FORWARD, UPDATE, problem_from_dict, problem_to_dict
from rlplace.problem.build import TensorSpec, build_problem
from rlplace.simulator import Timeline, default_priority, simulate
from rlplace.simulator.reference import reference_priority, simulate_reference


@pytest.fixture(params=[simulate, simulate_reference], ids=["fast", "reference"])
def run(request: Any) -> Callable[..., Timeline]:
    return request.param


def transfers(line: Timeline) -> list[tuple[int, int, int, float, float]]:
    """(tensor, source, destination, start, end) in order of start."""
    parts = (line.transfer_tensor, line.transfer_source, line.transfer_destination, line.transfer_start_s, line.transfer_end_s)
    return list(zip(*(part.tolist() for part in parts), strict=True))


def test_chain_over_two_devices(run: Callable[..., Timeline]) -> None:
    problem = build_problem(
        "chain",
        time_s=[[2.0, 9.0], [9.0, 1.0]],
        tensors=[TensorSpec(0, 4, [1]), TensorSpec(1, 1, [])],
        memory_bytes=[14, 29],
        resident_bytes=[10, 20],
        temporary_bytes=[0, 5],
        bandwidth_bytes_per_s=2.0,
        latency_s=1.0,
    )
    line = run(problem, [0, 1])
    assert line.start_s.tolist() == [0, 5] and line.end_s.tolist() == [2, 6]
    assert transfers(line) == [(0, 0, 1, 2, 5)]  # 1 s latency and 4 bytes at 2 bytes a second
    assert line.step_time_s == 6 and line.busy_s.tolist() == [2, 1]
    assert line.peak_memory_bytes.tolist() == [14, 30]  # 10 + 4; 20 + 4 (copy) + 1 (output) + 5 (temporary)
    assert not line.feasible and line.violations == ("gpu1 needs 30 bytes and has 29, 1 short",)


@pytest.mark.parametrize("priority", [default_priority, reference_priority])
def test_bottom_levels_count_devices_that_can_run_an_op(priority: Callable[..., Any]) -> None:
    """2 s in the mean of 1 and 3, before 4 s on the only device that runs it, before 6 s or, beside that, 1 s."""
    problem = build_problem(
        "levels", time_s=[[1.0, 3.0], [None, 4.0], [6.0, 6.0], [1.0, 1.0]], memory_bytes=[None] * 2,
        tensors=[TensorSpec(0, 1, [1]), TensorSpec(1, 1, [2, 3])],
    )  # fmt: skip
    assert priority(problem).tolist() == [12.0, 10.0, 6.0, 1.0]


def test_two_readers_on_a_device_share_a_copy(run: Callable[..., Timeline]) -> None:
    problem = build_problem(
        "readers", time_s=[[1.0] * 3] * 4, tensors=[TensorSpec(0, 2, [1, 2, 3])], memory_bytes=[None] * 3,
        bandwidth_bytes_per_s=2.0, latency_s=1.0,
    )  # fmt: skip
    line = run(problem, [0, 1, 1, 2])
    assert transfers(line) == [(0, 0, 1, 1, 3), (0, 0, 2, 1, 3)]
    assert line.peak_memory_bytes.tolist() == [2, 2, 2] and line.step_time_s == 5


def test_a_waiting_transfer_holds_back_later_ones_that_want_its_channels(run: Callable[..., Timeline]) -> None:
    channels = [[() for _ in range(4)] for _ in range(4)]
    channels[0][1], channels[0][2], channels[0][3] = (0, 1), (1, 2), (2,)
    problem = build_problem(
        "channels",
        time_s=[[1.0] * 4] * 4,
        tensors=[TensorSpec(0, 2, [1]), TensorSpec(0, 1, [2]), TensorSpec(0, 1, [3])],
        memory_bytes=[None] * 4,
        links=Links(np.ones((4, 4)), np.zeros((4, 4)), tuple(tuple(row) for row in channels)),
    )
    line = run(problem, [0, 1, 2, 3])
    # Channel 2 is free at 1 s, but the transfer to device 2 came first and wants it: device 3 waits for it.
    assert transfers(line) == [(0, 0, 1, 1, 3), (1, 0, 2, 3, 4), (2, 0, 3, 4, 5)]
    assert line.start_s.tolist() == [0, 3, 4, 5] and line.step_time_s == 6
    assert line.peak_memory_bytes.tolist() == [4, 2, 1, 1]


def test_transfers_that_one_event_lets_start_start_in_queue_order(run: Callable[..., Timeline]) -> None:
    channels = [[() for _ in range(4)] for _ in range(4)]
    channels[0][1], channels[0][2], channels[0][3] = (0, 1), (1,), (0,)
    problem = build_problem(
        "heirs",
        time_s=[[1.0] * 4] * 4,
        tensors=[TensorSpec(0, 2, [1]), TensorSpec(0, 1, [2]), TensorSpec(0, 1, [3])],
        memory_bytes=[None] * 4,
        links=Links(np.ones((4, 4)), np.zeros((4, 4)), tuple(tuple(row) for row in channels)),
    )
    line = run(problem, [0, 1, 2, 3])
    assert transfers(line) == [(0, 0, 1, 1, 3), (1, 0, 2, 3, 4), (2, 0, 3, 3, 4)]


def test_tasks_that_end_together_queue_in_op_order_then_transfers_in_tensor_order(run: Callable[..., Timeline]) -> None:
    """Ops 0, 1 and 2 end at 2 s on devices 2, 1 and 0; all send over one channel to device 3."""
    one = tuple(tuple((0,) for _ in range(4)) for _ in range(4))
    problem = build_problem(
        "ties",
        time_s=[[2.0] * 4] * 3 + [[1.0] * 4] * 3,
        tensors=[TensorSpec(2, 1, [5]), TensorSpec(0, 1, [4]), TensorSpec(1, 1, [3])],
        memory_bytes=[None] * 4,
        group=[0, 1, 2, 3, 3, 3],
        links=Links(np.ones((4, 4)), np.zeros((4, 4)), one),
    )
    line = run(problem, [2, 1, 0, 3])
    assert transfers(line) == [(1, 2, 3, 2, 3), (2, 1, 3, 3, 4), (0, 0, 3, 4, 5)]
    assert line.start_s.tolist() == [0, 0, 0, 4, 3, 5] and line.step_time_s == 6


def test_everything_that_ends_counts_before_devices_choose(run: Callable[..., Timeline]) -> None:
    problem = build_problem(
        "instant", time_s=[[1.0, 1.0]] * 4, tensors=[TensorSpec(0, 0, [3])], memory_bytes=[None, None], group=[0, 1, 1, 1]
    )
    line = run(problem, [0, 1], priority=np.array([0.0, 5.0, 1.0, 2.0]))
    # At 1 s op 1 ends, op 0 ends, its tensor moves in no time, and op 3 is ready when device 1 chooses.
    assert transfers(line) == [(0, 0, 1, 1, 1)]
    assert line.start_s.tolist() == [0, 0, 2, 1] and line.step_time_s == 3
    tied = run(problem, [0, 1], priority=np.zeros(4))
    assert tied.start_s.tolist() == [0, 0, 1, 2]  # ties go to the smaller op number


def test_owned_tensor_is_sent_at_the_start_and_freed_after_its_last_reader(run: Callable[..., Timeline]) -> None:
    problem = build_problem(
        "owner",
        time_s=[[1.0, 1.0]] * 3,
        tensors=[TensorSpec(None, 3, [0, 1], owner=0), TensorSpec(1, 0, [2])],
        memory_bytes=[None, None],
        resident_bytes=[3, 0],
        group=[0, 1, 1],
        temporary_bytes=[1, 0, 2],
        latency_s=1.0,
    )
    line = run(problem, [0, 1])
    assert transfers(line) == [(0, 0, 1, 0, 4)]
    assert line.start_s.tolist() == [0, 4, 5] and line.step_time_s == 6
    assert line.peak_memory_bytes.tolist() == [4, 3]  # nothing more at home; there 3 bytes until 5 s, then 2


def test_source_keeps_its_copy_until_the_send_ends(run: Callable[..., Timeline]) -> None:
    problem = build_problem(
        "send",
        time_s=[[1.0, 1.0]] * 4,
        tensors=[TensorSpec(0, 4, [1, 2]), TensorSpec(1, 2, [3]), TensorSpec(3, 8, [])],
        memory_bytes=[None, None],
    )
    line = run(problem, [0, 0, 1, 0])
    assert transfers(line) == [(0, 0, 1, 1, 5)]
    assert line.start_s.tolist() == [0, 1, 5, 2] and line.step_time_s == 6
    assert line.peak_memory_bytes.tolist() == [14, 4]  # 4 (still being sent) + 2 + 8 at 2 s
    alone = run(problem, [0, 0, 0, 0])
    assert alone.start_s.tolist() == [0, 1, 2, 3]  # equal levels of ops 1 and 2 are settled by the longer way of op 1
    assert alone.peak_memory_bytes.tolist() == [10, 0]  # op 2 was the last reader of the 4 bytes: 2 + 8 at 3 s


def test_order_makes_a_device_wait_for_the_next_op_of_its_list(run: Callable[..., Timeline]) -> None:
    problem = build_problem(
        "order", time_s=[[1.0, 1.0]] * 3, tensors=[TensorSpec(0, 2, [1])], memory_bytes=[None, None], group=[0, 1, 1]
    )
    waiting = run(problem, [0, 1], order=[[0], [1, 2]])
    assert waiting.start_s.tolist() == [0, 3, 4] and waiting.step_time_s == 5
    eager = run(problem, [0, 1], order=[[0], [2, 1]])
    assert eager.start_s.tolist() == [0, 3, 0] and eager.step_time_s == 4
    assert run(problem, [0, 0], order=[[1, 0, 2], []]).step_time_s is None


def test_a_transfer_that_starts_in_an_instant_allocates_before_tasks_of_the_instant_run(run: Callable[..., Timeline]) -> None:
    problem = build_problem(
        "instant",
        time_s=[[0.0, 1.0], [0.0, 0.0], [0.0, 3.0]],
        tensors=[TensorSpec(0, 5, [1]), TensorSpec(0, 7, [2])],
        memory_bytes=[None, None],
        group=[0, 1, 1],
        links=Links(np.ones((2, 2)), np.zeros((2, 2)), (((), (0,)), ((1,), ()))),
    )
    line = run(problem, [0, 1])
    # Tensor 0 moves over 0..5 s, tensor 1 over 5..12 s. At 5 s the copy of tensor 0 is still unread when tensor 1 starts.
    assert transfers(line) == [(0, 0, 1, 0, 5), (1, 0, 1, 5, 12)]
    assert line.start_s.tolist() == [0, 5, 12] and line.end_s.tolist() == [0, 5, 15]
    assert line.peak_memory_bytes.tolist() == [12, 12] and line.step_time_s == 15


def test_null_times_and_missing_links_have_no_step_time(run: Callable[..., Timeline]) -> None:
    problem = build_problem(
        "nowhere",
        time_s=[[1.0, 1.0], [1.0, np.nan]],
        tensors=[TensorSpec(0, 1, [1])],
        memory_bytes=[None, None],
        resident_bytes=[3, 4],
        bandwidth_bytes_per_s=[[1.0, 1.0], [0.0, 1.0]],
    )
    null = run(problem, [0, 1])
    assert null.step_time_s is None and not null.feasible and null.peak_memory_bytes.tolist() == [3, 4]
    assert null.violations == ("1 ops sit where they cannot run, first 'op1' on gpu1",)
    unlinked = run(problem, [1, 0])
    assert unlinked.step_time_s is None and "from gpu1 to gpu0" in unlinked.violations[0]
    assert np.isnan(unlinked.start_s).all() and unlinked.busy_s.tolist() == [0, 0]
    assert run(problem, [0, 0]).step_time_s == 2


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
