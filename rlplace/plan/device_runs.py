"""Device numbers in files: long runs of consecutive numbers as texts, ``"0-1023"``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlplace.errors import InputError, show
from rlplace.limits import DEVICES

SHORTEST = 32
"""Numbers from which on a run is written as a text."""

_RUN = re.compile(r"(\d{1,6})-(\d{1,6})")


def shortened(devices: Sequence[int]) -> list[int | str]:
    """Returns the numbers in order, each long run of consecutive rising ones as a text."""
    found: list[int | str] = []
    begin = 0
    for end in range(1, len(devices) + 1):
        if end == len(devices) or devices[end] != devices[end - 1] + 1:
            run = devices[begin:end]
            found += [f"{run[0]}-{run[-1]}"] if len(run) >= SHORTEST else run
            begin = end
    return found


def lengthened(devices: Any, where: str) -> Any:
    """Returns the numbers that `shortened` wrote; what is no list of numbers and texts is left for its record to refuse.

    Raises:
        InputError: A text is no run of rising numbers, or all are more than a cluster may have.
    """
    if not isinstance(devices, list) or not any(isinstance(item, str) for item in devices):
        return devices
    found: list[Any] = []
    for item in devices:
        match = _RUN.fullmatch(item) if isinstance(item, str) else None
        if isinstance(item, str) and (match is None or not int(match[1]) < int(match[2]) < DEVICES):
            raise InputError(f'{where}: {show(item)} is not a run of device numbers such as "0-1023"')
        found += [item] if match is None else range(int(match[1]), int(match[2]) + 1)
        if len(found) > DEVICES:
            raise InputError(f"{where}: names more than {DEVICES} devices")
    return found


def with_runs(data: dict[str, Any]) -> dict[str, Any]:
    """Returns a pipeline's data for a file, with the devices of its stages shortened."""
    return data | {"stages": [stage | {"devices": shortened(stage["devices"])} for stage in data["stages"]]}


def without_runs(data: Any, where: str) -> Any:
    """Returns a pipeline's data from a file, with the devices of its stages written out; raises as `lengthened` does."""
    if not isinstance(data, Mapping) or not isinstance(data.get("stages"), list):
        return data
    stages = [
        {**stage, "devices": lengthened(stage["devices"], f"{where}.stages[{number}].devices")}
        if isinstance(stage, Mapping) and "devices" in stage
        else stage
        for number, stage in enumerate(data["stages"])
    ]
    return {**data, "stages": stages}
