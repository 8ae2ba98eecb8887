"""The watch: a thread in every process of a job that notices when another process is gone or stands still.

The main thread may be stuck, in a wait, a kernel or a program's own loop, so the thread does everything by itself: it tells
the job's store every second what the main thread is doing, looks after the next rank, follows the chain of waits when one lasts
too long, and ends its process when some rank has reported a fault. One rank reports: the first that asks the store for it.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import select
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch.distributed as dist

from rlplace.runtime.distributed.execution import activity
from rlplace.runtime.distributed.job.board import Board, Member, alive, listen, machine, only_one_here, print_line

BEAT_S = 1.0
GRACE_S = 2.0
"""What the main thread gets to end by itself once a fault is known."""

_FRESH_S = 3.0
_SILENT_S = 30.0
_START_S = 120.0
"""Ranks may come to this point that far apart: one reads files, another compiles."""

_FAULT = "fault"
TERMINATED = "terminated"
"""Why a process has ended whose launcher ended it."""


@dataclass(frozen=True)
class _Beat:
    """The latest sign of life of another rank.

    Attributes:
        number: Number of the beat; None before the first.
        since_s: When it was new here.
        looked_s: When it was last looked at.
        seen: Whether it was seen to be new: the one before had been looked at just then.
    """

    number: int | None
    since_s: float
    looked_s: float
    seen: bool


class Watch(threading.Thread):
    """See the module.

    Attributes:
        timeout_s: How long a rank may do one thing while others wait for it.
        told: Whether this process has reported, or knows that another one does.
    """

    def __init__(self, board: Board, part: str, timeout_s: float, exit_process: Callable[[int], None]) -> None:
        super().__init__(name="rlplace watch", daemon=True)
        self.board, self.timeout_s = board, timeout_s
        self.me = Member(board.rank, platform.node() or "unknown", machine(), os.getpid(), part)
        self.told = threading.Event()
        self._exit = exit_process
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._parent = os.getppid()
        self._wake, self._terminate = listen()
        self._beat = 0
        self._beats: dict[int, _Beat] = {}  # by rank
        self._missing = 0

    def introduce(self, part: str | None = None) -> None:
        """Tells the others who this is."""
        if part is not None:
            self.me = replace(self.me, part=part)
        self.board.forget(f"ended/{self.me.rank}")  # of a group before this one in the same store
        self.board.put(f"member/{self.me.rank}", {k: v for k, v in asdict(self.me).items() if k != "rank"})

    def end(self, why: str) -> None:
        """This process leaves in good order, so nobody need report it."""
        self._stop.set()
        with contextlib.suppress(RuntimeError):
            self.board.put(f"ended/{self.me.rank}", {"why": why})

    def report(self, line: str, code: int = 1, before: Callable[[], None] | None = None) -> bool:
        """Says what happened, unless another process does.

        Args:
            line: One line, without prefix.
            code: The exit code to leave for this job.
            before: Called first when this process is the one that reports.

        Returns:
            Whether this process reported.
        """
        with self._lock:
            if self.told.is_set():
                return False
            self.told.set()
        try:
            first = self.board.elect()
        except RuntimeError:  # the store is gone with its host: one process a machine speaks
            first = only_one_here(self._parent)
        if not first:
            return False
        if before is not None:
            before()
        print_line(line)
        with contextlib.suppress(RuntimeError):
            self.board.put(_FAULT, {"line": line, "code": code, "rank": self.me.rank})
        return True

    def reported(self) -> bool:
        """Whether some process has reported a fault."""
        return self.told.is_set() or self.board.look(_FAULT) is not None

    def run(self) -> None:
        """The thread."""
        while not self._stop.is_set():
            ready = select.select([self._wake], [], [], BEAT_S)[0] if self._wake is not None else self._stop.wait(BEAT_S) and []
            if ready and self._terminate(self._wake):
                self._terminated()
            if self._stop.is_set():
                return
            if not dist.is_initialized():  # the program has ended the job by itself
                self.end("left the process group")
                return
            if os.getppid() != self._parent and "TORCHELASTIC_RUN_ID" in os.environ:
                self._exit(1)  # torchrun was killed: nobody else will end this process
            try:
                self._look_around()
            except RuntimeError:  # the store is gone; the main thread will notice if that matters to it
                return

    def _look_around(self) -> None:
        if self.board.look(_FAULT) is not None and not self.told.is_set():
            self.told.set()
            time.sleep(GRACE_S)
            self._exit(1)
        now = activity.current()
        self._beat += 1
        self.board.put(f"beat/{self.me.rank}", {"n": self._beat, **now.to_dict()})
        neighbour = (self.me.rank + 1) % self.board.world
        # Seen missing twice, so that a process that is just ending has time to say so.
        self._missing = self._missing + 1 if self.gone(neighbour) else 0
        if self._missing >= 2:
            self._blame(f"{self.board.member(neighbour)} is gone: it was killed or has crashed")
        if now.waits and now.age_s > self.timeout_s:
            line = self.standstill(now)
            if line is not None:
                self._blame(line)

    def _blame(self, line: str) -> None:
        self.report(line)
        self._exit(1)

    def gone(self, rank: int) -> bool:
        """Whether a process on this machine has disappeared without a word; of other machines this is not known."""
        member = self.board.member(rank)
        if (
            not member.machine
            or member.machine != self.me.machine
            or member.pid <= 0
            or self.board.look(f"ended/{rank}") is not None
        ):
            return False
        return not alive(member.pid)

    def silent_s(self, rank: int) -> float | None:
        """Seconds since this process last saw a sign of life of another.

        None while that is not known: a beat is as old as anything until another one follows, or should have.
        """
        beat = self.board.look(f"beat/{rank}")
        number, now_s = 0 if beat is None else int(beat["n"]), time.monotonic()
        before = self._beats.get(rank, _Beat(None, now_s, -math.inf, False))
        if before.number == number:
            self._beats[rank] = replace(before, looked_s=now_s)
            age_s = now_s - before.since_s
            return age_s if before.seen or age_s > _FRESH_S else None
        fresh = now_s - before.looked_s <= _FRESH_S
        self._beats[rank] = _Beat(number, now_s, now_s, fresh)
        return 0.0 if fresh else None

    def standstill(self, now: activity.Activity, least_s: float | None = None) -> str | None:
        """Follows the chain of waits from here to a rank that stands still; None when it makes progress or is not yet known.

        Args:
            now: What this process waits for.
            least_s: How long a rank must have done one thing to be called hung; default the timeout.
        """
        least_s = self.timeout_s if least_s is None else least_s
        path, here, last = [self.me.rank], now, self.me
        while True:
            text = f"{last} waits for {here.text}"
            following = here.source if here.source is not None else self._latecomer(path)
            if following is None or following in path:
                return f"the ranks wait for each other ({self._all_waits()}); all of them must make the same calls"
            member = self.board.member(following)
            ended = self.board.look(f"ended/{following}")
            if ended is not None:
                return None if ended["why"] == TERMINATED else f"{member} has ended its script while {text}"
            beat = self.board.look(f"beat/{following}")
            if self.gone(following):
                return f"{member} is gone: it was killed or has crashed, while {text}"
            if beat is None:
                late = max(least_s, _START_S) < now.age_s
                return f"{member} has not called rlplace.distribute for {now.age_s:.0f} s, while {text}" if late else None
            silent_s = self.silent_s(following)
            if silent_s is None or silent_s > _FRESH_S:
                if silent_s is None or silent_s < min(_SILENT_S, max(least_s, 2 * _FRESH_S)):
                    return None
                return f"{member} gives no sign of life (stopped, hung, or its host is down), while {text}"
            here = activity.Activity(beat["text"], beat["source"], beat["together"], beat["age_s"])
            if not here.waits:
                if here.age_s < least_s:
                    return None
                return f"{member} hangs: for {here.age_s:.0f} s it has been in {here.text}, while {text}"
            path.append(following)
            last = member

    def _all_waits(self) -> str:
        """What every rank waits for, of the first ones."""
        beats = ((rank, self.board.look(f"beat/{rank}")) for rank in range(min(self.board.world, 8)))
        return "; ".join(f"rank {rank} for {beat['text']}, {beat['age_s']:.0f} s" for rank, beat in beats if beat is not None)

    def _latecomer(self, path: list[int]) -> int | None:
        """The rank, among those that are not waiting, that has been busy with the same thing for longest.

        One without a fresh sign of life comes first: its last beat says what it did then, and it may have gone on, or stopped.
        """
        oldest: tuple[float, int] | None = None
        for rank in range(self.board.world):
            if rank in path:
                continue
            beat = self.board.look(f"beat/{rank}")
            silent_s = None if beat is None else self.silent_s(rank)
            if beat is None or silent_s is None or silent_s > _FRESH_S:
                return rank
            if not beat["together"] and (oldest is None or beat["age_s"] > oldest[0]):
                oldest = (beat["age_s"], rank)
        return None if oldest is None else oldest[1]

    def _terminated(self) -> None:
        """The launcher ends this process: says why when another process has disappeared, and goes."""
        with contextlib.suppress(RuntimeError):
            self.board.put(f"ended/{self.me.rank}", {"why": TERMINATED})
            deadline = time.monotonic() + GRACE_S
            while time.monotonic() < deadline and not self.reported():
                lost = next((rank for rank in range(self.board.world) if rank != self.me.rank and self.gone(rank)), None)
                if lost is not None:
                    self.report(f"{self.board.member(lost)} is gone: it was killed or has crashed")
                time.sleep(0.1)
        self._exit(128 + signal.SIGTERM)
