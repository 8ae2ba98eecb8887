"""Calls of ``ip`` and ``tc``, and what the machine must have for them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rlplace.errors import MissingError, RlplaceError

_TIMEOUT_S = 60
_CAP_NET_ADMIN, _CAP_SYS_ADMIN = 12, 21


def why_not() -> str | None:
    """Says why hosts cannot be emulated here, or None where nothing speaks against it."""
    if not sys.platform.startswith("linux"):
        return "emulated hosts are Linux network namespaces; this is another system"
    if os.geteuid() != 0:
        return "emulated hosts need root (network namespaces and traffic shaping); run as root"
    if not _capable():
        return "emulated hosts need the capabilities NET_ADMIN and SYS_ADMIN, which this container withholds; run it privileged"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"emulated hosts need the command {tool!r}; install iproute2"
    return None


def _capable() -> bool:
    try:
        match = re.search(r"^CapEff:\s*([0-9a-f]+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        return True  # the commands will tell
    wanted = 1 << _CAP_NET_ADMIN | 1 << _CAP_SYS_ADMIN
    return match is None or int(match[1], 16) & wanted == wanted


def check_machine() -> None:
    """Refuses a machine on which hosts cannot be emulated.

    Raises:
        MissingError: Names what is missing.
    """
    reason = why_not()
    if reason is not None:
        raise MissingError(reason)


def ip(*words: str) -> str:
    """Runs ``ip`` and returns what it prints."""
    return _call(["ip", *words], None)


def ip_batch(lines: Sequence[str], namespace: str | None = None) -> None:
    """Runs many ``ip`` commands in one process."""
    _call(["ip", *(["-n", namespace] if namespace else []), "-batch", "-"], "\n".join(lines) + "\n")


def tc_batch(lines: Sequence[str], namespace: str) -> None:
    """Runs many ``tc`` commands in one process, in a namespace."""
    _call(["tc", "-n", namespace, "-batch", "-"], "\n".join(lines) + "\n")


def _call(words: list[str], text: str | None) -> str:
    try:
        done = subprocess.run(words, input=text, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RlplaceError(f"emulated hosts: {' '.join(words[:4])}: {error}") from None
    if done.returncode != 0:
        said = " ".join((done.stderr or done.stdout).split())[:300]
        match = re.search(r"Command failed -:(\d+)", said)
        lines = (text or "").splitlines()
        what = f"{words[0]} {lines[int(match[1]) - 1]}" if match and int(match[1]) <= len(lines) else " ".join(words)[:120]
        raise RlplaceError(f"emulated hosts: {what!r} failed: {said}")
    return done.stdout
