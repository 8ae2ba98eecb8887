"""The keeper of one command inside an emulated host: nothing of it outlives its launcher.

Started by path with a bare interpreter (``python -I -S keeper.py SETTINGS COMMAND ...``), so it imports the standard library
alone. It enters the host, and forks the first process of a process namespace, whose child is the command, in a session of its
own. When the command is done the first process ends, and with it the kernel ends whatever is left in the namespace, daemons
included. So it does when this process is asked to end (SIGTERM for the command; SIGKILL follows after `grace_s`), and at once
when the launcher or this process dies, however it dies.

The exit code is the command's, or 128 + N where signal N ended it; 125 when the host could not be entered, 126 or 127 when
the command could not be run.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from typing import Any, NoReturn

_PR_SET_PDEATHSIG = 1
_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWPID, _CLONE_NEWNET = 0x00020000, 0x04000000, 0x20000000, 0x40000000
_MS_BIND, _MS_REC, _MS_SLAVE = 4096, 16384, 1 << 19
_ASKS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> int:
    """Runs the command line."""
    settings, command = json.loads(sys.argv[1]), sys.argv[2:]
    launcher = os.pidfd_open(settings["launcher"])
    if os.getppid() != settings["launcher"]:
        return 125  # it died before we could watch it
    try:
        _enter(settings)
    except OSError as error:
        hint = "; check cpus" if error.errno == 22 else ""
        print(f"cannot enter {settings['hostname']}: {error.strerror or error}{hint}", file=sys.stderr, flush=True)
        return 125
    signal.pthread_sigmask(signal.SIG_BLOCK, _ASKS)  # none is lost between a fork and what follows
    alive, mine = os.pipe()
    first = os.fork()
    if first == 0:
        os.close(mine)
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os._exit(125 if select.select([alive], [], [], 0)[0] else _serve(command))  # readable: the keeper is gone already

    def ask() -> None:
        os.kill(first, signal.SIGTERM)
        signal.setitimer(signal.ITIMER_REAL, max(settings["grace_s"], 1e-3))

    _on((signal.SIGALRM,), lambda: os.kill(first, signal.SIGKILL))
    _on(_ASKS, ask)
    poll, ended = select.poll(), os.pidfd_open(first)
    for handle in (launcher, ended):
        poll.register(handle, select.POLLIN)
    while ended not in dict(poll.poll()):
        os.kill(first, signal.SIGKILL)
        poll.unregister(launcher)
    return _code(os.waitpid(first, 0)[1])


def _on(numbers: tuple[signal.Signals, ...], act: Callable[[], None]) -> None:
    """Does something when a signal arrives, unless the process that it is for has ended; lets those through that waited."""

    def handle(number: int, frame: Any) -> None:
        with contextlib.suppress(ProcessLookupError):
            act()

    for number in numbers:
        signal.signal(number, handle)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


def _code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _serve(command: list[str]) -> int:
    """Runs the command as the first process of the namespace, collecting what its descendants leave; its exit code."""
    _checked("mount", _libc.mount(b"proc", b"/proc", b"proc", 0, None))
    child = os.fork()
    if child == 0:
        _become(command)
    _on(_ASKS, lambda: (os.killpg if os.getpgid(child) == child else os.kill)(child, signal.SIGTERM))
    while True:
        pid, status = os.wait()
        if pid == child:
            return _code(status)


def _become(command: list[str]) -> NoReturn:
    """Becomes the command."""
    os.setsid()
    for number in range(1, signal.NSIG):
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            with contextlib.suppress(OSError, ValueError):
                signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot run {command[0][:80]!r}: {error.strerror or error}", file=sys.stderr, flush=True)
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def _enter(settings: dict[str, Any]) -> None:
    """Enters the host: its network, cores and name; processes forked from now on have a process namespace of their own."""
    if settings["cpus"] is not None:
        os.sched_setaffinity(0, settings["cpus"])
    handle = os.open(settings["namespace"], os.O_RDONLY | os.O_CLOEXEC)
    _checked("setns", _libc.setns(handle, _CLONE_NEWNET))
    os.close(handle)
    _checked("unshare", _libc.unshare(_CLONE_NEWNS | _CLONE_NEWUTS | _CLONE_NEWPID))
    socket.sethostname(settings["hostname"])
    _checked("mount", _libc.mount(None, b"/", None, _MS_REC | _MS_SLAVE, None))
    if os.path.isfile("/etc/hosts"):  # so that the hosts know each other by name
        with tempfile.NamedTemporaryFile("w", prefix="rlplace-hosts-") as stream:
            stream.write(settings["etc_hosts"])
            stream.flush()
            os.chmod(stream.name, 0o644)
            _checked("mount", _libc.mount(stream.name.encode(), b"/etc/hosts", None, _MS_BIND, None))


def _checked(what: str, result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    sys.exit(main())
