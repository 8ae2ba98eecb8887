"""What this process is doing: noted by the engines as they go, read by whoever has to explain why a job stands still."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

OUTSIDE = "the training script, outside of the model"

_PACKAGE = str(Path(__file__).resolve().parents[2])
_STANDARD = str(Path(os.__file__).resolve().parent)
_now: tuple[str, tuple[Any, ...], int | None, float] = ("start-up", (), None, time.monotonic())


def doing(what: str, *details: Any, source: int | None = None) -> None:
    """Notes what begins now; costs next to nothing.

    Args:
        what: A `str.format` text that fits behind "in" (behind "for", with a `source`).
        *details: Its values, formatted only when somebody asks.
        source: The rank whose message this process waits for; None when it does not.
    """
    global _now
    _now = (what, details, source, time.monotonic())


def note() -> tuple[Any, ...]:
    """What `doing` was last told, to tell it again after an interruption."""
    return (_now[0], *_now[1])


@contextlib.contextmanager
def inside(what: str) -> Iterator[None]:
    """The process works for the model; when that fails, what it was doing is kept for whoever asks why."""
    doing(what)
    yield
    doing(OUTSIDE)


@dataclass(frozen=True)
class Activity:
    """What a process was doing when it was asked.

    Attributes:
        text: What `doing` was told, or what the stack shows.
        source: The rank whose message it waits for.
        together: It waits in a collective, for any rank that is not there yet.
        age_s: Since when.
    """

    text: str
    source: int | None
    together: bool
    age_s: float

    @property
    def waits(self) -> bool:
        """Whether it depends on another process to go on."""
        return self.together or self.source is not None

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON data."""
        return {"text": self.text, "source": self.source, "together": self.together, "age_s": self.age_s}


def current(error: BaseException | None = None) -> Activity:
    """What the main thread is doing now; any thread may ask.

    Args:
        error: What just ended it, if it has ended.
    """
    what, details, source, since = _now
    text = what.format(*details)
    age_s = time.monotonic() - since
    if source is not None:
        return Activity(text, source, False, age_s)
    ended = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)] if error is not None else []
    collective, location = _look(_running() if error is None else reversed(ended))
    if collective is not None:
        return Activity(f"{collective} (last in {text})", None, True, age_s)
    if what == OUTSIDE and location is not None:
        text = f"{text} ({location})"
    return Activity(text, None, False, age_s)


def _location(file: str, line: int, function: str) -> str | None:
    """A line of the program, for messages; None for a line of a library."""
    if "site-packages" in file or file.startswith((_PACKAGE, _STANDARD, "<")):
        return None
    return f"{Path(file).name}:{line}" + (f" in {function}" if function != "<module>" else "")


def _look(frames: Iterable[tuple[CodeType, int]]) -> tuple[str | None, str | None]:
    """The collective that the main thread waits in, and the innermost line of its program that is no library's.

    Args:
        frames: Code and line, innermost first.
    """
    collective = location = None
    for code, line in frames:
        file, name = code.co_filename, code.co_name
        if file.endswith("distributed_c10d.py") and not name.startswith("_") and name != "wrapper":
            collective = f"{name} together"
        elif file.endswith("pipelining/schedules.py") and "wait" in name:
            collective = "an exchange between stages"
        else:
            location = _location(file, line, name)
        if location is not None:
            break
    return collective, location


def _running() -> Iterator[tuple[CodeType, int]]:
    frame = sys._current_frames().get(threading.main_thread().ident or -1)
    while frame is not None:
        yield frame.f_code, frame.f_lineno
        frame = frame.f_back
