"""Checks of what a training checkpoint says, before anything is made as large, or set to what, it says."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from rlplace.errors import InputError, show
from rlplace.records import Record, build

_Natural = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_Plain = bool | str | Annotated[float, Meta(gt=-1e300, lt=1e300)] | None


class _Random(Record, frozen=True):
    """Where the streams of random ops continue."""

    seed: _Natural
    step: _Natural


class _Group(Record, frozen=True):
    """A group of an optimizer."""

    settings: dict[str, Any]
    parameters: list[str]


class _Optimizer(Record, frozen=True):
    """What of one rank's optimizer is no tensor."""

    groups: list[_Group] = msgspec.field(default_factory=list)
    numbers: dict[str, dict[str, _Plain]] = msgspec.field(default_factory=dict)


class _Facts(Record, frozen=True):
    """What ``rlplace.json`` holds."""

    step: _Natural
    torch: Any
    random: _Random | None
    scheduler: dict[str, Any] | None
    extra: dict[str, Any]
    optimizers: list[_Optimizer]


def check_facts(facts: Mapping[str, Any], where: str) -> None:
    """Checks ``rlplace.json``: its keys, and the types that loading relies on.

    Args:
        facts: Without its header.
        where: The file.

    Raises:
        InputError: Names the key that is wrong.
    """
    build(_Facts, facts, where)


def check_sizes(index: Mapping[str, Any], folder: Path) -> None:
    """Refuses an index that claims more bytes than its folder holds: its tensors would be allocated before they are missed.

    Args:
        index: Metadata by name.
        folder: The checkpoint's folder.

    Raises:
        InputError: It claims more.
    """
    held = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    claimed = 0
    for name, item in index.items():
        if not isinstance(item, TensorStorageMetadata):
            continue
        sizes = [int(size) for size in item.size]
        if min(sizes, default=0) < 0:
            raise InputError(f"{folder}: tensor {show(name)} has a negative size")
        claimed += math.prod(sizes) * int(item.properties.dtype.itemsize)
    if claimed > held:
        raise InputError(
            f"{folder}: the index names {claimed} bytes of tensors, its files hold {held}; take an earlier checkpoint"
        )


def check_setting(saved: Any, present: Any, where: str) -> None:
    """Refuses a saved setting of an optimizer that is of another kind than the one that it takes the place of."""
    if present is None:
        good = saved is None or isinstance(saved, (bool, int, float, str))
    elif isinstance(present, bool):  # None: torch decides, as with `foreach`
        good = saved is None or isinstance(saved, bool)
    elif isinstance(present, (tuple, list)):
        good = isinstance(saved, list) and len(saved) == len(present) and all(_number(item) for item in saved)
    elif isinstance(present, str):
        good = isinstance(saved, str)
    else:
        good = _number(saved)
    if not good:
        raise InputError(f"checkpoint: {where} is {show(saved)}, the optimizer has {show(present)}")


def check_scheduler(saved: Mapping[str, Any], present: Mapping[str, Any], where: str) -> None:
    """Refuses the state of another learning rate schedule: torch sets whatever attributes a state names."""
    for key in saved:
        if key not in present:
            raise InputError(f"{where}: scheduler has {show(key)}, which this learning rate schedule does not")


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300
