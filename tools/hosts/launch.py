"""Starts a command on every emulated host, one process a rank, and ends all of them together."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from rlplace.errors import InputError, RlplaceError, show, whole_number
from tools.hosts.emulate import Host, Hosts
from tools.hosts.network import CARD
from tools.hosts.output import Pump, Sink

_KEEPER = Path(__file__).with_name("keeper.py")
_PORTS = range(29500, 32500, 2)  # free, as nobody else is in the hosts; below those that the kernel hands out
_LOOK_S = 0.02
_END_S = 8.0  # beyond the grace: what the keeper needs to end everything


@dataclass(frozen=True)
class Process:
    """One process of a job.

    Attributes:
        rank: 0 to W - 1, host by host.
        host: Number of its host.
        keeper: The process that runs it and hands its exit code on.
    """

    rank: int
    host: int
    keeper: subprocess.Popen[bytes]


class Job:
    """Processes on emulated hosts, for as long as they run; ends them as a context manager, and so does the end of the hosts.

    Attributes:
        processes: W processes, by rank.
        timed_out: Whether `wait` ended the job because its time was up.
    """

    def __init__(self, processes: Sequence[Process], pump: Pump, grace_s: float) -> None:
        self.processes = tuple(processes)
        self.timed_out = False
        self._pump, self._grace_s = pump, grace_s
        self._first_failed: Process | None = None
        self._stopped = False

    def poll(self) -> tuple[int | None, ...]:
        """Returns exit code of every rank, None where it still runs; 128 + N where signal N ended it."""
        codes = []
        for process in self.processes:
            code = process.keeper.poll()
            codes.append(None if code is None else code if code >= 0 else 128 - code)
            self._note(process)
        return tuple(codes)

    def _note(self, process: Process) -> None:
        """Remembers the first failure, unless it is one that `stop` caused."""
        if self._first_failed is None and not self._stopped and process.keeper.returncode:
            self._first_failed = process

    def check(self) -> None:
        """Raises when a process has failed, naming the first one and the last line of its errors; ends the others.

        Raises:
            RlplaceError: A process ended with a code other than 0.
        """
        self.poll()
        if self._first_failed is not None:
            self.stop()
            raise RlplaceError(self._failure(self._first_failed))

    def wait(self, timeout_s: float | None = None) -> tuple[int, ...]:
        """Waits until all processes have ended; when one fails, when the time is up or on an interrupt, it ends the others.

        Args:
            timeout_s: Seconds from now; None waits for ever.

        Returns:
            Exit code of every rank; 128 + N where signal N ended it (143 for those ended because another rank failed).

        Raises:
            RlplaceError: The time is up; names the ranks that were still running. The job has been ended.
        """
        end = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            while None in self.poll() and self.code == 0 and self._pump.error is None and not self.timed_out:
                time.sleep(_LOOK_S)
                self.timed_out = end is not None and time.monotonic() >= end and None in self.poll()
        finally:
            running = [rank for rank, code in enumerate(self.poll()) if code is None]
            self.stop()
        if self._pump.error is not None:
            raise self._pump.error
        if self.timed_out:
            who = f"rank {running[0]}" if len(running) == 1 else f"ranks {', '.join(map(str, running))}"
            raise RlplaceError(f"{who} still running after {timeout_s:g} s; all processes of the job were ended")
        return tuple(code if code is not None else 137 for code in self.poll())

    @property
    def code(self) -> int:
        """0 while nothing has failed, else the code of the rank that failed first."""
        codes = self.poll()
        return 0 if self._first_failed is None else codes[self._first_failed.rank] or 0

    def tail(self, rank: int) -> list[str]:
        """Returns the last lines that a rank wrote, standard output and standard error together."""
        return self._pump.tail(rank)

    def stop(self) -> None:
        """Ends every process that still runs: SIGTERM, then SIGKILL after the grace; returns when all are gone."""
        self.poll()
        self._stopped = True
        for process in self.processes:
            if process.keeper.poll() is None:
                process.keeper.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + self._grace_s + _END_S
        for process in self.processes:
            try:
                process.keeper.wait(max(0.01, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:  # its child dies with it
                process.keeper.kill()
                process.keeper.wait()
        self._pump.finish()

    def _failure(self, process: Process) -> str:
        code = process.keeper.returncode
        last = self._pump.last_words(process.rank)
        said = f": {last[:200]}" if last else ""
        how = f"ended with code {code}"
        if code == 128 + signal.SIGKILL or code == -signal.SIGKILL:
            how = "was killed (out of memory, or from outside)"
        elif code > 128:
            how = f"was ended by signal {code - 128}"
        return f"rank {process.rank} on host {process.host} {how}{said}"

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()


def launch(
    hosts: Hosts,
    command: Sequence[str],
    *,
    processes_per_host: int = 1,
    env: Mapping[str, str] | None = None,
    sink: Sink | None = None,
    grace_s: float = 3.0,
) -> Job:
    """Starts a command on every host, `processes_per_host` times each, with the environment that torchrun would give it.

    Ranks read ``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE``, ``LOCAL_WORLD_SIZE``, ``GROUP_RANK``, ``MASTER_ADDR`` and
    ``MASTER_PORT``; gloo and NCCL get the name of the card. ``torchrun`` itself as the command (one process a host) finds
    its nodes in ``PET_NNODES``, ``PET_NODE_RANK``, ``PET_MASTER_ADDR`` and ``PET_MASTER_PORT``.

    Args:
        hosts: From `emulated_hosts`.
        command: Program and arguments, not through a shell.
        processes_per_host: Ranks on every host.
        env: Further variables, over the present environment.
        sink: Takes ``(rank, host, stream, line)`` for every line, stream 1 or 2, on a thread of its own; None prints them to
            this process's standard output and error with the prefix ``[host 0]``.
        grace_s: Seconds between SIGTERM and SIGKILL when the job is ended.

    Returns:
        The running job.

    Raises:
        InputError: A command that is not a list of strings, or numbers out of range.
        RlplaceError: A process could not be started.
    """
    words = _check_command(command)
    if hosts.gone:
        raise InputError("hosts: these hosts have been removed; launch inside the with block of emulated_hosts")
    whole_number(processes_per_host, "hosts: processes_per_host", 1, 64)
    if not 0 <= grace_s <= 600:
        raise InputError(f"hosts: grace_s: {show(grace_s)} is not in 0..600")
    port = _PORTS[len(hosts.jobs) % len(_PORTS)]
    etc_hosts = "127.0.0.1 localhost\n"
    for host in hosts.hosts:  # torch asks for the name of the address that an IPv6 socket sees
        etc_hosts += f"{host.address} {host.name}\n::ffff:{host.address} {host.name}\n"
    pump = Pump(sink, processes_per_host)
    job = Job((), pump, grace_s)
    hosts.jobs.append(job)
    started: list[Process] = []
    try:
        for host in hosts.hosts:
            settings = {
                "launcher": os.getpid(),
                "grace_s": grace_s,
                "namespace": f"/run/netns/{host.namespace}",
                "hostname": host.name,
                "cpus": host.cpus,
                "etc_hosts": etc_hosts,
            }
            for local in range(processes_per_host):
                variables = _environment(hosts, host, local, processes_per_host, port, env or {})
                process = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(_KEEPER), json.dumps(settings), *words],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env=variables,
                    start_new_session=True,  # a terminal's Ctrl-C reaches the launcher alone, which then ends them in order
                )
                started.append(Process(len(started), host.number, process))
                job.processes = tuple(started)
                pump.add(started[-1].rank, host.number, process)
    except BaseException as error:
        job.stop()
        if isinstance(error, (OSError, ValueError)):
            raise RlplaceError(f"hosts: the command could not be started: {error}") from None
        raise
    return job


def _check_command(command: Sequence[str]) -> list[str]:
    if isinstance(command, str) or not isinstance(command, Sequence) or not command:
        raise InputError(f"hosts: command: expected a list such as ['python', 'train.py'], found {show(command)}")
    for word in command:
        if not isinstance(word, str) or "\0" in word:
            raise InputError(f"hosts: command: {show(word)} is not a string that a program can be given")
    if not command[0]:
        raise InputError("hosts: command: the program has no name")
    return list(command)


def _environment(
    hosts: Hosts, host: Host, local: int, processes_per_host: int, port: int, env: Mapping[str, str]
) -> dict[str, str]:
    count, master = len(hosts.hosts), hosts.hosts[0].address
    cores = len(host.cpus) if host.cpus is not None else max(1, len(os.sched_getaffinity(0)) // count)
    return {
        "OMP_NUM_THREADS": str(max(1, cores // processes_per_host)),  # these two unless the caller chose
        "PYTHONUNBUFFERED": "1",
        **os.environ,
        "RANK": str(host.number * processes_per_host + local),
        "LOCAL_RANK": str(local),
        "WORLD_SIZE": str(count * processes_per_host),
        "LOCAL_WORLD_SIZE": str(processes_per_host),
        "GROUP_RANK": str(host.number),
        "GROUP_WORLD_SIZE": str(count),
        "MASTER_ADDR": master,
        "MASTER_PORT": str(port),
        "PET_NNODES": str(count),
        "PET_NODE_RANK": str(host.number),
        "PET_MASTER_ADDR": master,
        "PET_MASTER_PORT": str(port + 1),
        "GLOO_SOCKET_IFNAME": CARD,
        "NCCL_SOCKET_IFNAME": CARD,
        **env,
    }
