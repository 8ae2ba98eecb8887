"""The present activity of this process, noted by the engines: explains why the process ended, and which work took how long."""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rlplace.runtime.base.environment import read_clock

MODEL, OUTSIDE = "the model", "the training script, outside of the model"

_LIBRARIES = (str(Path(__file__).resolve().parents[2]), str(Path(os.__file__).resolve().parent), "<")
_now: tuple[str, tuple[Any, ...], int | None, float] = ("start-up", (), None, time.monotonic())
_device: torch.device | None = None
_spent_s: dict[str, float] = {}
_kind: tuple[str | None, float] = (None, 0.0)


def doing(what: str, *details: Any, source: int | None = None) -> None:
    """Notes the activity that begins now; costs next to nothing.

    Args:
        what: A `str.format` text that fits behind "in" (behind "for", with a `source`).
        *details: Its values, formatted only when an error is reported.
        source: The rank whose message this process waits for; None when it does not.
    """
    global _now
    _now = (what, details, source, time.monotonic())


def record(device: torch.device) -> None:
    """Starts to add up the seconds between calls of `mark` by kind: ``"forward"``, ``"backward"``, ``"wait"`` (for other
    processes), ``"update"``; the passes of a pipeline by stage, ``"stage 0"`` and so on.

    Args:
        device: Synchronized at the end of every interval where work is queued on it.
    """
    global _device
    _device = device


def recorded() -> dict[str, float]:
    """Returns the seconds by kind since `record`, and stops recording."""
    global _device, _spent_s
    taken, _spent_s, _device = _spent_s, {}, None
    return taken


def mark(kind: str | None) -> None:
    """Begins work of a kind, unless it is under way already; None: ends the present one."""
    global _kind
    if _device is None or kind == _kind[0]:
        return
    before, since_s = _kind
    _kind = kind, read_clock(_device)
    if before is not None:
        _spent_s[before] = _spent_s.get(before, 0.0) + _kind[1] - since_s


@contextlib.contextmanager
def marked(kind: str) -> Iterator[None]:
    """Marks the block as work of a kind."""
    mark(kind)
    yield
    mark(None)


@contextlib.contextmanager
def waiting(what: str, *details: Any, source: int) -> Iterator[None]:
    """Notes that the block waits for another process, then restores the activity before; not after an error, see `inside`."""
    global _now
    before, kind = _now, _kind[0]
    mark("wait")
    doing(what, *details, source=source)
    yield
    _now = before
    mark(kind)


@contextlib.contextmanager
def inside(what: str) -> Iterator[None]:
    """Notes that the block works for the model; after an error the activity remains, for the report."""
    doing(what)
    yield
    doing(OUTSIDE)


class Activity(NamedTuple):
    """The activity of a process when an error ended it."""

    text: str  # as `doing` got it, with the line of the program where that was outside of the model
    source: int | None  # the rank whose message it waited for; None: of no one rank
    age_s: float  # since when


def current(error: BaseException) -> Activity:
    """Returns the activity of the main thread when an error came."""
    what, details, source, since_s = _now
    text, frames = what.format(*details), traceback.extract_tb(error.__traceback__)
    if what == MODEL:  # a line of generated code is one op
        ops = [str(frame.line).partition(" = ")[0] for frame in frames if frame.filename.startswith("<eval_with_key>")]
        text = f"the op {ops[-1]}" if ops else text
    if what == OUTSIDE:
        own = [f for f in frames if "site-packages" not in f.filename and not f.filename.startswith(_LIBRARIES)]
        if own:
            where = "" if own[-1].name == "<module>" else f" in {own[-1].name}"
            text += f" ({Path(own[-1].filename).name}:{own[-1].lineno}{where})"
    return Activity(text, source, time.monotonic() - since_s)
