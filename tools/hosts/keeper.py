"""The keeper of one command inside an emulated host: nothing of it outlives its launcher.

Started by path with a bare interpreter (``python -I -S keeper.py SETTINGS COMMAND ...``), so it imports the standard library
alone. The command becomes a child in a session of its own, inside the host's namespaces, on its cores. This
process adopts whatever the child's descendants leave behind, and ends all of them when the child is done, when it is asked to
(SIGTERM; SIGKILL follows after `grace_s`), and at once when the launcher dies, however it dies.

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
import time
from types import FrameType
from typing import Any, NoReturn

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
_MS_BIND, _MS_REC, _MS_SLAVE = 4096, 16384, 1 << 19
_ASKS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_KILL_S = 5.0

_libc = ctypes.CDLL(None, use_errno=True)
_asked = False


def main() -> int:
    """Runs the command line."""
    settings, command = json.loads(sys.argv[1]), sys.argv[2:]
    launcher = os.pidfd_open(settings["launcher"])
    if os.getppid() != settings["launcher"]:
        return 125  # it died before we could watch it
    _checked("prctl", _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    for number in (*_ASKS, signal.SIGCHLD):
        signal.signal(number, _note)
    signal.pthread_sigmask(signal.SIG_SETMASK, {*_ASKS, signal.SIGCHLD})  # none is lost between the fork and what follows
    keeper, child = os.getpid(), os.fork()
    if child == 0:
        _enter(settings, command, keeper)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    return _keep(child, launcher, wake_read, settings["grace_s"])


def _note(number: int, frame: FrameType | None) -> None:
    global _asked
    _asked = _asked or number in _ASKS


def _keep(child: int, launcher: int, wake: int, grace_s: float) -> int:
    """Waits for the child, then ends what it left."""
    poll = select.poll()
    poll.register(launcher, select.POLLIN)
    poll.register(wake, select.POLLIN)
    deadline: float | None = None
    while True:
        status = _reap(child)
        if status is not None:
            _kill_descendants()
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
        if _asked and deadline is None:
            deadline = time.monotonic() + grace_s
            _signal_group(child, signal.SIGTERM)
        if deadline is not None and time.monotonic() >= deadline:
            _kill_descendants()
            return 128 + signal.SIGKILL
        wait_ms = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000 + 1
        ready = {handle for handle, _ in poll.poll(wait_ms)}
        if launcher in ready:
            _kill_descendants()
            return 128 + signal.SIGKILL
        with contextlib.suppress(BlockingIOError):
            os.read(wake, 4096)


def _reap(child: int) -> int | None:
    """Collects ended children, adopted ones too; the status of `child` once it has ended."""
    ended = None
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == child:
                ended = status
    return ended


def _signal_group(child: int, number: int) -> None:
    try:
        os.killpg(child, number)
    except ProcessLookupError:  # it has not made its session yet
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)


def _kill_descendants() -> None:
    """Kills until none is left; what moves between sessions is found by its parent."""
    end = time.monotonic() + _KILL_S
    while time.monotonic() < end:
        for pid in _descendants():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0] != 0:
                pass
        except ChildProcessError:
            return
        time.sleep(0.005)


def _descendants() -> list[int]:
    parents: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as stream:
                text = stream.read()
                parents.setdefault(int(text[text.rindex(")") + 2 :].split()[1]), []).append(int(name))
    descendants, queue = [], [os.getpid()]
    while queue:
        children = parents.get(queue.pop(), [])
        descendants += children
        queue += children
    return descendants


def _enter(settings: dict[str, Any], command: list[str], keeper: int) -> NoReturn:
    """Returns in the child: enters the host and becomes the command."""
    code = 125
    try:
        os.setsid()
        _checked("prctl", _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))
        if os.getppid() != keeper:
            os._exit(125)
        if settings["cpus"] is not None:
            os.sched_setaffinity(0, settings["cpus"])
        _enter_namespaces(settings)
        signal.set_wakeup_fd(-1)
        for number in range(1, signal.NSIG):
            if number not in (signal.SIGKILL, signal.SIGSTOP):
                with contextlib.suppress(OSError, ValueError):
                    signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        code = 127
        os.execvp(command[0], command)
    except OSError as error:
        if code == 127 and not isinstance(error, FileNotFoundError):
            code = 126
        what = f"cannot run {command[0][:80]!r}" if code != 125 else f"cannot enter {settings['hostname']}"
        print(f"{what}: {error.strerror or error}{'; check cpus' if error.errno == 22 else ''}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def _enter_namespaces(settings: dict[str, Any]) -> None:
    handle = os.open(settings["namespace"], os.O_RDONLY | os.O_CLOEXEC)
    _checked("setns", _libc.setns(handle, _CLONE_NEWNET))
    os.close(handle)
    _checked("unshare", _libc.unshare(_CLONE_NEWNS | _CLONE_NEWUTS))
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
