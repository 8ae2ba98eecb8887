"""Marks on the time line of a device: each mark ends the interval of what ran before and begins that of its own key.

Every moment of a step so belongs to some key, and the times of all keys add up to the step. On a processor that does the work
itself a mark is a clock reading: the thread's processor time where torch runs on one thread, which other programs cannot
lengthen, else wall time. On an accelerator it is an event in the stream; work is queued behind a sleeping kernel, so
that the device never waits for the host and the intervals are device time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch

from rlplace.runtime.environment import read_clock

Key = Hashable

_QUEUED_MARKS = 100  # the launch queue holds about 1,000 entries; a mark stands for an event and a few kernels
_SLEEP_CYCLES = 20_000_000  # above 10 ms at 1.4 to 2 GHz: longer than the host needs to issue what is queued


@dataclass
class HostMarks:
    """Marks by the host's clock, for devices on which an op is done when its call returns.

    Attributes:
        clock: Seconds.
    """

    clock: Callable[[], float] = time.perf_counter
    keys: list[Key] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def mark(self, key: Key) -> None:
        """Begins the interval of `key`."""
        self.keys.append(key)
        self.times.append(self.clock())

    def finish(self) -> tuple[dict[Key, float], dict[Key, float] | None]:
        """Ends the last interval and forgets all marks.

        Returns:
            Seconds by key, and None: the host does the work itself.
        """
        self.mark(None)
        seconds = _sums(self.keys, self.times)
        self.keys, self.times = [], []
        return seconds, None


@dataclass
class CudaMarks:
    """Marks by events in the current stream of a CUDA device.

    Attributes:
        device: The device.
    """

    device: torch.device
    keys: list[Key] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    events: list[Any] = field(default_factory=list)
    _spare: list[Any] = field(default_factory=list)
    _queued: int = 0

    def mark(self, key: Key) -> None:
        """Begins the interval of `key`; now and then lets the device drain and sleep first, which belongs to no key."""
        if self._queued >= _QUEUED_MARKS or not self.events:
            if self.events:
                self._record(_PAUSE)
            read_clock(self.device)
            with torch.cuda.device(self.device):
                torch.cuda._sleep(_SLEEP_CYCLES)
            self._queued = 0
        self._record(key)

    def _record(self, key: Key) -> None:
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        self.keys.append(key)
        self.events.append(event)
        self.times.append(time.perf_counter())
        self._queued += 1

    def finish(self) -> tuple[dict[Key, float], dict[Key, float] | None]:
        """Ends the last interval, waits for the device and forgets all marks.

        Returns:
            Device seconds by key, and the host's seconds to issue each.
        """
        self._record(None)
        read_clock(self.device)
        elapsed = [0.0]
        for before, after in zip(self.events, self.events[1:], strict=False):
            elapsed.append(elapsed[-1] + before.elapsed_time(after) / 1e3)
        device, host = _sums(self.keys, elapsed), _sums(self.keys, self.times)
        self._spare += self.events
        self.keys, self.times, self.events, self._queued = [], [], [], 0
        device.pop(_PAUSE, None)
        host.pop(_PAUSE, None)
        return device, host


Marks = HostMarks | CudaMarks

_PAUSE = ("rlplace", "pause")


def marks_on(device: torch.device) -> Marks:
    """The marks that suit a device."""
    if device.type == "cuda":
        return CudaMarks(device)
    return HostMarks(time.thread_time if torch.get_num_threads() == 1 else time.perf_counter)


def mark_cost_s(marks: Marks) -> float:
    """What a mark on the host's clock adds to the interval that it ends; 0 for events, which the device passes for free."""
    if isinstance(marks, CudaMarks):
        return 0.0
    count = 2000
    for _ in range(count):
        marks.mark("cost")
    return marks.finish()[0]["cost"] / count


def _sums(keys: list[Key], times: list[float]) -> dict[Key, float]:
    sums: dict[Key, float] = {}
    for key, begin, end in zip(keys, times, times[1:], strict=False):
        sums[key] = sums.get(key, 0.0) + (end - begin)
    return sums
