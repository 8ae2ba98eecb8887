"""Emulated hosts that run strategies one after the other, by `benchmarks.emulated_worker`."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.emulated_worker import LIMIT_S
from benchmarks.harness import Row
from rlplace.errors import RlplaceError
from tools.hosts import HostsSpec, emulated_hosts, launch


class Lab:
    """Emulated hosts whose processes run one strategy after the other; after one that failed the next ones start anew."""

    def __init__(self, spec: HostsSpec, limit_s: float = LIMIT_S) -> None:
        self._spec, self._limit_s = spec, limit_s
        self._stack, self._count, self._ending = contextlib.ExitStack(), 0, False
        self._job: Any = None
        self._said: list[Row] = []

    def __call__(self, cell: Row) -> Row:
        """Runs a strategy: seconds of its steps, and of each stage.

        Raises:
            RlplaceError: It failed, or took too long.
        """
        if self._job is None:
            self._start()
        self._said.clear()
        target = self._folder / f"{self._count}.json"
        target.with_suffix(".part").write_text(json.dumps(cell))
        target.with_suffix(".part").rename(target)
        self._count += 1
        end = time.monotonic() + self._limit_s
        try:
            while not self._said:
                self._job.check()
                if time.monotonic() > end:
                    raise RlplaceError(f"it took more than {self._limit_s:g} s")
                time.sleep(0.05)
        except RlplaceError:
            self.close()
            raise
        return self._said[0]

    def _start(self) -> None:
        self._count, self._ending = 0, False
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        hosts = self._stack.enter_context(emulated_hosts(self._spec))
        command = [sys.executable, "-m", "benchmarks.emulated_worker", str(self._folder)]
        self._job = self._stack.enter_context(launch(hosts, command, env={"OMP_NUM_THREADS": "1"}, sink=self._hear))

    def _hear(self, rank: int, host: int, stream: int, line: str) -> None:
        if stream == 1 and line.startswith("{"):
            self._said.append(json.loads(line))
        elif stream == 2 and "Error" in line and not self._ending:
            print(f"[{rank}] {line}", file=sys.stderr)

    def close(self) -> None:
        """Ends the processes and removes the hosts."""
        self._ending = True  # what ranks say when others end first
        self._stack.close()
        self._job = None
