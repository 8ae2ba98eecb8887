"""What this process is doing, noted by the engines as they go: to explain why it ended, and what took how long."""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlplace.runtime.base.environment import read_clock

MODEL, OUTSIDE = "the model", "the training script, outside of the model"

_LIBRARIES = (str(Path(__file__).resolve().parents[2]), str(Path(os.__file__).resolve().parent), "<")
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


_device: torch.device | None = None
_spent_s: dict[str, float] = {}
_kind: tuple[str | None, float] = (None, 0.0)


def record(device: torch.device) -> None:
    """From now on `mark` adds up seconds by kind: ``"forward"``, ``"backward"``, ``"wait"`` (for others), ``"update"``; the
    passes of a pipeline by stage, ``"stage 0"`` and so on.

    Args:
        device: Waited for at the end of every interval where work is queued on it.
    """
    global _device
    _device = device


def recorded() -> dict[str, float]:
    """Returns the seconds by kind since `record`; no more are added."""
    global _device, _spent_s
    taken, _spent_s, _device = _spent_s, {}, None
    return taken


def mark(kind: str | None) -> None:
    """Something of this kind begins now, unless it goes on; None: nothing does."""
    global _kind
    if _device is None or kind == _kind[0]:
        return
    before, since_s = _kind
    _kind = kind, read_clock(_device)
    if before is not None:
        _spent_s[before] = _spent_s.get(before, 0.0) + _kind[1] - since_s


@contextlib.contextmanager
def marked(kind: str) -> Iterator[None]:
    """Inside, the process does something of this kind."""
    mark(kind)
    yield
    mark(None)


@contextlib.contextmanager
def waiting(what: str, *details: Any, source: int) -> Iterator[None]:
    """Returns the process waits for another one, then goes on with what it did; when that fails, see `inside`."""
    global _now
    before, kind = _now, _kind[0]
    mark("wait")
    doing(what, *details, source=source)
    yield
    _now = before
    mark(kind)


@contextlib.contextmanager
def inside(what: str) -> Iterator[None]:
    """Returns the process works for the model; when that fails, what it was doing is kept for whoever asks why."""
    doing(what)
    yield
    doing(OUTSIDE)


@dataclass(frozen=True)
class Activity:
    """What a process was doing when an error ended it.

    Attributes:
        text: What `doing` was told, with the line of the program where that was outside of the model.
        source: The rank whose message it waited for; None: of no one rank.
        age_s: Since when.
    """

    text: str
    source: int | None
    age_s: float


def current(error: BaseException) -> Activity:
    """What the main thread was doing when an error came."""
    what, details, source, since_s = _now
    text = what.format(*details)
    if what == MODEL:  # a line of generated code is one op
        frames = traceback.extract_tb(error.__traceback__)
        ops = [str(frame.line).partition(" = ")[0] for frame in frames if frame.filename.startswith("<eval_with_key>")]
        text = f"the op {ops[-1]}" if ops else text
    if what == OUTSIDE:
        lines = [_location(frame) for frame in reversed(traceback.extract_tb(error.__traceback__))]
        text += next((f" ({line})" for line in lines if line), "")
    return Activity(text, source, time.monotonic() - since_s)


def _location(frame: traceback.FrameSummary) -> str | None:
    """Returns a line of the program, for messages; None for a line of a library."""
    if "site-packages" in frame.filename or frame.filename.startswith(_LIBRARIES):
        return None
    return f"{Path(frame.filename).name}:{frame.lineno}" + (f" in {frame.name}" if frame.name != "<module>" else "")
