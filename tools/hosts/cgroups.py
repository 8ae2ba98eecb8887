"""Processor time of emulated hosts, limited by control groups of either version, whichever this machine lets us write."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from rlplace.errors import MissingError, RlplaceError
from tools.hosts.names import is_stale

_REMOVE_S = 3.0


def make_group(name: str, cpu_share: float, period_s: float) -> Path:
    """Makes a control group that grants its processes `cpu_share` cores, in periods of `period_s` seconds.

    Raises:
        MissingError: No control group can be made here.
    """
    tried = []
    for parent, version in _parents():
        group = parent / name
        try:
            group.mkdir()
        except OSError as error:
            tried.append(f"{parent}: {error.strerror}")
            continue
        try:
            period_us, quota_us = round(period_s * 1e6), round(period_s * cpu_share * 1e6)
            if version == 1:
                (group / "cpu.cfs_period_us").write_text(str(period_us))
                (group / "cpu.cfs_quota_us").write_text(str(quota_us))
            else:
                (group / "cpu.max").write_text(f"{quota_us} {period_us}")
            return group
        except OSError as error:
            tried.append(f"{group}: {error.strerror}")
            with contextlib.suppress(OSError):
                group.rmdir()
    raise MissingError(
        f"no control group for processor time can be made here ({'; '.join(tried) or 'none is mounted'}); leave cpu_share out, "
        "or replay op times by sleeping instead of computing"
    )


def remove_group(group: Path) -> None:
    """Removes a control group whose processes have been ended; the kernel may need a moment to see that."""
    end = time.monotonic() + _REMOVE_S
    while True:
        try:
            group.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError as error:
            if time.monotonic() > end:
                raise RlplaceError(f"emulated hosts: control group {group} cannot be removed: {error.strerror}") from None
            time.sleep(0.01)


def find_groups(name: str) -> list[Path]:
    """Control groups of this name that exist."""
    return [parent / name for parent, _ in _parents() if (parent / name).is_dir()]


def remove_stale() -> list[str]:
    """Removes control groups whose owner is dead and returns their names."""
    removed = []
    for parent in {parent for parent, _ in _parents()}:
        for name in os.listdir(parent) if parent.is_dir() else ():
            if is_stale(name):
                remove_group(parent / name)
                removed.append(name)
    return removed


def _parents() -> Iterator[tuple[Path, int]]:
    """Folders under which a group may be made, with the version of control groups there, the likelier first.

    A version 2 group with processes of its own cannot hand the processor controller on, so its ancestors are tried as well.
    """
    try:
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
        own = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return
    for fields in mounts:
        root = Path(fields[1])
        if fields[2] == "cgroup" and "cpu" in fields[3].split(","):
            for _, controllers, path in own:
                if "cpu" in controllers.split(","):
                    yield from ((parent, 1) for parent in _upwards(root, path))
        elif fields[2] == "cgroup2":
            for number, _, path in own:
                if number == "0":
                    yield from ((parent, 2) for parent in _upwards(root, path) if _hands_on_cpu(parent))


def _upwards(root: Path, path: str) -> Iterator[Path]:
    here = root / path.lstrip("/")
    if not here.is_dir():  # a container that sees only its own part of the tree
        here = root
    while True:
        yield here
        if here == root:
            return
        here = here.parent


def _hands_on_cpu(parent: Path) -> bool:
    """Whether children of a version 2 group have the processor controller; it is switched on where that is allowed."""
    try:
        if "cpu" not in (parent / "cgroup.controllers").read_text().split():
            return False
        control = parent / "cgroup.subtree_control"
        if "cpu" not in control.read_text().split():
            control.write_text("+cpu")
    except OSError:
        return False
    return True
