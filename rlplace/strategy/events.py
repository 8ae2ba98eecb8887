"""What happens when in a step, as the block executor tells it: for pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rlplace.strategy.meshes import Lane

ACTIONS = "FBIW"
"""Kinds of events that are actions, see `rlplace.actions`."""

EXCHANGE, TIES, UPDATE, SEND = "exchange", "ties", "update", "send"
"""Kinds of events beside actions: gradients that are waited for; tied gradients that are summed;
updates; a tensor on its way to the next stage."""


@dataclass(frozen=True)
class Event:
    """Something that the devices of a place do together.

    Attributes:
        lane: Number of the lane; -1 of what all lanes of a place do.
        place: Number of the place.
        kind: One of `ACTIONS`, or of the words above.
        stage: Number of the stage, -1 where it is the place that does it.
        microbatch: Likewise.
        start_s: In the step.
        end_s: Likewise.
        pieces: For each block of the stage, in updates of the place, in model order its seconds of ops, and of collectives
            inside it; what is left of the time waits for parameters.
        target: Place that receives what is sent; -1 otherwise.
        size_bytes: What is sent.
    """

    lane: int
    place: int
    kind: str
    stage: int
    microbatch: int
    start_s: float
    end_s: float
    pieces: Sequence[tuple[float, float]] = ()
    target: int = -1
    size_bytes: float = 0.0


@dataclass(eq=False)
class Events:
    """Collects the events of a step, lane by lane.

    Attributes:
        lanes: As they begin.
        events: So far.
        memory: By lane and place what its devices hold all step long, and during and after each of its actions, see
            `rlplace.strategy.reference_memory.action_bytes`.
    """

    lanes: list[Lane] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    memory: dict[tuple[int, int], tuple[float, list[tuple[float, float]]]] = field(default_factory=dict)

    def begin(self, lane: Lane) -> None:
        """The events that follow are of this lane."""
        self.lanes.append(lane)

    def remember(self, place: int, held: float, actions: list[tuple[float, float]]) -> None:
        """Keeps the memory of a place in this lane."""
        self.memory[len(self.lanes) - 1, place] = held, actions

    def add(
        self,
        place: int,
        kind: str,
        stage: int,
        microbatch: int,
        start_s: float,
        end_s: float,
        pieces: Sequence[tuple[float, float]] = (),
        *,
        target: int = -1,
        size_bytes: float = 0.0,
    ) -> None:
        """Adds an event; of what is no action only one that takes time."""
        lane = -1 if kind in (TIES, UPDATE) else len(self.lanes) - 1
        if end_s > start_s or kind in ACTIONS:
            self.events.append(Event(lane, place, kind, stage, microbatch, start_s, end_s, pieces, target, size_bytes))
