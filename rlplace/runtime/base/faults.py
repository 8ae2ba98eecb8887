"""Faults: a process that raises, dies, hangs or runs out of memory ends the job with one line: which process, in which work.

torch ends the waits: a connection breaks, or the timeout of the process group is up. The processes that waited publish in the
job's store for which message, and the first of them reports the process that did not publish. torchrun ends the rest, and its
summary has the line, too. `rlplace.distribute` installs this in a program of your own; `guard` does it around a block.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import platform
import re
import signal
import stat
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any, NoReturn
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

from rlplace.errors import InputError, MissingError, RlplaceError
from rlplace.runtime.base import activity
from rlplace.runtime.base.ranks import attempt, default_timeout_s, end_group, one_line
from rlplace.runtime.torch_adapter import default_store

_TIMED_OUT = ("timed out", "timeout")
_BROKEN = ("connection closed by peer", "connection reset", "broken pipe", "connection refused")
_NO_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory", "unable to allocate")

_ENFORCED = re.compile(r"^\[enforce fail at [^]]*\] [^.]*\. ")
"""The line of torch's source at which the processor's allocator gave up."""

_STORE_S, _GRACE_S, _DYING_S = 60.0, 4.0, 60.0
"""Timeout of the store; how long a process looks for the cause of a broken connection, on several hosts and on one: a process
of this host loses its connections before its end is visible, on a busy machine long before."""

_TERMINATED, _PARENT_DIED = 128 + signal.SIGTERM, 1
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_GONE = "is gone: it was killed or has crashed"


@dataclass
class _Job:
    """This process in its job, and the keys that the processes exchange; calls raise RuntimeError when the store is gone."""

    rank: int
    world: int
    store: Any
    part: str = ""
    reported: bool = False
    repeated: bool = False

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.part + ', ' if self.part else ''}host {platform.node() or 'unknown'})"

    def put(self, key: str, data: Mapping[str, Any]) -> None:
        self.store.set(key, json.dumps(data))

    def get(self, key: str) -> dict[str, Any] | None:
        return json.loads(self.store.get(key)) if self.store.check([key]) else None

    def name(self, rank: int) -> str:
        return str((self.get(f"member/{rank}") or {}).get("name", f"rank {rank}"))

    def here(self, rank: int) -> bool:
        return (self.get(f"member/{rank}") or {}).get("host") == platform.node()

    def gone(self, rank: int) -> bool:
        """Returns whether a process of this host has disappeared silently; of other hosts this is not known."""
        found = self.get(f"member/{rank}")
        if found is None or not self.here(rank) or self.get(f"ended/{rank}") is not None:
            return False
        try:
            with open(f"/proc/{found['pid']}/stat") as file:
                return file.read().rpartition(")")[2].split()[0] in ("Z", "X")
        except OSError:
            return sys.platform.startswith("linux")

    def report(self, line: str, trace: BaseException | None = None) -> None:
        """Reports why the job ends, unless another process has."""
        if self.reported:
            return
        self.reported = True
        with contextlib.suppress(RuntimeError):  # without a store every process reports
            if self.store.add("reporters", 1) > 1:
                return self.repeat()
            self.put("reported", {"line": line if line.startswith("rank ") else f"{self}: {line}", "stream": _hidden_stream()})
        if trace is not None:
            traceback.print_exception(trace)
        _write(line)

    def repeat(self) -> None:
        """Shows on rank 0 the report of another process that no terminal shows, as under ``--local-ranks-filter 0``."""
        with contextlib.suppress(RuntimeError):
            if self.rank or self.repeated or self.get("reporters") is None:
                return
            self.store.wait(["reported"], timedelta(seconds=_GRACE_S))
            found = self.get("reported")
            if found is not None and found["stream"] not in (None, _hidden_stream()):
                _write(str(found["line"]))
                self.repeated = True


def _write(line: str) -> None:
    """Writes one line to stderr in one piece, behind the buffered text of stdout."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    with contextlib.suppress(OSError):
        os.write(2, f"rlplace: {' '.join(line.split())}\n".encode())


def _hidden_stream() -> str | None:
    """Returns the name of stderr where it is a file or goes nowhere; None for a terminal or a pipe, which is read."""
    with contextlib.suppress(OSError):
        found = os.fstat(2)
        if stat.S_ISREG(found.st_mode):
            return f"{platform.node()}:{found.st_dev}:{found.st_ino}"
        if stat.S_ISCHR(found.st_mode) and found.st_rdev == os.stat(os.devnull).st_rdev:
            return os.devnull
    return None


_job: _Job | None = None
_earlier_hook: Any = None


def watch_over(part: str = "") -> None:
    """Reports from now on why this program ends; calling it again changes the part.

    Args:
        part: The part of the plan that this process runs, such as "stage 1"; for messages.
    """
    global _job, _earlier_hook
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    activity.doing("start-up")
    store = dist.PrefixStore(f"rlplace/faults/{attempt()}", default_store().clone())  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=_STORE_S))
    _job = _Job(dist.get_rank(), dist.get_world_size(), store, part or (_job.part if _job is not None else ""))
    store.delete_key(f"ended/{_job.rank}")  # of a group before this one in the same store
    _job.put(f"member/{_job.rank}", {"name": str(_job), "host": platform.node(), "pid": os.getpid()})
    tell_torchrun(f"{_job} {_GONE}")  # unless a later report replaces it
    if _earlier_hook is not None:
        return
    _earlier_hook, sys.excepthook = sys.excepthook, _hook
    atexit.register(_at_exit)
    with contextlib.suppress(ValueError):  # not the main thread
        if dist.get_backend() == "gloo" and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _terminated)
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PARENT_DIED, signal.SIGKILL)  # else it would outlive a torchrun that is killed


@contextlib.contextmanager
def guard(debug: bool = False) -> Iterator[None]:
    """Ends the process, with one line for the whole job, when the block raises.

    Args:
        debug: Show the traceback, too.
    """
    watch_over()
    try:
        yield
    except Exception as error:
        if _job is None:
            raise
        _end(_job, error, debug)
    _leave()


def _end(job: _Job, error: BaseException, debug: bool) -> NoReturn:
    """Reports the cause of an error, unless another process does, and ends this process."""
    try:
        line = _cause(job, error) if is_lost_peer(error) else _text(job, error)
    except RuntimeError:
        line = f"the job's store is gone, with torchrun or with rank 0: {job} waited for {activity.current(error).text}"
    if line is None:
        job.repeat()
    else:
        tell_torchrun(line)
        job.report(line, error if debug else None)
    _exit(error.exit_code if isinstance(error, RlplaceError) else 1)


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether the device or the host had no memory left."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _NO_MEMORY)


def is_lost_peer(error: BaseException) -> bool:
    """Returns whether another process is the cause."""
    if isinstance(error, (dist.DistNetworkError, dist.DistBackendError, dist.DistStoreError)):
        return not is_out_of_memory(error)
    text = str(error).lower()
    names_transport = "gloo" in text or "nccl" in text or "tcp" in text
    return isinstance(error, RuntimeError) and names_transport and any(t in text for t in _TIMED_OUT + _BROKEN)


def _text(job: _Job, error: BaseException) -> str:
    """Returns one line on an error of this process."""
    if isinstance(error, (InputError, MissingError)):
        return str(error)  # the same on every rank
    now, text = activity.current(error), one_line(error)
    where = f"in {now.text}" if now.source is None else f"while it waited for {now.text}"
    if is_out_of_memory(error):
        return f"{job} ran out of memory {where}: {_ENFORCED.sub('', text)}"
    return f"{job} failed {where}: {text if isinstance(error, RlplaceError) else f'{type(error).__name__}: {text}'}"


def _cause(job: _Job, error: BaseException) -> str | None:
    """Finds why this process lost another; returns None when that or a third process reports it."""
    waited = activity.current(error)
    job.put(f"lost/{job.rank}", {"source": waited.source, "text": waited.text})
    hangs = any(text in str(error).lower() for text in _TIMED_OUT)
    # Others may have begun to wait later, by as long as their part of a step takes.
    began_s, hang_s = time.monotonic(), max(_GRACE_S, 0.5 * default_timeout_s())
    while True:
        if job.get("reporters") is not None:
            return None
        lost = {rank: found for rank in range(job.world) if (found := job.get(f"lost/{rank}")) is not None}
        others = [rank for rank in range(job.world) if rank not in lost]
        gone = next((rank for rank in others if job.gone(rank)), None)
        if gone is not None:
            return f"{job.name(gone)} {_GONE}; {job} waited for {waited.text}"
        for rank in others:
            if (ended := job.get(f"ended/{rank}")) is not None:
                return None if ended else f"{job.name(rank)} has ended its script while {job} waited for {waited.text}"
        near = [rank for rank in others if waited.source in (None, rank)]
        grace_s = hang_s if hangs else _DYING_S if near and all(map(job.here, near)) else _GRACE_S
        if (hangs and len(others) < 2) or time.monotonic() > began_s + grace_s:
            break
        time.sleep(0.2)
    culprit = blamed(job.rank, {rank: found["source"] for rank, found in lost.items()}, others)
    if culprit is None:
        waits = "; ".join(f"{job.name(rank)} for {found['text']}" for rank, found in sorted(lost.items())[:8])
        return f"the ranks wait in a circle ({waits}); all of them must make the same calls"
    state = "hangs" if hangs else "is gone or hangs"
    return f"{job.name(culprit)} {state}: {job} waited {waited.age_s:.0f} s for {waited.text} ({one_line(error)})"


def blamed(rank: int, source_of: Mapping[int, int | None], others: list[int]) -> int | None:
    """Returns the rank at the end of the chain of waits that begins at one; None when they wait in a circle.

    Args:
        rank: Where to begin.
        source_of: By waiting rank the one that it waits for; None: for any of `others`.
        others: The ranks that do not report that they wait.
    """
    passed: set[int] = set()
    while rank in source_of and rank not in passed:
        passed.add(rank)
        following = source_of[rank]
        if following is None:
            return others[0] if others else None
        rank = following
    return None if rank in passed else rank


def _terminated(number: int, frame: Any) -> None:
    """Ends this process for the launcher, because another process has failed; reports that where it could not itself."""
    if _job is None or _job.reported:
        return
    with contextlib.suppress(RuntimeError):
        gone = next((rank for rank in range(_job.world) if rank != _job.rank and _job.gone(rank)), None)
        if gone is not None and _job.get("reporters") is None:
            _job.report(f"{_job.name(gone)} {_GONE}")
        _job.repeat()
        _job.put(f"ended/{_job.rank}", {"by": "launcher"})
    _exit(_TERMINATED)


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
    """Reports an uncaught error; a mistake of the program itself keeps its traceback, on the one rank that reports."""
    if _job is None or issubclass(kind, KeyboardInterrupt):
        return _earlier_hook(kind, error, trace)
    own = not isinstance(error, RlplaceError) and not is_out_of_memory(error)
    _end(_job, error, own or bool(os.environ.get("RLPLACE_DEBUG")))


def _leave() -> None:
    """Publishes that this process ends cleanly, without a report."""
    if _job is not None and not _job.reported:
        with contextlib.suppress(RuntimeError):
            _job.put(f"ended/{_job.rank}", {})


def _at_exit() -> None:
    """Leaves, and ends gloo's groups, whose threads can abort an interpreter that ends before them."""
    _leave()
    if dist.is_initialized() and dist.get_backend() == "gloo":
        end_group()


def _exit(code: int) -> NoReturn:
    """Ends at once: the interpreter's own end would wait for threads and connections that hang."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def tell_torchrun(line: str) -> None:
    """Writes a line into torchrun's summary, by a rename: an error file that is empty for a moment ends torchrun, restarts
    and all.
    """
    file = os.environ.get(_ERROR_FILE)
    if file is not None:
        with contextlib.suppress(OSError), mock.patch.dict(os.environ, {_ERROR_FILE: f"{file}.part"}):
            ErrorHandler().record_exception(RlplaceError(line))
            os.replace(f"{file}.part", file)
