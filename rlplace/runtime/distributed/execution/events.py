"""What a process did when: the intervals of a step, for reports that set them beside the simulator's."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from rlplace.runtime.distributed.execution import activity

KINDS = ("forward", "backward", "wait", "reduce", "update")
_TEXT = {"reduce": "the sum of gradients over ranks", "update": "the optimizer"}


@dataclass(frozen=True)
class Event:
    """An interval.

    Attributes:
        kind: One of `KINDS`: passes of segments; waiting for other processes; adding up gradients; the optimizer.
        start_s, end_s: By the host's monotonic clock.
        segment, microbatch: What a pass or wait is for, else -1.
    """

    kind: str
    start_s: float
    end_s: float
    segment: int = -1
    microbatch: int = -1

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end_s - self.start_s


@dataclass(eq=False)
class Recorder:
    """Collects events while it is on.

    Attributes:
        device: Waited for at the end of every interval where work is queued on it.
        on: Whether to record; off, intervals cost nothing.
        events: What was recorded.
    """

    device: torch.device
    on: bool = False
    events: list[Event] = field(default_factory=list)

    @contextmanager
    def interval(self, kind: str, segment: int = -1, microbatch: int = -1) -> Iterator[None]:
        """Records the time that its body takes, and notes it as what this process is doing."""
        if segment >= 0 and kind != "wait":
            activity.doing("the {} of segment {} (micro-batch {})", kind, segment, microbatch)
        elif kind in _TEXT:
            activity.doing(_TEXT[kind])
        if not self.on:
            yield
            return
        start = time.perf_counter()
        try:
            yield
        finally:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self.events.append(Event(kind, start, time.perf_counter(), segment, microbatch))

    def take(self) -> list[Event]:
        """The events so far, and forgets them."""
        taken, self.events = self.events, []
        return taken
