"""Devices of cluster files: neighbours that are alike in one entry, and such entries written out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rlplace.cluster.parse import Cluster
from rlplace.errors import InputError, show
from rlplace.limits import DEVICES


def device_runs(cluster: Cluster) -> list[dict[str, Any]]:
    """Returns the devices, those in one entry that `expanded` makes of it."""
    runs: list[dict[str, Any]] = []
    alike, each, name = None, 0, ("", 0)
    for device, host in zip(cluster.devices, cluster.hosts, strict=True):
        own = device.kind, device.memory_bytes, device.reserved_bytes
        run = runs[-1] if runs else {}
        if own == alike and device.name == f"{name[0]}{name[1] + run['count']}":
            begun = host - run["host"]
            each = each or (run["count"] if begun == 1 else 0)  # devices of the first host, once it is full
            if begun == (run["count"] // each if each else 0):
                run["count"] += 1
                if begun:
                    run["each_host"] = each
                continue
        digits = re.search(r"(?:0|[1-9][0-9]{0,5})$", device.name)
        number = digits[0] if digits else ""
        name, alike, each = (device.name[: len(device.name) - len(number)], int(number or -DEVICES)), own, 0
        memory = {"memory_bytes": device.memory_bytes, "reserved_bytes": device.reserved_bytes}
        runs.append({"name": device.name, "kind": device.kind, "host": host, **memory, "count": 1})
    return [{key: value for key, value in run.items() if (key, value) != ("count", 1)} for run in runs]


def expanded(item: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """Returns an entry for each of the devices of a ``[[device]]``."""
    count, each, name, host = item.get("count", 1), item.get("each_host"), item.get("name"), item.get("host", 0)
    sizes = [value for value in (count, host, each) if value is not None]
    if count == 1 or not isinstance(name, str) or not all(type(size) is int and 0 <= size <= DEVICES for size in sizes):
        return [dict(item)]  # the entry itself is refused where it is wrong
    digits = re.search(r"[0-9]{1,6}$", name)
    if digits is None:
        raise InputError(f"{where}.name: {show(name)} needs a number at its end, for {count} devices count on from it")
    own, prefix = {key: value for key, value in item.items() if key not in ("count", "each_host")}, name[: digits.start()]
    return [
        {**own, "name": f"{prefix}{int(digits[0]) + number}", "host": host + (number // each if each else 0)}
        for number in range(count)
    ]
