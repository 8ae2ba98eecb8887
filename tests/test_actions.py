"""The action lists of pipeline schedules: equal to torch's own, and exact against the closed forms when replayed."""

import logging
import warnings
from unittest import mock

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pipeline_theory import bubble_s, in_flight

from rlplace.actions import Action, pipeline_actions, stage_layout
from rlplace.errors import InputError

CASES = {
    ("gpipe", "loop"): ("ScheduleGPipe", (1,)),
    ("1f1b", "loop"): ("Schedule1F1B", (1,)),
    ("interleaved", "loop"): ("ScheduleInterleaved1F1B", (1, 2, 3)),
    ("zero_bubble", "loop"): ("ScheduleInterleavedZeroBubble", (1, 2, 3)),
    ("zero_bubble", "v"): ("ScheduleZBVZeroBubble", (2,)),
}


def torch_actions(name, devices, stages, microbatches):
    """Torch's own lists; a ValueError where torch refuses."""
    from torch.distributed.pipelining import schedules
    from torch.distributed.pipelining.stage import PipelineStage

    stage = mock.create_autospec(PipelineStage, instance=True)
    stage.group_rank, stage.group_size, stage.num_stages, stage.submod = 0, devices, devices * stages, None
    schedule_class = getattr(schedules, name)
    single = issubclass(schedule_class, schedules.PipelineScheduleSingle)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        schedule = schedule_class(stage if single else [stage] * stages, microbatches)
    rows = [
        [a for a in schedule.pipeline_order[rank] if a is not None and a.microbatch_index is not None]
        for rank in range(devices)
    ]
    if name == "Schedule1F1B":  # what torch shows for its last stage starts at micro-batch 1; what it runs starts at 0
        shift = rows[-1][0].microbatch_index
        rows[-1] = [
            a._replace(microbatch_index=a.microbatch_index - (shift if a.computation_type.value == "F" else 0))
            for a in rows[-1]
        ]
    return [[Action(a.stage_index, a.computation_type.value, a.microbatch_index) for a in row] for row in rows]


@pytest.mark.parametrize(("schedule", "layout"), CASES)
def test_lists_equal_torch(schedule, layout, caplog):
    caplog.set_level(logging.CRITICAL)
    name, stage_counts = CASES[schedule, layout]
    compared = refused = 0
    for devices in (1, 2, 3, 4, 5):
        for stages in stage_counts:
            for microbatches in (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15):
                try:
                    expected = torch_actions(name, devices, stages, microbatches)
                except ValueError:
                    with pytest.raises(InputError, match=r"; use \d+"):
                        pipeline_actions(schedule, devices, stages, microbatches, layout=layout)
                    refused += 1
                    continue
                assert pipeline_actions(schedule, devices, stages, microbatches, layout=layout) == expected
                compared += 1
    assert compared > 40
    assert (refused > 0) == (schedule in ("1f1b", "interleaved") or (schedule, layout) == ("zero_bubble", "loop"))


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
                if kind == "F":
                    needs = [(stage - 1, "F", n)] if stage else []
                elif kind == "W":
                    needs = [(stage, "I", n)]
                else:
                    needs = [(stage, "F", n)] + ([(stage + 1, kind, n)] if stage + 1 < num_stages else [])
                if not all(need in end for need in needs):
                    break
                clock[device] = max([clock[device], *(end[need] for need in needs)]) + seconds[kind]
                assert queue[-1] not in end
                end[queue.pop()] = clock[device]
                held[device] += {"F": 1, "I": 0}.get(kind, -1)
                peak[device] = max(peak[device], held[device])
                moved = True
        assert moved, "deadlock"
    assert held == [0] * len(lists)
    return max(clock), peak


@settings(max_examples=300)
@given(
    case=st.sampled_from(sorted(CASES)),
    devices=st.integers(1, 6),
    stages=st.integers(1, 4),
    microbatches=st.integers(1, 16),
    times=st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9)),
)
def test_replay_gives_closed_forms(case, devices, stages, microbatches, times):
    schedule, layout = case
    if schedule in ("gpipe", "1f1b"):
        stages = 1
    if layout == "v":
        stages, microbatches, times = 2, max(microbatches, 2 * devices), times[:1] * 3
    elif schedule == "zero_bubble":
        microbatches = max(microbatches, devices)
    try:
        lists = pipeline_actions(schedule, devices, stages, microbatches, layout=layout)
    except InputError:
        assume(False)
    forward, inputs, weights = times
    step, peak = replay(lists, devices * stages, *times)
    bubble = bubble_s(
        schedule, devices, stages, microbatches, forward_s=forward, input_s=inputs, weight_s=weights, layout=layout
    )
    assert step == microbatches * stages * (forward + inputs + weights) + bubble
    assert peak == [in_flight(schedule, devices, stages, microbatches, device, layout=layout) for device in range(devices)]


def test_published_figures():
    """Four devices, eight micro-batches, F = I = W = 1 for a device's whole share, as in the papers' tables."""
    third = {"forward_s": 1.0, "input_s": 1.0, "weight_s": 1.0}
    assert bubble_s("gpipe", 4, 1, 8, **third) == bubble_s("1f1b", 4, 1, 8, **third) == 9
    halves = dict.fromkeys(third, 0.5)
    assert bubble_s("interleaved", 4, 2, 8, **halves) == 9 / 2
    assert bubble_s("zero_bubble", 4, 1, 8, **third) == 9 / 3  # a third of 1F1B's
    assert bubble_s("zero_bubble", 4, 2, 8, **halves, layout="v") == 9 / 6
    assert in_flight("1f1b", 4, 1, 8, 0) == in_flight("zero_bubble", 4, 1, 8, 0) == 4
    assert in_flight("interleaved", 4, 2, 8, 0) / 2 == 4 * (1 + 3 / (4 * 2))  # p (1 + (p - 1) / (p v))


def test_refusals_name_the_nearest_number():
    with pytest.raises(InputError, match=r"11 micro-batches on 4 devices do not make 2 equal rounds; use 12$"):
        pipeline_actions("interleaved", 4, 2, 11)
    with pytest.raises(InputError, match=r"found 3 for 4; use 4,"):
        pipeline_actions("1f1b", 4, 1, 3)
    with pytest.raises(InputError, match="one stage on each device, found 2"):
        pipeline_actions("gpipe", 4, 2, 8)
    with pytest.raises(InputError, match="needs 2 stages on each device, found 3"):
        pipeline_actions("zero_bubble", 4, 3, 8, layout="v")
    with pytest.raises(InputError, match="found a v"):
        pipeline_actions("interleaved", 4, 2, 8, layout="v")
    with pytest.raises(InputError, match="did you mean 'zero_bubble'"):
        pipeline_actions("zero-bubble", 4, 2, 8)
    with pytest.raises(InputError, match="whole number from 1 up, found True"):
        pipeline_actions("gpipe", 4, 1, True)
    with pytest.raises(InputError, match="unknown stage layout 'w'"):
        pipeline_actions("gpipe", 4, 1, 4, layout="w")


@pytest.mark.parametrize(
    ("stages", "schedule", "kind", "devices", "laps"),
    [
        ([2, 0, 1], "1f1b", "loop", (2, 0, 1), 1),
        ([2, 0, 1], "gpipe", "loop", (2, 0, 1), 1),
        ([3], "zero_bubble", "loop", (3,), 1),
        ([2, 0, 2, 0, 2, 0], "interleaved", "loop", (2, 0), 3),
        ([1, 0, 1, 0], "zero_bubble", "loop", (1, 0), 2),
        ([1, 0, 0, 1], "zero_bubble", "v", (1, 0), 2),
        ([5, 5], "zero_bubble", "loop", (5,), 2),
    ],
)
def test_layouts(stages, schedule, kind, devices, laps):
    layout = stage_layout(stages, schedule)
    assert (layout.kind, layout.devices, layout.stages_per_device) == (kind, devices, laps)
    actions = layout.actions(schedule, 8)
    assert set(actions) == set(devices)
    for device, row in actions.items():
        assert {action.stage for action in row} == {stage for stage, d in enumerate(stages) if d == device}


@pytest.mark.parametrize(
    ("stages", "schedule", "wanted"),
    [
        ([0, 1, 0, 1], "1f1b", "it needs one stage on each device; "),
        ([0, 1, 1, 0], "interleaved", "one stage on each device or a loop"),
        ([0, 1, 1], "zero_bubble", "a v"),
        ([0, 1, 2, 0, 2, 1], "zero_bubble", "devices 0 1 2 0 2 1: "),
        ([0, 1, 1, 0, 0, 1], "zero_bubble", "a loop"),
        ([], "gpipe", r"\(none\)"),
    ],
)
def test_layouts_that_do_not_run(stages, schedule, wanted):
    with pytest.raises(InputError, match=wanted):
        stage_layout(stages, schedule)
