"""Faults: a process that raises, dies, hangs or runs out of memory ends the job with one line that says which and in what.

torch ends the waits: a connection breaks, or the timeout of the process group is up. The processes that waited tell each other
through the job's store for what, and the first to know says which process none of them heard of. torchrun ends the rest, and
its summary has the line, too. `rlplace.distribute` installs this in a program of your own; `guard` does it around a block.
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
from rlplace.runtime.base.ranks import attempt, default_timeout_s, one_line
from rlplace.runtime.torch_adapter import default_store

_TIMED_OUT = ("timed out", "timeout")
_BROKEN = ("connection closed by peer", "connection reset", "broken pipe", "connection refused")
_NO_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory", "unable to allocate")

_ENFORCED = re.compile(r"^\[enforce fail at [^]]*\] [^.]*\. ")
"""Where in torch's source the processor's allocator gave up."""

_STORE_S, _GRACE_S, _DYING_S = 60.0, 4.0, 60.0
"""What the store may take, and how long a broken connection is looked into where nobody is known to be gone: a process of this
host loses its connections before it is seen to be gone, on a busy machine long before."""

_TERMINATED, _PARENT_DIED = 128 + signal.SIGTERM, 1
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_GONE = "is gone: it was killed or has crashed"


@dataclass
class _Job:
    """This process in its job, and what its processes tell each other; calls raise RuntimeError when the store is gone."""

    rank: int
    world: int
    store: Any
    part: str = ""
    told: bool = False
    repeated: bool = False

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.part + ', ' if self.part else ''}host {platform.node() or 'unknown'})"

    def put(self, key: str, data: Mapping[str, Any]) -> None:
        self.store.set(key, json.dumps(data))

    def look(self, key: str) -> dict[str, Any] | None:
        return json.loads(self.store.get(key)) if self.store.check([key]) else None

    def name(self, rank: int) -> str:
        found = self.look(f"member/{rank}")
        return f"rank {rank}" if found is None else str(found["name"])

    def here(self, rank: int) -> bool:
        return (self.look(f"member/{rank}") or {}).get("host") == platform.node()

    def gone(self, rank: int) -> bool:
        """Returns whether a process of this host has disappeared without a word; of other hosts this is not known."""
        found = self.look(f"member/{rank}")
        if found is None or not self.here(rank) or self.look(f"ended/{rank}") is not None:
            return False
        try:
            with open(f"/proc/{found['pid']}/stat") as file:
                return file.read().rpartition(")")[2].split()[0] in ("Z", "X")
        except OSError:
            return sys.platform.startswith("linux")

    def say(self, line: str, trace: BaseException | None = None) -> None:
        """Says why the job ends, unless another process has."""
        if self.told:
            return
        self.told = True
        with contextlib.suppress(RuntimeError):  # without a store each speaks for itself
            if self.store.add("reporters", 1) > 1:
                return self.repeat()
            self.put("reported", {"line": line if line.startswith("rank ") else f"{self}: {line}", "stream": _hidden_stream()})
        if trace is not None:
            traceback.print_exception(trace)
        _write(line)

    def repeat(self) -> None:
        """Shows on rank 0 what another process reports where no terminal shows it, as under ``--local-ranks-filter 0``."""
        with contextlib.suppress(RuntimeError):
            if self.rank or self.repeated or self.look("reporters") is None:
                return
            self.store.wait(["reported"], timedelta(seconds=_GRACE_S))
            found = self.look("reported")
            if found is not None and found["stream"] not in (None, _hidden_stream()):
                _write(str(found["line"]))
                self.repeated = True


def _write(line: str) -> None:
    """Writes one line to stderr in one piece, behind what stdout holds."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    with contextlib.suppress(OSError):
        os.write(2, f"rlplace: {' '.join(line.split())}\n".encode())


def _hidden_stream() -> str | None:
    """What stderr is, where it is a file or goes nowhere; None for a terminal or a pipe, which somebody reads."""
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
    """From now on, what ends this program is reported; calling it again changes the part.

    Args:
        part: What this process runs, such as "stage 1"; for messages.
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
    tell_torchrun(f"{_job} {_GONE}")  # unless it finds the time for another last word
    if _earlier_hook is not None:
        return
    _earlier_hook, sys.excepthook = sys.excepthook, _hook
    atexit.register(_leave)
    with contextlib.suppress(ValueError):  # not the main thread
        if dist.get_backend() == "gloo" and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _terminated)
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PARENT_DIED, signal.SIGKILL)  # nobody else ends this process when torchrun is killed


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
    """Says what ended this process, unless another process reports the cause, and ends it."""
    try:
        line = _cause(job, error) if is_lost_peer(error) else _text(job, error)
    except RuntimeError:
        line = f"the job's store is gone, with torchrun or with rank 0: {job} waited for {activity.current(error).text}"
    if line is not None:
        tell_torchrun(line)
        job.say(line, error if debug else None)
    else:
        job.repeat()
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
    """What happened in this process, in one line."""
    if isinstance(error, (InputError, MissingError)):
        return str(error)  # the same on every rank
    now, text = activity.current(error), one_line(error)
    where = f"in {now.text}" if now.source is None else f"while it waited for {now.text}"
    if is_out_of_memory(error):
        return f"{job} ran out of memory {where}: {_ENFORCED.sub('', text)}"
    return f"{job} failed {where}: {text if isinstance(error, RlplaceError) else f'{type(error).__name__}: {text}'}"


def _cause(job: _Job, error: BaseException) -> str | None:
    """Whose fault it is that this process lost another; None when that one, or somebody else, tells."""
    waited = activity.current(error)
    job.put(f"lost/{job.rank}", {"source": waited.source, "text": waited.text})
    hangs = any(text in str(error).lower() for text in _TIMED_OUT)
    # Others may have begun to wait later, by as long as their part of a step takes.
    began_s, hang_s = time.monotonic(), max(_GRACE_S, 0.5 * default_timeout_s())
    while True:
        if job.look("reporters") is not None:
            return None
        lost = {rank: found for rank in range(job.world) if (found := job.look(f"lost/{rank}")) is not None}
        others = [rank for rank in range(job.world) if rank not in lost]
        gone = next((rank for rank in others if job.gone(rank)), None)
        if gone is not None:
            return f"{job.name(gone)} {_GONE}; {job} waited for {waited.text}"
        for rank in others:
            if (ended := job.look(f"ended/{rank}")) is not None:
                return None if ended else f"{job.name(rank)} has ended its script while {job} waited for {waited.text}"
        near = [rank for rank in others if waited.source in (None, rank)]
        grace_s = hang_s if hangs else _DYING_S if near and all(map(job.here, near)) else _GRACE_S
        if (hangs and len(others) < 2) or time.monotonic() > began_s + grace_s:
            break
        time.sleep(0.2)
    culprit = blamed(job.rank, {rank: found["source"] for rank, found in lost.items()}, others)
    if culprit is None:
        waits = "; ".join(f"{job.name(rank)} for {found['text']}" for rank, found in sorted(lost.items())[:8])
        return f"the ranks wait for each other ({waits}); all of them must make the same calls"
    return (
        f"{job.name(culprit)} {'hangs' if hangs else 'is gone or hangs'}: {job} waited {waited.age_s:.0f} s for {waited.text} "
        f"({one_line(error)})"
    )


def blamed(rank: int, source_of: Mapping[int, int | None], others: list[int]) -> int | None:
    """Returns the rank at the end of the chain of waits that begins at one; None when they wait in a circle.

    Args:
        rank: Where to begin.
        source_of: By waiting rank the one that it waits for; None: for any of `others`.
        others: The ranks that do not say that they wait.
    """
    passed: set[int] = set()
    while rank in source_of:
        following = source_of[rank]
        if following is None:
            return others[0] if others else None
        if rank in passed:
            return None
        passed.add(rank)
        rank = following
    return rank


def _terminated(number: int, frame: Any) -> None:
    """The launcher ends this process, because another one has failed: says which, where that one could not."""
    if _job is None or _job.told:
        return
    with contextlib.suppress(RuntimeError):
        gone = next((rank for rank in range(_job.world) if rank != _job.rank and _job.gone(rank)), None)
        if gone is not None and _job.look("reporters") is None:
            _job.say(f"{_job.name(gone)} {_GONE}")
        _job.repeat()
        _job.put(f"ended/{_job.rank}", {"by": "launcher"})
    _exit(_TERMINATED)


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
    """Uncaught: a mistake of the program itself keeps its traceback, on the one rank that reports."""
    if _job is None or issubclass(kind, KeyboardInterrupt):
        return _earlier_hook(kind, error, trace)
    own = not isinstance(error, RlplaceError) and not is_out_of_memory(error)
    _end(_job, error, own or bool(os.environ.get("RLPLACE_DEBUG")))


def _leave() -> None:
    """This process leaves in good order, so nobody need report it."""
    if _job is not None and not _job.told:
        with contextlib.suppress(RuntimeError):
            _job.put(f"ended/{_job.rank}", {})


def _exit(code: int) -> NoReturn:
    """At once: the interpreter's own end would wait for threads and connections that hang."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def tell_torchrun(line: str) -> None:
    """The summary of torchrun then has the line, too. An error file that is empty for a moment ends torchrun, not a restart."""
    file = os.environ.get(_ERROR_FILE)
    if file is not None:
        with contextlib.suppress(OSError), mock.patch.dict(os.environ, {_ERROR_FILE: f"{file}.part"}):
            ErrorHandler().record_exception(RlplaceError(line))
            os.replace(f"{file}.part", file)
