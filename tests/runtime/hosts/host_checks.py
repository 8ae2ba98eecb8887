"""What is left of emulated hosts on this machine."""

import os
import subprocess
from pathlib import Path

from rlplace.runtime.hosts.cgroups import _parents


def links():
    """Network links of the machine's own namespace."""
    return subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout.count("\n")


def left_behind(pid):
    """Namespaces and control groups that a process made."""
    mine = f"rlplace-{pid}-"
    folders = [Path("/run/netns"), *{parent for parent, _ in _parents()}]
    return [name for folder in folders if folder.is_dir() for name in os.listdir(folder) if name.startswith(mine)]


def running(folder):
    """Processes, by the pid files in a folder, that still exist."""
    found = []
    for path in Path(folder).glob("pid*"):
        pid = int(path.read_text())
        if Path(f"/proc/{pid}").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text():
            found.append(pid)
    return found
