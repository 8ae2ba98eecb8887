"""Schedules: how the micro-batches of a step take turns in a chain of stages. One record each, in the registry that everything
else asks.

To add one, add its record here; `rlplace.plan.actions` gets the list of its actions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlplace.errors import unknown_name

ONE, LOOP, V = "one", "loop", "v"
"""Layouts of a chain of stages on devices: one stage on each, a loop (0 1 2 0 1 2; also of one lap), a v (0 1 2 2 1 0)."""

ALL, DEPTH, AHEAD, PLACES = "all", "depth", "ahead", "places"
"""Micro-batches that a stage holds at once: all; as many as there are stages from it on; those ahead of the first backward in
interleaved 1F1B (`rlplace.plan.actions`); one more than devices."""


@dataclass(frozen=True)
class Schedule:
    """A schedule and what it can do; every device follows its list of actions (`rlplace.plan.actions`).

    Attributes:
        name: Its name in plans and on the command line.
        torch_class: The class of ``torch.distributed.pipelining`` that runs it.
        splits_backward: Runs the gradients of weights apart from the gradient of a stage's input, so needs stages that are not
            recomputed: each half would run the forward again.
        layout: `ONE`, `LOOP` or `V`: the layout of a chain on its devices that torch expects.
        holds: `ALL`, `DEPTH`, `AHEAD` or `PLACES`: micro-batches that a stage holds at once.
        unfilled: About which part of a forward and backward of one stage each further device waits for in a step.
    """

    name: str
    torch_class: str
    splits_backward: bool = False
    layout: str = ONE
    holds: str = PLACES
    unfilled: float = 1.0

    def in_flight(self, stages: int, places: int, count: int) -> list[int]:
        """Returns about how many of `count` micro-batches each stage of a chain on so many devices holds at once."""
        if self.holds == DEPTH:
            return [min(count, stages - stage) for stage in range(stages)]
        if self.holds == AHEAD:
            laps = stages // places
            held = [(laps - 1) * places + 2 * (places - 1 - stage % places) + 1 for stage in range(stages)]
            return [min(count, -(-own // laps)) for own in held]
        return [count if self.holds == ALL else min(count, places + 1)] * stages


GPIPE, ONE_F_ONE_B = "gpipe", "1f1b"
"""Single schedules by name: GPipe's, and the one that holds the fewest activations."""
LOOPED_BFS, ZERO_BUBBLE, ZBV = "looped_bfs", "interleaved_zero_bubble", "zbv"
"""GPipe's with several stages a device, and the split backward for any number of stages and for two a device."""

PLAINEST = {ONE: GPIPE, LOOP: LOOPED_BFS, V: ZBV}
"""By layout a schedule that runs any number of micro-batches."""

_ALL = (
    Schedule(GPIPE, "ScheduleGPipe", holds=ALL),
    Schedule(ONE_F_ONE_B, "Schedule1F1B", holds=DEPTH),
    Schedule(LOOPED_BFS, "ScheduleLoopedBFS", layout=LOOP, holds=ALL),
    Schedule("interleaved_1f1b", "ScheduleInterleaved1F1B", layout=LOOP, holds=AHEAD),
    Schedule(ZERO_BUBBLE, "ScheduleInterleavedZeroBubble", splits_backward=True, layout=LOOP, unfilled=0.75),
    Schedule(ZBV, "ScheduleZBVZeroBubble", splits_backward=True, layout=V, unfilled=0.6),
    Schedule("dualpipev", "ScheduleDualPipeV", splits_backward=True, layout=V, unfilled=0.6),
)
SCHEDULES: dict[str, Schedule] = {schedule.name: schedule for schedule in _ALL}


def schedule_named(name: str) -> Schedule:
    """Returns the schedule of that name.

    Raises:
        InputError: There is no schedule of that name.
    """
    if name not in SCHEDULES:
        raise unknown_name("schedule", name, SCHEDULES)
    return SCHEDULES[name]


def stages_a_device(layout: str, device_of_stage: Sequence[int]) -> int:
    """Returns stages on each device of a chain in this layout; 0 where the chain has another layout."""
    devices = list(dict.fromkeys(device_of_stage))
    laps = len(device_of_stage) // max(1, len(devices))
    wanted = {ONE: devices, LOOP: devices * laps, V: devices + devices[::-1]}[layout]
    return laps if list(device_of_stage) == wanted else 0
