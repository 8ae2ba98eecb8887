"""The action lists of pipeline schedules: equal to torch's own, and exact against the closed forms when replayed."""

import functools
import logging
import warnings
from unittest import mock

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rlplace.errors import InputError
from rlplace.plan.actions import Action, chain_actions, pipeline_actions
from rlplace.plan.schedule import SCHEDULES
from tests.pipeline_theory import bubble_s, in_flight

STAGES = {
    "gpipe": (1,),
    "1f1b": (1,),
    "looped_bfs": (1, 2, 3),
    "interleaved_1f1b": (1, 2, 3),
    "interleaved_zero_bubble": (1, 2, 3),
    "zbv": (2,),
    "dualpipev": (2,),
}


@functools.cache
def stage_like():
    from torch.distributed.pipelining.stage import PipelineStage

    return mock.create_autospec(PipelineStage, instance=True)


def torch_actions(name, devices, stages, microbatches):
    """Torch's own lists; a ValueError where torch refuses."""
    from torch.distributed.pipelining import schedules

    stage = stage_like()
    stage.group_rank, stage.group_size, stage.num_stages, stage.submod = 0, devices, devices * stages, None
    schedule_class = getattr(schedules, name)
    single = issubclass(schedule_class, schedules.PipelineScheduleSingle)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        schedule = schedule_class(stage if single else [stage] * stages, microbatches)
    rows = [
        [part for a in schedule.pipeline_order[rank] if a is not None for part in a.sub_actions or (a,)]  # OVERLAP_F_B is two
        for rank in range(devices)
    ]
    rows = [[a for a in row if a.microbatch_index is not None] for row in rows]
    if name == "Schedule1F1B":  # what torch shows for its last stage starts at micro-batch 1; what it runs starts at 0
        shift = rows[-1][0].microbatch_index
        rows[-1] = [
            a._replace(microbatch_index=a.microbatch_index - (shift if a.computation_type.value == "F" else 0))
            for a in rows[-1]
        ]
    return [[Action(a.stage_index, a.computation_type.value, a.microbatch_index) for a in row] for row in rows]


def test_what_a_pair_makes_is_sent_at_once(caplog):
    from torch.distributed.pipelining import ScheduleDualPipeV

    from rlplace.runtime.strategy.pipeline import send_at_once

    caplog.set_level(logging.CRITICAL)
    stage = stage_like()
    stage.group_rank, stage.group_size, stage.num_stages, stage.submod = 0, 3, 6, None
    schedule = ScheduleDualPipeV([stage] * 2, 8)
    send_at_once(schedule)
    sent = 0
    for actions in schedule.pipeline_order_with_comms.values():
        last = None
        for action in actions:
            assert "OVERLAP" not in str(action)
            last = action if action.is_compute_op else last
            if "SEND" in str(action):
                assert (last.stage_index, last.microbatch_index) == (action.stage_index, action.microbatch_index)
                assert action.computation_type.name == ("SEND_F" if last.computation_type.name == "FORWARD" else "SEND_B")
                sent += 1
    assert sent == 2 * 8 * 4  # both ways, eight micro-batches, four borders between unlike devices


@pytest.mark.parametrize("schedule", STAGES)
def test_lists_equal_torch(schedule, caplog):
    caplog.set_level(logging.CRITICAL)
    name = SCHEDULES[schedule].torch_class
    compared = refused = 0
    for devices in (1, 2, 3, 4, 5):
        for stages in STAGES[schedule]:
            for microbatches in (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15):
                try:
                    expected = torch_actions(name, devices, stages, microbatches)
                except ValueError:
                    with pytest.raises(InputError, match=r"; use \d+"):
                        pipeline_actions(schedule, devices, stages, microbatches)
                    refused += 1
                    continue
                assert pipeline_actions(schedule, devices, stages, microbatches) == expected
                compared += 1
    assert compared > (30 if schedule == "dualpipev" else 40)
    assert (refused > 0) == (schedule in ("1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "dualpipev"))


def replay(lists, num_stages, forward_s, input_s, weight_s):
    """Step time and most activations held per device, each device running its list in order and waiting where it must."""
    seconds = {"F": forward_s, "I": input_s, "W": weight_s, "B": input_s + weight_s}
    end, clock, held, peak = {}, [0] * len(lists), [0] * len(lists), [0] * len(lists)
    queues = [list(reversed(row)) for row in lists]
    while any(queues):
        moved = False
        for device, queue in enumerate(queues):
            while queue:
                stage, kind, n = queue[-1]
                passed_on = {"B": "I"}.get(kind, kind)  # the gradient of the input is there when either has run
                if kind == "F":
                    needs = [(stage - 1, "F", n)] if stage else []
                elif kind == "W":
                    needs = [(stage, "I", n)]
                else:
                    needs = [(stage, "F", n)] + ([(stage + 1, "I", n)] if stage + 1 < num_stages else [])
                if not all(need in end for need in needs):
                    break
                clock[device] = max([clock[device], *(end[need] for need in needs)]) + seconds[kind]
                assert (stage, passed_on, n) not in end
                queue.pop()
                end[stage, passed_on, n] = clock[device]
                held[device] += {"F": 1, "I": 0}.get(kind, -1)
                peak[device] = max(peak[device], held[device])
                moved = True
        assert moved, "deadlock"
    assert held == [0] * len(lists)
    return max(clock), peak


@settings(max_examples=300)
@given(
    schedule=st.sampled_from(sorted(STAGES)),
    devices=st.integers(1, 6),
    stages=st.integers(1, 4),
    microbatches=st.integers(1, 16),
    times=st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9)),
)
def test_replay_gives_closed_forms(schedule, devices, stages, microbatches, times):
    if len(STAGES[schedule]) == 1:
        (stages,) = STAGES[schedule]
    if SCHEDULES[schedule].layout == "v":
        microbatches, times = max(microbatches, 2 * devices), times[:1] * 3
    elif schedule == "interleaved_zero_bubble":
        microbatches = max(microbatches, devices)
    try:
        lists = pipeline_actions(schedule, devices, stages, microbatches)
    except InputError:
        assume(False)
    forward, inputs, weights = times
    step, peak = replay(lists, devices * stages, *times)
    bubble = bubble_s(schedule, devices, stages, microbatches, forward_s=forward, input_s=inputs, weight_s=weights)
    assert step == microbatches * stages * (forward + inputs + weights) + bubble
    assert peak == [in_flight(schedule, devices, stages, microbatches, device) for device in range(devices)]


def test_published_figures():
    """Four devices, eight micro-batches, F = I = W = 1 for a device's whole share, as in the papers' tables."""
    third = {"forward_s": 1.0, "input_s": 1.0, "weight_s": 1.0}
    assert bubble_s("gpipe", 4, 1, 8, **third) == bubble_s("1f1b", 4, 1, 8, **third) == 9
    halves = dict.fromkeys(third, 0.5)
    assert bubble_s("looped_bfs", 4, 2, 8, **halves) == bubble_s("interleaved_1f1b", 4, 2, 8, **halves) == 9 / 2
    assert bubble_s("interleaved_zero_bubble", 4, 1, 8, **third) == 9 / 3  # a third of 1F1B's
    assert bubble_s("zbv", 4, 2, 8, **halves) == bubble_s("dualpipev", 4, 2, 8, **halves) == 9 / 6
    assert in_flight("1f1b", 4, 1, 8, 0) == in_flight("interleaved_zero_bubble", 4, 1, 8, 0) == 4
    assert in_flight("interleaved_1f1b", 4, 2, 8, 0) / 2 == 4 * (1 + 3 / (4 * 2))  # p (1 + (p - 1) / (p v))
    assert in_flight("dualpipev", 4, 2, 8, 0) == 2 * 4 + 1  # DeepSeek's PP + 1, with PP = 2p stages


def test_refusals_name_the_nearest_number():
    with pytest.raises(InputError, match=r"11 micro-batches on 4 devices do not make 2 equal rounds; use 12$"):
        pipeline_actions("interleaved_1f1b", 4, 2, 11)
    with pytest.raises(InputError, match=r"found 3 for 4; use 4,"):
        pipeline_actions("1f1b", 4, 1, 3)
    with pytest.raises(InputError, match=r"found 7 for 8; use 8, or the schedule zbv"):
        pipeline_actions("dualpipev", 4, 2, 7)
    with pytest.raises(InputError, match="gpipe: stages per device: expected 1, found 2; use 1, or the schedule looped_bfs, "):
        pipeline_actions("gpipe", 4, 2, 8)
    with pytest.raises(InputError, match="zbv: stages per device: expected 2, found 3"):
        pipeline_actions("zbv", 4, 3, 8)
    with pytest.raises(InputError, match="did you mean 'interleaved_zero_bubble'"):
        pipeline_actions("zero_bubble", 4, 2, 8)
    with pytest.raises(InputError, match="whole number from 1 up, found True"):
        pipeline_actions("gpipe", 4, 1, True)


@pytest.mark.parametrize(
    ("stages", "schedule", "devices"),
    [
        ([2, 0, 1], "1f1b", [2, 0, 1]),
        ([2, 0, 1], "gpipe", [2, 0, 1]),
        ([3], "interleaved_zero_bubble", [3]),
        ([2, 0, 1], "looped_bfs", [2, 0, 1]),
        ([2, 0, 2, 0, 2, 0], "interleaved_1f1b", [2, 0]),
        ([1, 0, 1, 0], "interleaved_zero_bubble", [1, 0]),
        ([1, 0, 0, 1], "zbv", [1, 0]),
        ([1, 0, 0, 1], "dualpipev", [1, 0]),
        ([5, 5], "interleaved_zero_bubble", [5]),
        ([5, 5], "zbv", [5]),
    ],
)
def test_chains(stages, schedule, devices):
    actions = chain_actions(stages, schedule, 8)
    assert list(actions) == devices
    for device, row in actions.items():
        assert {action.stage for action in row} == {stage for stage, d in enumerate(stages) if d == device}


@pytest.mark.parametrize(
    ("stages", "schedule", "wanted"),
    [
        ([0, 1, 0, 1], "1f1b", "it needs one stage on each device; "),
        ([0, 1, 1, 0], "interleaved_1f1b", r"needs a loop \(0 1 2 0 1 2\); .* zbv or dualpipev$"),
        ([0, 1, 1], "zbv", "a v"),
        ([0, 1], "dualpipev", "use the schedule gpipe, 1f1b, looped_bfs, interleaved_1f1b or interleaved_zero_bubble$"),
        ([0, 1, 2, 0, 2, 1], "interleaved_zero_bubble", "devices 0 1 2 0 2 1: .* move stages$"),
        ([0, 1, 1, 0, 0, 1], "looped_bfs", "a loop"),
        ([], "gpipe", r"\(none\)"),
    ],
)
def test_chains_that_do_not_run(stages, schedule, wanted):
    with pytest.raises(InputError, match=wanted):
        chain_actions(stages, schedule, 8)
