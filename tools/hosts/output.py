"""Collects what the processes of a job write, line by line, on one thread."""

from __future__ import annotations

import collections
import os
import selectors
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import IO

Sink = Callable[[int, int, int, str], None]
"""Takes rank, host, stream (1 standard output, 2 standard error) and a line without its end."""

_TAIL_LINES = 40
_MAX_LINE = 1 << 16  # longer lines are handed on in parts
_FINISH_S = 5.0


class Pump:
    """Reads until every process has closed its streams.

    Attributes:
        error: What the sink raised, if it did; lines after it are read and dropped, so that no process blocks.
    """

    def __init__(self, sink: Sink | None, processes_per_host: int) -> None:
        self.error: Exception | None = None
        self._sink = sink or (_print_single if processes_per_host == 1 else _print_many)
        self._selector = selectors.DefaultSelector()
        self._rest: dict[int, bytearray] = {}
        self._tails: dict[int, collections.deque[str]] = {}
        self._streams: list[IO[bytes]] = []
        self._thread = threading.Thread(target=self._run, name="rlplace-hosts-output", daemon=True)

    def add(self, rank: int, host: int, process: subprocess.Popen[bytes]) -> None:
        """Takes over the output streams of a process, before `start`."""
        self._tails[rank] = collections.deque(maxlen=_TAIL_LINES)
        for number, stream in ((1, process.stdout), (2, process.stderr)):
            assert stream is not None
            self._streams.append(stream)
            self._rest[stream.fileno()] = bytearray()
            self._selector.register(stream.fileno(), selectors.EVENT_READ, (rank, host, number))

    def start(self) -> None:
        self._thread.start()

    def tail(self, rank: int) -> list[str]:
        return list(self._tails[rank])

    def finish(self) -> None:
        """Waits for the last lines; the processes have ended."""
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(_FINISH_S)
        if not self._thread.is_alive():
            for stream in self._streams:
                stream.close()
            self._selector.close()

    def _run(self) -> None:
        while self._selector.get_map():
            for key, _ in self._selector.select():
                rank, host, number = key.data
                part = os.read(key.fd, 1 << 16)
                rest = self._rest[key.fd]
                rest += part
                if not part:
                    self._selector.unregister(key.fd)
                *lines, last = rest.split(b"\n")
                if last and (not part or len(last) >= _MAX_LINE):
                    lines.append(last)
                    last = bytearray()
                self._rest[key.fd] = last
                for line in lines:
                    self._emit(rank, host, number, line.decode("utf-8", "replace").removesuffix("\r"))

    def _emit(self, rank: int, host: int, number: int, line: str) -> None:
        self._tails[rank].append(line)
        if self.error is None:
            try:
                self._sink(rank, host, number, line)
            except Exception as error:
                self.error = error


def _print_single(rank: int, host: int, number: int, line: str) -> None:
    print(f"[host {host}] {line}", file=sys.stdout if number == 1 else sys.stderr, flush=True)


def _print_many(rank: int, host: int, number: int, line: str) -> None:
    print(f"[host {host}, rank {rank}] {line}", file=sys.stdout if number == 1 else sys.stderr, flush=True)
