"""Remains of emulated hosts on this machine."""

import contextlib
import functools
import os
import subprocess
from pathlib import Path


@functools.cache
def kernel_lacks():
    """Says what this kernel or container refuses, asked without the code under test; None where it refuses nothing."""
    name = f"probe-{os.getpid()}"
    try:
        for line in (
            f"ip netns add {name}",
            f"ip -n {name} link add eth0 type veth peer name p0",
            f"ip -n {name} link add br0 type bridge",
            f"tc -n {name} qdisc add dev eth0 root tbf rate 1mbit burst 9000 limit 90000",
            f"tc -n {name} qdisc add dev p0 root handle 1: htb",
        ):
            done = subprocess.run(line.split(), capture_output=True, text=True)
            if done.returncode != 0:
                return f"{line}: {done.stderr.strip()}"
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return None


def links():
    """Returns network links of the machine's own namespace."""
    return subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout.count("\n")


def left_behind(pid):
    """Namespaces that a process made."""
    folder = Path("/run/netns")
    return [name for name in os.listdir(folder) if name.startswith(f"rlplace-{pid}-")] if folder.is_dir() else []


def running(folder):
    """Lists commands that name a folder and still run, by their process ids; launchers and keepers do not count."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            words = (path / "cmdline").read_bytes().decode().split("\0")
            own = str(folder) in words and "tools.hosts" not in words and not any(word.endswith("keeper.py") for word in words)
            if own and " Z " not in (path / "stat").read_text():
                found.append(int(path.name))
    return found
