"""Schedules: how the micro-batches of a step take turns. One record each, in the registry that everything else asks.

To add one, add its record here. If it is for chains of stages, `rlplace.actions` gets the list of its actions; if it
holds tasks back in a new way, `rlplace.simulator.stages` and its compiled twin `gates` get the rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rlplace.errors import InputError, unknown_name

NO_GATES, BACKWARD_GATES, FORWARD_GATES = range(3)
"""What holds tasks back (`rlplace.simulator.stages`; compiled code reads these numbers): nothing; a stage's backward waits for
all of its forward; a stage's forward waits until few enough micro-batches are in flight."""

ONE, LOOP, V = "one", "loop", "v"
"""Layouts of a chain of stages on devices: one stage on each, a loop (0 1 2 0 1 2; also of one lap), a v (0 1 2 2 1 0)."""


@dataclass(frozen=True)
class Schedule:
    """A schedule and what it can do.

    Attributes:
        name: In plans and on the command line.
        gates: `NO_GATES`, `BACKWARD_GATES` or `FORWARD_GATES`.
        backward_first: A device prefers backward to forward ops, and goes on with the pass (one micro-batch in one direction)
            that it is working on while one of its ops is ready.
        free: Runs any plan. False: the stages must form a chain, in the layout, and every device follows its list of actions
            (`rlplace.actions`).
        splits_backward: Runs the gradients of weights apart from the gradient of a stage's input, so needs a problem that has
            them apart, and stages that are not recomputed: each half would run the forward again.
        layout: `ONE`, `LOOP` or `V`: how torch wants a chain to sit on its devices.
        torch_class: The class of ``torch.distributed.pipelining`` that runs it; empty when torch has none.
    """

    name: str
    gates: int = NO_GATES
    backward_first: bool = False
    free: bool = True
    splits_backward: bool = False
    layout: str = ONE
    torch_class: str = ""

    @property
    def by_priority_alone(self) -> bool:
        """Whether nothing but priorities decides which ready op runs: its order can be replaced by priorities of one's own."""
        return self.free and self.gates == NO_GATES and not self.backward_first

    @property
    def limits_in_flight(self) -> bool:
        """Whether a stage holds fewer activations than all micro-batches have."""
        return self.gates == FORWARD_GATES

    def in_flight(self, stages_to_sink: int, microbatches: int) -> int:
        """Micro-batches whose activations a stage may hold at once; `stages_to_sink` counts the stage itself."""
        return min(stages_to_sink, microbatches) if self.limits_in_flight else microbatches


LIST, GPIPE, ONE_F_ONE_B = "list", "gpipe", "1f1b"
"""Names for who means one schedule: the default, GPipe's, and the free one that holds the fewest activations."""
LOOPED_BFS, ZERO_BUBBLE = "looped_bfs", "interleaved_zero_bubble"
"""GPipe's with several stages a device, and the split backward for any number of stages."""

_ALL = (
    Schedule(LIST),
    Schedule(GPIPE, gates=BACKWARD_GATES, torch_class="ScheduleGPipe"),
    Schedule(ONE_F_ONE_B, gates=FORWARD_GATES, backward_first=True, torch_class="Schedule1F1B"),
    Schedule(LOOPED_BFS, free=False, layout=LOOP, torch_class="ScheduleLoopedBFS"),
    Schedule("interleaved_1f1b", free=False, layout=LOOP, torch_class="ScheduleInterleaved1F1B"),
    Schedule(
        ZERO_BUBBLE,
        free=False,
        splits_backward=True,
        layout=LOOP,
        torch_class="ScheduleInterleavedZeroBubble",
    ),
    Schedule("zbv", free=False, splits_backward=True, layout=V, torch_class="ScheduleZBVZeroBubble"),
    Schedule("dualpipev", free=False, splits_backward=True, layout=V, torch_class="ScheduleDualPipeV"),
)
SCHEDULES: dict[str, Schedule] = {schedule.name: schedule for schedule in _ALL}
FREE_SCHEDULES = tuple(name for name, schedule in SCHEDULES.items() if schedule.free)
"""Those that run any plan."""
PIPELINE_SCHEDULES = tuple(name for name, schedule in SCHEDULES.items() if schedule.torch_class)
"""Those that torch has for chains of stages."""


def schedule_named(name: str, known: Iterable[str] | None = None, what: str = "schedule") -> Schedule:
    """The schedule of that name, one of `known` or of all.

    Raises:
        InputError: It is none of them.
    """
    known = tuple(SCHEDULES if known is None else known)
    if name not in known:
        raise unknown_name(what, name, known)
    return SCHEDULES[name]


def free_schedule(name: str) -> Schedule:
    """The schedule of that name, which runs any plan.

    Raises:
        InputError: There is none, or it is for chains.
    """
    found = schedule_named(name)
    if not found.free:
        raise InputError(
            f"schedule {name} is for chains of stages, which whole strategies have; placements take {', '.join(FREE_SCHEDULES)}"
        )
    return found


def stages_a_device(layout: str, device_of_stage: Sequence[int]) -> int:
    """Stages on each device of a chain that sits on its devices in this layout; 0: it does not."""
    devices = list(dict.fromkeys(device_of_stage))
    laps = len(device_of_stage) // max(1, len(devices))
    wanted = {ONE: devices, LOOP: devices * laps, V: devices + devices[::-1]}[layout]
    return laps if list(device_of_stage) == wanted else 0


def renamed_schedule(name: str, device_of_group: Sequence[int], stage_of_group: Sequence[int] | None) -> str:
    """The schedule that plan files of version 1 call `name`; their zero_bubble is `zbv` where the stages make a v."""
    if name == "interleaved":
        return "interleaved_1f1b"
    if name != "zero_bubble":
        return name
    place = dict(zip(device_of_group if stage_of_group is None else stage_of_group, device_of_group, strict=False))
    chain = [place[stage] for stage in sorted(place)]
    return "zbv" if stages_a_device(V, chain) and not stages_a_device(LOOP, chain) else ZERO_BUBBLE
