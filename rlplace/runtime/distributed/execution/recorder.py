"""What a process did when, for measuring."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from rlplace.runtime.environment import read_clock


@dataclass(frozen=True)
class Event:
    """An interval.

    Attributes:
        kind: ``"forward"``, ``"backward"``, ``"wait"`` (for other processes) or ``"update"`` (the optimizer).
        start_s, end_s: By the host's monotonic clock.
    """

    kind: str
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end_s - self.start_s


@dataclass(eq=False)
class Recorder:
    """Collects events while it is on.

    Attributes:
        device: Waited for at the end of every interval where work is queued on it.
        on: Whether to record; off, marks cost next to nothing.
        events: What was recorded.
    """

    device: torch.device
    on: bool = False
    events: list[Event] = field(default_factory=list)
    _kind: str | None = None
    _since_s: float = 0.0

    def mark(self, kind: str | None) -> None:
        """Something of this kind begins now, unless it goes on; None: nothing does."""
        if not self.on or kind == self._kind:
            return
        now_s = read_clock(self.device)
        if self._kind is not None:
            self.events.append(Event(self._kind, self._since_s, now_s))
        self._kind, self._since_s = kind, now_s

    def take(self) -> list[Event]:
        """The events so far, and forgets them."""
        taken, self.events = self.events, []
        return taken
