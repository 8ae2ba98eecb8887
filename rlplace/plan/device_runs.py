"""Device numbers in files, and numbers by device: long runs of consecutive ones as texts, ``"0-1023"``, of equal ones too."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any

import numpy as np

from rlplace.errors import InputError, show
from rlplace.limits import DEVICES

SHORTEST = 32
"""Numbers from which on a run is written as a text."""

_RUN = re.compile(r"(\d{1,6})-(\d{1,6})")
_EQUAL = re.compile(r"(\d{1,6}) x (\d{1,18})")


def shortened(devices: Sequence[int]) -> list[int | str]:
    """Returns the numbers in order, each long run of consecutive rising ones as a text."""
    found: list[int | str] = []
    ends = np.flatnonzero(np.diff(np.array(devices, dtype=np.int64)) != 1) + 1
    for begin, end in pairwise((0, *ends.tolist(), len(devices))):
        run = devices[begin:end]
        found += [f"{run[0]}-{run[-1]}"] if len(run) >= SHORTEST else run
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


def with_equal(data: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """Returns data for a file, in the lists of these keys each long run of an equal number as a text, ``"1024 x 7"``."""
    found = dict(data)
    for key in found.keys() & set(keys):
        runs = [(value, len(list(run))) for value, run in groupby(found[key])]
        found[key] = [item for value, n in runs for item in ([f"{n} x {value}"] if n >= SHORTEST else [value] * n)]
    return found


def without_equal(data: Mapping[str, Any], keys: Sequence[str], where: str) -> dict[str, Any]:
    """Returns data from a file, with the lists of these keys written out as `with_equal` took them.

    Raises:
        InputError: A text is no run of an equal number, or there are more numbers than a cluster has devices.
    """
    found = dict(data)
    for key in found.keys() & set(keys):
        if isinstance(found[key], list) and any(isinstance(item, str) for item in found[key]):
            found[key] = _written_out(found[key], f"{where}.{key}")
    return found


def _written_out(values: Sequence[Any], where: str) -> list[Any]:
    found: list[Any] = []
    for item in values:
        match = _EQUAL.fullmatch(item) if isinstance(item, str) else None
        if isinstance(item, str) and match is None:
            raise InputError(f'{where}: {show(item)} is not a run of an equal number such as "1024 x 7"')
        count = 1 if match is None else int(match[1])
        if len(found) + count > DEVICES:
            raise InputError(f"{where}: more than {DEVICES} numbers")
        found += [item] if match is None else [int(match[2])] * count
    return found
