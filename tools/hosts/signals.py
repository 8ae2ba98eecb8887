"""Defers signals in sections where they would do harm."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator, Sequence
from types import FrameType

_ALL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def deferred_signals(numbers: Sequence[int] = _ALL) -> Iterator[None]:
    """Signals that arrive inside are delivered at the end; outside the main thread this does nothing.

    Args:
        numbers: Signals to defer; default SIGINT, SIGTERM and SIGHUP.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        arrived.append(number)

    before = {}
    for number in numbers:
        handler = signal.getsignal(number)
        if handler is not None and handler is not signal.SIG_IGN:  # None: not set from Python
            before[number] = signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for late in dict.fromkeys(arrived):
            signal.raise_signal(late)
