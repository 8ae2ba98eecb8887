"""What the processes of a job know of each other, kept in the job's store."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rlplace.runtime.distributed.ranks import attempt

_STORE_S = 10.0


@dataclass(frozen=True)
class Member:
    """One process of the job, as it introduced itself.

    Attributes:
        rank: Its number.
        host: Name of its machine.
        machine: Where its process number means something: the boot and the process namespace; empty where unknown.
        pid: There.
        part: What it runs, such as "stage 1".
    """

    rank: int
    host: str
    machine: str
    pid: int
    part: str

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.part + ', ' if self.part else ''}host {self.host})"


class Board:
    """What the processes of a job know of each other, in the job's store; any thread may use it.

    Every call raises RuntimeError when the store is gone.
    """

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        base = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
        self._store = dist.PrefixStore(f"rlplace/watch/{attempt()}", base)  # type: ignore[attr-defined]
        self._store.set_timeout(timedelta(seconds=_STORE_S))

    def put(self, key: str, data: dict[str, Any]) -> None:
        """Leaves something for the others."""
        self._store.set(key, json.dumps(data))

    def look(self, key: str) -> dict[str, Any] | None:
        """What somebody left; None when nobody did."""
        if not self._store.check([key]):
            return None
        return json.loads(self._store.get(key))

    def forget(self, key: str) -> None:
        """Takes back what somebody left."""
        self._store.delete_key(key)

    def member(self, rank: int) -> Member:
        """Who a rank is."""
        facts = self.look(f"member/{rank}")
        if facts is None:
            return Member(rank, "unknown", "", -1, "")
        return Member(rank, facts["host"], facts["machine"], facts["pid"], facts["part"])

    def elect(self) -> bool:
        """Whether this process is the one that reports."""
        return bool(self._store.add("reporters", 1) == 1)


def print_line(line: str) -> None:
    """One line on stderr, in one piece."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    with contextlib.suppress(OSError):
        os.write(2, f"rlplace: {' '.join(line.split())}\n".encode())


def machine() -> str:
    """Where process numbers mean something: the boot and the process namespace; empty where unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def alive(pid: int) -> bool:
    """Whether a process of this machine is there and has not ended."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False
    except (OSError, IndexError):
        return True


def only_one_here(parent: int) -> bool:
    """Whether this is the first process of the job on this machine that asks; the name is free again when it has ended."""
    if not sys.platform.startswith("linux"):
        return True
    name = f"\0rlplace-fault-{parent}-{os.environ.get('MASTER_PORT', '')}-{attempt()}"
    _held.append(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
    try:
        _held[-1].bind(name)
    except OSError:
        return False
    return True


_held: list[socket.socket] = []


def listen() -> tuple[int | None, Callable[[Any], bool]]:
    """Lets a thread learn of SIGTERM while the main thread is stuck, unless the program handles that signal itself."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return None, lambda wake: False
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    if before != -1:  # an event loop listens already
        signal.set_wakeup_fd(before)
        return None, lambda wake: False

    def handler(number: int, frame: Any) -> None:
        """The watch does what is to be done."""

    signal.signal(signal.SIGTERM, handler)

    def terminate(wake: Any) -> bool:
        return signal.SIGTERM in os.read(wake, 4096) and signal.getsignal(signal.SIGTERM) is handler

    return reader, terminate
