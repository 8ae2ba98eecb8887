"""Faults: a process that raises, dies, hangs or runs out of memory ends the job with one line that says which and in what.

`rlplace.distribute` installs this in a program of your own; `guard` does it around a block. What one process cannot see of
itself the others see (`watch`).
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Iterator
from multiprocessing import util as multiprocessing_util
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from rlplace.errors import InputError, MissingError, RlplaceError
from rlplace.runtime.distributed.execution import activity
from rlplace.runtime.distributed.execution.wire import LostPeerError
from rlplace.runtime.distributed.job.board import Board, print_line
from rlplace.runtime.distributed.job.watch import GRACE_S, TERMINATED, Watch
from rlplace.runtime.distributed.ranks import default_timeout_s, one_line

_LOST = ("connection closed by peer", "connection reset", "broken pipe", "timed out", "timeout", "connection refused")
_NO_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory", "unable to allocate")

_ENFORCED = re.compile(r"^\[enforce fail at [^]]*\] [^.]*\. ")
"""Where in torch's source the processor's allocator gave up."""

_EARLIER = 0.9
"""The watch speaks before torch does, whose message knows one end of a wait only."""

_LOOK_S = 8.0
"""For finding out who is the cause of a broken wait."""

_watch: Watch | None = None


def watch_over(part: str = "", timeout_s: float | None = None) -> None:
    """Watches over the default process group, and reports what ends this program; calling it again changes the settings.

    Args:
        part: What this process runs, such as "stage 1"; for messages.
        timeout_s: How long a process may do one thing while others wait for it; default the timeout of the process group.
    """
    global _watch
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    activity.doing("start-up")  # what came before this was nothing that others could wait for
    if _watch is not None and _watch.is_alive():
        if timeout_s is not None:
            _watch.timeout_s = timeout_s
        if part:
            _watch.introduce(part)
        return
    board = Board(dist.get_rank(), dist.get_world_size())
    _watch = Watch(board, part, timeout_s or _EARLIER * default_timeout_s(), _exit)
    _watch.introduce()
    _watch.start()
    if sys.excepthook is not _hook:
        _hooks.append(sys.excepthook)
        sys.excepthook = _hook
        atexit.register(_leave)
        multiprocessing_util.Finalize(None, _leave, exitpriority=100)  # such processes do not run atexit


@contextlib.contextmanager
def guard(part: str = "", timeout_s: float | None = None, debug: bool = False) -> Iterator[None]:
    """Ends the process, with one line for the whole job, when the block raises.

    Args:
        part: See `watch_over`.
        timeout_s: See `watch_over`.
        debug: Show the traceback, too.
    """
    watch_over(part, timeout_s)
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        if _watch is None:
            raise
        _exit(report(error, debug=debug))
    if _watch is not None:
        _watch.end("done")


def report(error: BaseException, *, debug: bool = False) -> int:
    """Says what ended this process, unless another process reports the cause; returns the exit code."""
    code = error.exit_code if isinstance(error, RlplaceError) else 1
    if _watch is None:
        print_line(_text(error))
        return code

    def before() -> None:
        if debug:
            traceback.print_exception(error)

    if is_lost_peer(error):
        line = _find_cause(_watch, error)
        if line is None:  # whoever is the cause reports it
            return code
    else:
        line = _text(error)
    if _watch.report(line, code, before):
        _tell_torchrun(line, error)
    return code


def describe_error(error: BaseException) -> str:
    """What happened in this process, in one line without its name."""
    now = activity.current(error)
    where = f"in {now.text}" if not now.waits else f"while it waited for {now.text}"
    if is_out_of_memory(error):
        return f"ran out of memory {where}: {_ENFORCED.sub('', one_line(error))}"
    text = one_line(error)
    return f"failed {where}: {text if isinstance(error, RlplaceError) else f'{type(error).__name__}: {text}'}"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device or the host had no memory left."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _NO_MEMORY)


def is_lost_peer(error: BaseException) -> bool:
    """Whether another process is the cause."""
    if isinstance(error, (LostPeerError, dist.DistNetworkError)):
        return True
    if isinstance(error, (dist.DistBackendError, dist.DistStoreError)):
        return not is_out_of_memory(error)
    text = str(error).lower()
    names_transport = "gloo" in text or "nccl" in text or "tcp" in text
    return isinstance(error, RuntimeError) and names_transport and any(t in text for t in _LOST)


def _text(error: BaseException) -> str:
    if isinstance(error, (InputError, MissingError)):
        return str(error)  # the same on every rank
    rank = os.environ.get("RANK", "0") if _watch is None else str(_watch.me)
    return f"{rank} {describe_error(error)}"


def _find_cause(watch: Watch, error: BaseException) -> str | None:
    """Whose fault it is that this process lost another; None when that one, or somebody else, tells."""
    waited = activity.current(error)
    peer = error.peer if isinstance(error, LostPeerError) else None
    deadline = time.monotonic() + (_LOOK_S if waited.waits else GRACE_S)
    try:
        while time.monotonic() < deadline:
            if watch.reported():
                return None
            ranks = [peer] if peer is not None else [rank for rank in range(watch.board.world) if rank != watch.me.rank]
            lost = next((rank for rank in ranks if watch.gone(rank)), None)
            if lost is not None:
                return f"{watch.board.member(lost)} is gone: it was killed or has crashed; {watch.me} waited for {waited.text}"
            ended = {rank: found["why"] for rank in ranks if (found := watch.board.look(f"ended/{rank}")) is not None}
            if TERMINATED in ended.values():
                return None  # the launcher ends the job
            if ended:
                return f"{watch.board.member(min(ended))} has ended its script while {watch.me} waited for {waited.text}"
            if waited.waits and (line := watch.standstill(waited, 0.5 * watch.timeout_s)) is not None:
                return line
            time.sleep(0.2)
        who = f"{watch.board.member(peer)} is gone or hangs" if peer is not None else "another rank is gone or hangs"
        return f"{who}: {watch.me} waited {waited.age_s:.0f} s for {waited.text} ({one_line(error.__cause__ or error)})"
    except RuntimeError:
        return f"rank 0, which kept the job's store, is gone: {watch.me} waited for {waited.text}"


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
    """Uncaught: a mistake of the program itself keeps its traceback, on the one rank that reports."""
    if _watch is None or issubclass(kind, KeyboardInterrupt):
        return _hooks[-1](kind, error, trace)
    own = not isinstance(error, RlplaceError) and not is_out_of_memory(error)
    code = report(error, debug=own or bool(os.environ.get("RLPLACE_DEBUG")))
    _exit(code)
    return None


_hooks: list[Any] = []


def _leave() -> None:
    if _watch is not None and not _watch.told.is_set():
        _watch.end("done")


def _exit(code: int) -> None:
    """At once: the interpreter's own end would wait for threads and connections that hang."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def _tell_torchrun(line: str, error: BaseException) -> None:
    """The summary of torchrun then has the line, too."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return
    told = {"message": line, "extraInfo": {"py_callstack": "".join(traceback.format_exception(error)), "timestamp": _seconds()}}
    with contextlib.suppress(OSError), open(path, "w") as file:
        json.dump({"message": told}, file)


def _seconds() -> str:
    return str(int(time.time()))
