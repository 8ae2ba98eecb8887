"""Marks on the time line of a device: each mark ends the interval of what ran before and begins that of its own key.

Every moment of a step so belongs to some key, and the times of all keys add up to the step. On a processor that does the work
itself a mark is a clock reading, see `own_clock`. On an accelerator it is an event in the stream; work is queued behind a
sleeping kernel, so that the device never waits for the host and the intervals are device time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from rlplace.runtime.base.environment import own_clock, read_clock

Key = Hashable

_QUEUED_MARKS = 100  # the launch queue holds about 1,000 entries; a mark stands for an event and a few kernels
_CLOCK_HZ = 2e9  # of a sleeping kernel; slower clocks sleep longer
_LEAST_SLEEP_S, _SLEEP_FACTOR, _MOST_SLEEP_S = 0.01, 1.5, 0.2  # longer than the host took to issue as much, the step before
_PAUSE = ("rlplace", "pause")


class Marks:
    """Marks by the host's clock, and on a CUDA device by events in its current stream.

    Attributes:
        device: The device.
        clock: The host's, seconds; default `own_clock`.
        keys: Of the marks so far.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] | None = None) -> None:
        self.device = device
        self.clock = clock or own_clock(device)
        self.keys: list[Key] = []
        self._cuda = device.type == "cuda"
        self._times: list[float] = []
        self._events: list[Any] = []
        self._spare: list[Any] = []
        self._queued = 0
        self._issuing_s, self._longest_s, self._sleep_s = 0.0, 0.0, _LEAST_SLEEP_S

    def mark(self, key: Key) -> None:
        """Begins the interval of `key`; now and then lets a GPU drain and sleep first, which belongs to no key."""
        if self._cuda and (self._queued >= _QUEUED_MARKS or not self._events):
            if self._events:
                self._note(_PAUSE)
                self._longest_s = max(self._longest_s, self._times[-1] - self._issuing_s)
            read_clock(self.device)
            with torch.cuda.device(self.device):
                torch.cuda._sleep(int(self._sleep_s * _CLOCK_HZ))
            self._queued, self._issuing_s = 0, self.clock()
        self._note(key)

    def _note(self, key: Key) -> None:
        if self._cuda:
            event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self.device))
            self._events.append(event)
            self._queued += 1
        self.keys.append(key)
        self._times.append(self.clock())

    def finish(self) -> tuple[dict[Key, float], dict[Key, float] | None]:
        """Ends the last interval, waits for the device and forgets all marks.

        Returns:
            Device seconds by key, and the host's seconds to issue each; None where the host does the work itself.
        """
        self._note(None)
        self._longest_s = max(self._longest_s, self._times[-1] - self._issuing_s)
        self._sleep_s = min(max(_LEAST_SLEEP_S, _SLEEP_FACTOR * self._longest_s), _MOST_SLEEP_S)
        read_clock(self.device)
        sums = [_sums(self.keys, self._times)]
        if self._cuda:
            gaps = (before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(self._events))
            sums.insert(0, _sums(self.keys, list(itertools.accumulate(gaps, initial=0.0))))
        self._spare += self._events
        self.keys, self._times, self._events, self._queued, self._longest_s = [], [], [], 0, 0.0
        for seconds in sums:
            seconds.pop(_PAUSE, None)
        return sums[0], sums[1] if self._cuda else None

    def cost_s(self) -> float:
        """What a mark on the host's clock adds to the interval that it ends; 0 for events, which the device passes for free."""
        if self._cuda:
            return 0.0
        count = 2000
        for _ in range(count):
            self.mark("cost")
        return self.finish()[0]["cost"] / count


def _sums(keys: Sequence[Key], times: Sequence[float]) -> dict[Key, float]:
    sums: dict[Key, float] = {}
    for key, (begin, end) in zip(keys, itertools.pairwise(times), strict=False):
        sums[key] = sums.get(key, 0.0) + (end - begin)
    return sums
