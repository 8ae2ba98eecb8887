"""Micro-batches and schedules: textbook formulas, torch's action lists, and small cases worked out by hand."""

import dataclasses

import numpy as np
import pytest
from pipeline_theory import bubble_s, in_flight
from toys import pipeline_chain

from benchmarks.chain_order import schedule_order
from rlplace.actions import pipeline_actions
from rlplace.errors import InputError
from rlplace.problem import BACKWARD, FORWARD, UPDATE
from rlplace.problem.build import TensorSpec, build_problem
from rlplace.schedule import FREE_SCHEDULES
from rlplace.simulator import simulate
from rlplace.simulator.reference import simulate_reference
from rlplace.simulator.schedules import reference_priority

LAYOUTS = {
    "one": lambda p: list(range(p)),
    "loop": lambda p: list(range(p)) * 2,
    "v": lambda p: [*range(p), *reversed(range(p))],
}
CASES = [
    ("gpipe", "one", False),
    ("1f1b", "one", False),
    ("looped_bfs", "loop", False),
    ("interleaved_1f1b", "one", False),
    ("interleaved_1f1b", "loop", False),
    ("interleaved_zero_bubble", "one", True),
    ("interleaved_zero_bubble", "loop", True),
    ("zbv", "v", True),
    ("dualpipev", "v", True),
]


def under(problem, placed, schedule, microbatches, stages):
    """A step under a schedule: the executor's own, or the order of one for chains."""
    if schedule in FREE_SCHEDULES:
        return simulate_reference(problem, placed, microbatches=microbatches, schedule=schedule, stage_of_group=stages)
    devices, key = np.asarray(placed, dtype=np.int32), reference_priority(problem)
    order = schedule_order(problem, devices, schedule, microbatches, stages, key)
    return simulate_reference(problem, placed, microbatches=microbatches, order=order)


def run_chain(schedule, layout, split, devices, microbatches, **seconds):
    placed = LAYOUTS[layout](devices)
    problem = pipeline_chain(len(placed), devices, split=split, **seconds)
    stages = np.arange(len(placed), dtype=np.int32)
    return under(problem, placed, schedule, microbatches, stages)


@pytest.mark.parametrize(("schedule", "layout", "split"), CASES)
@pytest.mark.parametrize("devices", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_equal_stages_give_the_textbook_bubble_and_activations(schedule, layout, split, devices, rounds):
    microbatches, laps = devices * rounds, len(LAYOUTS[layout](devices)) // devices
    seconds = (
        {"forward_s": 1.0, "input_s": 1.0, "weight_s": 1.0} if split else {"forward_s": 2.0, "input_s": 1.0, "weight_s": 3.0}
    )
    work = microbatches * laps * sum(seconds.values())
    if schedule == "dualpipev" and microbatches < 2 * devices:
        with pytest.raises(InputError, match="at least as many micro-batches as stages"):
            run_chain(schedule, layout, split, devices, microbatches, **seconds)
        return
    line = run_chain(schedule, layout, split, devices, microbatches, **seconds)
    if layout == "v" and microbatches < 2 * devices:  # no closed form holds there
        assert line.step_time_s >= work
        return
    assert line.step_time_s == work + bubble_s(schedule, devices, laps, microbatches, **seconds)
    expected = [in_flight(schedule, devices, laps, microbatches, device) for device in range(devices)]
    assert line.peak_memory_bytes.tolist() == expected
    assert line.busy_s.tolist() == [work] * devices


@pytest.mark.parametrize(("schedule", "layout", "split"), CASES)
def test_torchs_action_lists_replayed_give_the_same_step(schedule, layout, split):
    """The lists are torch's: `test_actions.py` compares them with torch itself."""
    for devices in (2, 3, 4):
        for microbatches in (devices, 2 * devices, 4 * devices)[schedule == "dualpipev" :]:
            placed = LAYOUTS[layout](devices)
            problem = pipeline_chain(len(placed), devices, split=split, forward_s=1.0, input_s=1.5, weight_s=0.5)
            lists = pipeline_actions(schedule, devices, len(placed) // devices, microbatches)
            count = len(placed)
            start = {"F": [0], "B": [1, 2] if split else [1], "I": [1], "W": [2]}
            order = [[(k * count + a.stage, a.microbatch) for a in row for k in start[a.kind]] for row in lists]
            replayed = simulate_reference(problem, placed, order=order, microbatches=microbatches)
            stages = np.arange(count, dtype=np.int32)
            line = under(problem, placed, schedule, microbatches, stages)
            assert line.step_time_s == replayed.step_time_s
            assert line.peak_memory_bytes.tolist() == replayed.peak_memory_bytes.tolist()


def test_the_default_order_lets_the_second_stage_start_early():
    """Equal ops of different micro-batches must not be worked on breadth-first: that order alone would cost a fifth."""
    problem = pipeline_chain(8, 2, forward_s=1.0, input_s=1.0, weight_s=1.0)
    placed = [0, 0, 0, 0, 1, 1, 1, 1]
    line = simulate_reference(problem, placed, microbatches=8)
    depth_first = (8 + 1) * (4 * 1.0 + 4 * 2.0)
    assert line.step_time_s <= depth_first
    breadth_first = simulate_reference(problem, placed, microbatches=8, priority=reference_priority(problem))
    assert breadth_first.step_time_s > 1.15 * line.step_time_s


def gradient_problem():
    """A forward and a backward op whose gradient an update op on another device reads; the update's own group is elsewhere."""
    return build_problem(
        "gradient",
        time_s=[[1.0, 1.0], [1.0, 1.0], [0.5, 0.5]],
        tensors=[TensorSpec(0, 8, [1]), TensorSpec(1, 4, [2])],
        memory_bytes=[None, None],
        group=[0, 0, 1],
        phase=[FORWARD, BACKWARD, UPDATE],
        bandwidth_bytes_per_s=2.0,
        latency_s=0.25,
    )


def test_a_gradient_for_another_group_accumulates_and_is_sent_once():
    line = simulate_reference(gradient_problem(), [0, 1], microbatches=3)
    assert line.step_time_s == 3 * 2.0 + (0.25 + 4 / 2.0) + 0.5
    assert line.transfer_tensor.tolist() == [1]
    assert line.transfer_microbatch.tolist() == [-1]
    assert line.task_op.tolist() == [0, 1, 0, 1, 0, 1, 2]
    assert line.task_microbatch.tolist() == [0, 0, 1, 1, 2, 2, 2]
    # Backward of a micro-batch goes first, so one activation lives beside the accumulated gradient: 8 + 4.
    assert line.peak_memory_bytes.tolist() == [12, 4]


def test_an_owners_tensor_is_sent_once_and_stays_for_all_microbatches():
    problem = build_problem(
        "owner",
        time_s=[[1.0, 1.0]],
        tensors=[TensorSpec(None, 6, [0], owner=1)],
        memory_bytes=[None, None],
        group=[0],
        resident_bytes=[0, 6],
    )
    line = simulate_reference(problem, [0, 1], microbatches=4)
    assert line.step_time_s == 6.0 + 4 * 1.0
    assert line.transfer_tensor.tolist() == [0]
    assert line.peak_memory_bytes.tolist() == [6, 6]


@pytest.mark.parametrize("microbatches", [4, 8])
def test_1f1b_on_stages_of_many_tasks_is_torchs_list(microbatches):
    """A gradient that arrives during a forward pass must not cut it in two: the next stage waits for all of it."""
    rng = np.random.default_rng(0)
    problem = pipeline_chain(20, 4, latency_s=0.01)
    problem = dataclasses.replace(problem, time_s=np.repeat(rng.uniform(0.5, 1.5, 40), 4).reshape(40, 4))
    placed = np.repeat(np.arange(4), 5).astype(np.int32)
    order = schedule_order(problem, placed, "1f1b", microbatches, None, reference_priority(problem))
    line = simulate_reference(problem, placed, microbatches=microbatches, schedule="1f1b")
    listed = simulate_reference(problem, placed, microbatches=microbatches, order=order)
    assert line.step_time_s == pytest.approx(listed.step_time_s, rel=0.01)
    assert (line.peak_memory_bytes <= listed.peak_memory_bytes + 5).all()


def test_gpipe_holds_backward_until_all_forward_is_done():
    problem = pipeline_chain(1, 1, forward_s=1.0, input_s=1.0, weight_s=0.0)
    line = simulate_reference(problem, [0], microbatches=3, schedule="gpipe")
    assert line.start_s.tolist() == [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]


def test_stages_that_skip_and_meet_again_count_their_longest_path():
    """Forward: 0 feeds 1 and 3, 1 feeds 2, 2 feeds 3; the limits are 4, 3, 2, 1."""
    links = {(0, 1), (0, 3), (1, 2), (2, 3)}
    tensors = [TensorSpec(i, 1, [4 + i]) for i in range(4)]
    tensors += [TensorSpec(a, 0, [b]) for a, b in sorted(links)] + [TensorSpec(4 + b, 0, [4 + a]) for a, b in sorted(links)]
    problem = build_problem(
        "skip",
        time_s=[[1.0] * 4] * 4 + [[2.0] * 4] * 4,
        tensors=tensors,
        memory_bytes=[None] * 4,
        group=[0, 1, 2, 3] * 2,
        phase=[FORWARD] * 4 + [BACKWARD] * 4,
    )
    line = simulate_reference(problem, range(4), microbatches=8, schedule="1f1b")
    assert line.peak_memory_bytes.tolist() == [4, 3, 2, 1]
    assert line.step_time_s == (8 + 3) * 3.0


def test_stages_on_a_cycle_count_as_one():
    """Devices 0 and 1 feed each other, then device 2: limits 2, 2, 1."""
    tensors = [TensorSpec(i, 1, [8 - 1 - i]) for i in range(4)]
    tensors += [TensorSpec(i, 0, [i + 1]) for i in range(3)] + [TensorSpec(4 + i, 0, [5 + i]) for i in range(3)]
    problem = build_problem(
        "cycle",
        time_s=[[1.0] * 3] * 8,
        tensors=tensors,
        memory_bytes=[None] * 3,
        group=[0, 1, 2, 3, 3, 2, 1, 0],
        phase=[FORWARD] * 4 + [BACKWARD] * 4,
    )
    line = simulate_reference(problem, [0, 1, 0, 2], microbatches=6, schedule="1f1b")
    assert line.peak_memory_bytes.tolist() == [4, 2, 1]  # device 0 hosts two of the four groups


def test_one_microbatch_of_any_schedule_is_a_plain_step_on_a_chain():
    problem = pipeline_chain(4, 4, latency_s=0.125)
    plain = simulate_reference(problem, range(4))
    for schedule in ("gpipe", "1f1b"):
        assert simulate_reference(problem, range(4), schedule=schedule).step_time_s == plain.step_time_s


@pytest.mark.parametrize(
    ("placed", "stages", "schedule", "split", "message"),
    [
        ([0, 1, 0], None, "interleaved_1f1b", False, "no chain"),
        ([0, 1, 1], [0, 0, 1], "interleaved_1f1b", False, "another device than the rest of its stage"),
        ([0, 1, 0, 1], [0, 1, 2, 3], "interleaved_zero_bubble", False, "weight_gradients=True"),
        ([0, 1, 1, 0], [0, 1, 2, 3], "interleaved_1f1b", False, "a loop"),
    ],
)
def test_what_an_action_schedule_cannot_run_is_refused(placed, stages, schedule, split, message):
    problem = pipeline_chain(len(placed), 2, split=split)
    numbers = None if stages is None else np.array(stages, dtype=np.int32)
    with pytest.raises(InputError, match=message):
        under(problem, placed, schedule, 4, numbers)


def test_a_gradient_that_flows_forward_is_refused_by_action_schedules():
    problem = build_problem(
        "ahead",
        time_s=[[1.0] * 2] * 4,
        tensors=[TensorSpec(0, 0, [1, 3]), TensorSpec(1, 0, [2]), TensorSpec(3, 0, [2])],
        memory_bytes=[None] * 2,
        group=[0, 1, 1, 0],  # op 3, a backward of the first stage, feeds op 2, one of the second
        phase=[FORWARD, FORWARD, BACKWARD, BACKWARD],
    )
    with pytest.raises(InputError, match="'op3' sends a gradient to a later stage"):
        under(problem, [0, 1], "interleaved_1f1b", 2, None)
    for run in (simulate, simulate_reference):
        with pytest.raises(InputError, match="is for chains of stages, which whole strategies have"):
            run(problem, [0, 1], microbatches=2, schedule="interleaved_1f1b")


def test_ops_of_one_action_go_by_priority():
    problem = build_problem(
        "pair", time_s=[[1.0]] * 3, tensors=[TensorSpec(0, 0, [2])], memory_bytes=[None], group=[0, 0, 0], phase=[FORWARD] * 3
    )
    for priority, expected in (([3.0, 2.0, 1.0], [0, 1, 2]), ([1.0, 2.0, 3.0], [1, 0, 2]), ([2.0, 1.0, 3.0], [0, 2, 1])):
        assert schedule_order(problem, np.zeros(1, int), "interleaved_1f1b", 1, None, np.array(priority)) == [expected]


def test_a_forward_that_needs_its_own_backward_is_stuck_under_gpipe_and_says_so():
    problem = build_problem(
        "penalty",
        time_s=[[1.0]] * 3,
        tensors=[TensorSpec(0, 0, [1]), TensorSpec(1, 0, [2])],
        memory_bytes=[None],
        group=[0, 0, 0],
        phase=[FORWARD, BACKWARD, FORWARD],
    )
    for run in (simulate, simulate_reference):
        line = run(problem, [0], schedule="gpipe")
        assert line.step_time_s is None and "use the schedule list" in line.violations[0]
        assert run(problem, [0]).step_time_s == 3.0
