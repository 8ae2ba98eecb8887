"""Processes of this machine as the watch sees them: which are alive, who speaks for all, signals, and lines on stderr."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlplace.runtime.distributed.groups import attempt


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
