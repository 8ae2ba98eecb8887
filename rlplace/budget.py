"""The budget of a search: calls of what prices a plan, and seconds of wall time."""

from __future__ import annotations

import math
import time

FIRST_CALLS = 24
"""Calls in which planners that begin with the simplest plans mostly find one that fits."""


class Budget:
    """Calls and seconds that a search may use; the clock starts with the object.

    Until an answer is `secured`, `passed` allows a quarter of a second more and `FIRST_CALLS`: a feasible plan a little late is
    worth more than an error in time.

    Attributes:
        calls: Calls allowed; inf: no limit.
        used: Calls made.
        seconds: Seconds allowed from the start of the clock; inf: no limit.
        end_s: Moment on the monotonic clock at which they are over.
        secured: Whether a feasible answer is known.
    """

    def __init__(self, calls: float | None = None, seconds: float | None = None) -> None:
        self.calls = math.inf if calls is None else calls
        self.used = 0
        self.secured = False
        self.start_clock(math.inf if seconds is None else seconds)

    def start_clock(self, seconds: float) -> None:
        """Allows this many seconds from now on."""
        self.seconds = seconds
        self.end_s = time.monotonic() + seconds

    def left_s(self) -> float:
        """Returns the seconds left, negative when they are over; inf without a limit."""
        return self.end_s - time.monotonic()

    def passed(self) -> bool:
        """Returns whether the time is up."""
        if self.end_s == math.inf:
            return False
        late = self.secured or self.used >= FIRST_CALLS
        return late and time.monotonic() >= self.end_s + (0.0 if self.secured else 0.25)

    def share(self) -> float:
        """Returns the share of the budget that is used, the larger of calls and seconds; 1 or more: nothing is left."""
        calls = self.used / self.calls if self.calls else 1.0
        if self.end_s == math.inf:
            return calls
        return max(calls, 1.0 - self.left_s() / self.seconds if self.seconds > 0.0 else 1.0)
