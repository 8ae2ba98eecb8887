"""Schedules: how the micro-batches of a step take turns. One record each, in the registry that everything else asks.

To add one, add its record here. If it is for chains of stages, `rlplace.actions` gets the list of its actions; if it
holds tasks back in a new way, `rlplace.simulator.stages` and its compiled twin `gates` get the rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rlplace.errors import unknown_name

NO_GATES, BACKWARD_GATES, FORWARD_GATES = range(3)
"""What holds tasks back (`rlplace.simulator.stages`; compiled code reads these numbers): nothing; a stage's backward waits for
all of its forward; a stage's forward waits until few enough micro-batches are in flight."""

ONE, LOOP, V = "one", "loop", "v"
"""Layouts of a chain of stages on devices: one stage on each, a loop (0 1 2 0 1 2), a v (0 1 2 2 1 0)."""


@dataclass(frozen=True)
class Schedule:
    """A schedule and what it can do.

    Attributes:
        name: In plans and on the command line.
        gates: `NO_GATES`, `BACKWARD_GATES` or `FORWARD_GATES`.
        backward_first: A device prefers backward to forward ops, and goes on with the pass (one micro-batch in one direction)
            that it is working on while one of its ops is ready.
        free: Runs any plan. False: the stages must form a chain, in one of the layouts of `torch_class`, and every device
            follows its list of actions (`rlplace.actions`).
        splits_backward: Runs the gradients of weights apart from the gradient of a stage's input, so needs a problem that has
            them apart, and stages that are not recomputed: each half would run the forward again.
        torch_class: By layout, the class of ``torch.distributed.pipelining`` that runs it; empty when torch has none.
        tried_stages: By layout, the stages a device that planners try.
    """

    name: str
    gates: int = NO_GATES
    backward_first: bool = False
    free: bool = True
    splits_backward: bool = False
    torch_class: Mapping[str, str] = field(default_factory=dict)
    tried_stages: Mapping[str, int] = field(default_factory=dict)

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

_ALL = (
    Schedule(LIST),
    Schedule(GPIPE, gates=BACKWARD_GATES, torch_class={ONE: "ScheduleGPipe"}),
    Schedule(ONE_F_ONE_B, gates=FORWARD_GATES, backward_first=True, torch_class={ONE: "Schedule1F1B"}),
    Schedule(
        "interleaved",
        free=False,
        torch_class={ONE: "ScheduleInterleaved1F1B", LOOP: "ScheduleInterleaved1F1B"},
        tried_stages={LOOP: 2},
    ),
    Schedule(
        "zero_bubble",
        free=False,
        splits_backward=True,
        torch_class={ONE: "ScheduleInterleavedZeroBubble", LOOP: "ScheduleInterleavedZeroBubble", V: "ScheduleZBVZeroBubble"},
        tried_stages={ONE: 1, V: 2},
    ),
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


def free_schedule(name: str, otherwise: str = ONE_F_ONE_B) -> str:
    """The schedule if it runs any plan, so that planners may choose devices for it; else `otherwise`."""
    return name if SCHEDULES[name].free else otherwise
