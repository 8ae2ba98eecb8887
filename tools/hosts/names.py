"""Names of everything that an emulation makes on the machine, so that what a dead process left behind is recognised.

A name is ``rlplace-PID-START-SPACE-SERIAL`` and a part: process id, its start in clock ticks since boot (ids are used again),
the process-id namespace that the id counts in, and a number for each emulation of the process.
"""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path

_NAME = re.compile(r"rlplace-(\d+)-(\d+)-([0-9a-f]+)-(\d+)-(?:switch|host\d+)")
_serial = itertools.count()


def new_prefix() -> str:
    """Returns a prefix that no other emulation on this machine uses; parts are ``PREFIX-switch`` and ``PREFIX-hostN``."""
    return f"rlplace-{os.getpid()}-{_start_ticks(os.getpid())}-{_space():x}-{next(_serial)}"


def is_stale(name: str) -> bool:
    """Says whether the name is one of ours whose process is gone; names of other process-id namespaces cannot be told."""
    match = _NAME.fullmatch(name)
    if match is None or int(match[3], 16) != _space():
        return False
    return _start_ticks(int(match[1])) != int(match[2])


def _space() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _start_ticks(pid: int) -> int | None:
    """Returns field 22 of /proc/PID/stat; None where the process does not exist or is a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name before may hold spaces and brackets
    return None if fields[0] in ("Z", "X") else int(fields[19])
