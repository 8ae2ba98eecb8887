"""What a process spent its time on, for measuring."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from rlplace.runtime.environment import read_clock


@dataclass(eq=False)
class Recorder:
    """Adds up seconds by kind while it is on.

    Kinds are ``"forward"``, ``"backward"``, ``"wait"`` (for other processes) and ``"update"`` (the optimizer).

    Attributes:
        device: Waited for at the end of every interval where work is queued on it.
        on: Whether to record; off, marks cost next to nothing.
        kind: Of what goes on.
    """

    device: torch.device
    on: bool = False
    kind: str | None = None
    _seconds: dict[str, float] = field(default_factory=dict)
    _since_s: float = 0.0

    def mark(self, kind: str | None) -> None:
        """Something of this kind begins now, unless it goes on; None: nothing does."""
        if not self.on or kind == self.kind:
            return
        now_s = read_clock(self.device)
        if self.kind is not None:
            self._seconds[self.kind] = self._seconds.get(self.kind, 0.0) + now_s - self._since_s
        self.kind, self._since_s = kind, now_s

    def take(self) -> dict[str, float]:
        """The seconds so far by kind, and forgets them."""
        taken, self._seconds = self._seconds, {}
        return taken
