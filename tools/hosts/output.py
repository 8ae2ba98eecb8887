"""Collects what the processes of a job write, line by line."""

from __future__ import annotations

import collections
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import IO

Sink = Callable[[int, int, int, str], None]
"""Takes rank, host, stream (1 standard output, 2 standard error) and a line without its end; one call at a time."""

_TAIL_LINES = 40
_FINISH_S = 5.0


class Pump:
    """Reads, on a thread a stream, until every process has closed its streams.

    Attributes:
        error: What the sink raised, if it did; lines after it are read and dropped, so that no process blocks.
    """

    def __init__(self, sink: Sink | None, processes_per_host: int) -> None:
        self.error: Exception | None = None
        self._sink, self._many = sink or self._print, processes_per_host > 1
        self._tails: dict[int, collections.deque[tuple[int, str]]] = {}
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def add(self, rank: int, host: int, process: subprocess.Popen[bytes]) -> None:
        """Takes over the output streams of a process."""
        self._tails[rank] = collections.deque(maxlen=_TAIL_LINES)
        for number, stream in ((1, process.stdout), (2, process.stderr)):
            thread = threading.Thread(target=self._read, args=(stream, rank, host, number), daemon=True)
            self._threads.append(thread)
            thread.start()

    def tail(self, rank: int) -> list[str]:
        """Lists the last lines of a rank."""
        return [line for _, line in self._tails[rank]]

    def last_words(self, rank: int) -> str:
        """Returns the last line of a rank's standard error, or of its standard output if it wrote no error; "" for none.

        Two threads read the streams, so which line came last of all is not known.
        """
        said = [(number, line.strip()) for number, line in self._tails[rank] if line.strip()]
        return max(enumerate(said), key=lambda entry: (entry[1][0], entry[0]))[1][1] if said else ""

    def finish(self) -> None:
        """Waits for the last lines; the processes have ended."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_FINISH_S)

    def _read(self, stream: IO[bytes], rank: int, host: int, number: int) -> None:
        with stream:
            for line in stream:
                text = line.decode("utf-8", "replace").rstrip("\r\n")
                with self._lock:
                    self._tails[rank].append((number, text))
                    if self.error is None:
                        try:
                            self._sink(rank, host, number, text)
                        except Exception as error:
                            self.error = error

    def _print(self, rank: int, host: int, number: int, line: str) -> None:
        who = f"[host {host}, rank {rank}]" if self._many else f"[host {host}]"
        print(f"{who} {line}", file=sys.stdout if number == 1 else sys.stderr, flush=True)
