"""The life of emulated hosts, from their making to their removal."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING

from rlplace.errors import InputError
from tools.hosts import network
from tools.hosts.commands import check_machine
from tools.hosts.network import new_prefix
from tools.hosts.spec import HostsSpec

if TYPE_CHECKING:
    from tools.hosts.launch import Job


_ENDING = (signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Host:
    """One emulated host.

    Attributes:
        number: 0 to H - 1.
        name: Its host name, ``"host0"``; the hosts resolve each other's.
        address: Its IPv4 address, on the card ``eth0``.
        namespace: Name of its network namespace, as ``ip netns list`` shows it.
        cpus: Cores that it may run on, None for any.
    """

    number: int
    name: str
    address: str
    namespace: str
    cpus: tuple[int, ...] | None


@dataclass
class Hosts:
    """Emulated hosts that exist; `tools.hosts.launch` starts commands on them.

    Attributes:
        spec: What was asked for.
        hosts: H hosts.
        jobs: What was launched on them; whatever still runs is ended with the hosts.
        gone: Whether they have been removed.
    """

    spec: HostsSpec
    hosts: tuple[Host, ...]
    jobs: list[Job] = field(default_factory=list)
    gone: bool = False


@contextlib.contextmanager
def ending_signals() -> Iterator[None]:
    """Yields SIGTERM and SIGHUP raise `SystemExit` with the shell's code (143, 129) unless the program handles them itself.

    Python's own SIGINT handler raises already. Outside the main thread, where handlers cannot be set, this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    changed = [number for number in _ENDING if signal.getsignal(number) is signal.SIG_DFL]
    for number in changed:
        signal.signal(number, _end)
    try:
        yield
    finally:
        for number in changed:
            signal.signal(number, signal.SIG_DFL)


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


@contextlib.contextmanager
def deferred_signals() -> Iterator[None]:
    """Defers SIGINT, SIGTERM and SIGHUP to the end; outside the main thread this does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        arrived.append(number)

    before = {}
    for number in (signal.SIGINT, *_ENDING):
        handler = signal.getsignal(number)
        if handler is not None and handler is not signal.SIG_IGN:  # None: not set from Python
            before[number] = signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for late in dict.fromkeys(arrived):
            signal.raise_signal(late)


@contextlib.contextmanager
def emulated_hosts(spec: HostsSpec) -> Iterator[Hosts]:
    """Makes the hosts and removes them at the end, with every process on them; also after errors, SIGINT and SIGTERM.

    What a killed process (SIGKILL) leaves behind is removed by the next emulation on the machine, or by `cleanup`.

    Raises:
        MissingError: Not root, or the machine or its kernel lacks something; says what.
        InputError: Cores that this machine does not have.
    """
    check_machine()
    _check_cores(spec)
    prefix = new_prefix()
    with ending_signals():
        hosts: Hosts | None = None
        remove = functools.partial(network.remove_network, prefix)
        atexit.register(remove)  # where an interrupt hits the few lines outside deferred_signals
        try:
            with deferred_signals():
                cleanup()
                hosts = _make(spec, prefix)
            yield hosts
        finally:
            with deferred_signals():
                try:
                    if hosts is not None:
                        hosts.gone = True
                        for job in hosts.jobs:
                            job.stop()
                finally:
                    remove()
                    atexit.unregister(remove)


def cleanup() -> list[str]:
    """Removes namespaces of processes that are dead, and ends what still runs in them.

    Returns:
        Names of what was removed.
    """
    check_machine()
    return network.remove_stale()


def _make(spec: HostsSpec, prefix: str) -> Hosts:
    network.make_network(spec, prefix)
    hosts = []
    for number in range(spec.hosts):
        cpus = None if spec.cpus is None else spec.cpus[number]
        hosts.append(Host(number, f"host{number}", network.address_of(number), f"{prefix}-host{number}", cpus))
    return Hosts(spec, tuple(hosts))


def _check_cores(spec: HostsSpec) -> None:
    usable = os.sched_getaffinity(0)
    for number, cores in enumerate(spec.cpus or ()):
        missing = sorted(set(cores) - usable)
        if missing:
            raise InputError(f"hosts: cpus[{number}]: this process may not use core {missing[0]}; usable: {sorted(usable)}")
