"""Checks of what a training checkpoint says, before anything is made as large, or set to what, it says."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from rlplace.errors import InputError, show, whole_number
from rlplace.files import check_keys

_KEYS = {"step", "torch", "random", "scheduler", "extra", "optimizers"}


def check_facts(facts: Mapping[str, Any], where: str) -> None:
    """Checks ``rlplace.json``: its keys, and the types that loading relies on.

    Args:
        facts: Without its header.
        where: The file.

    Raises:
        InputError: Names the key that is wrong.
    """
    check_keys(facts, _KEYS, (), where)
    _count(facts["step"], f"{where}: step")
    for key in ("random", "scheduler"):
        if facts[key] is not None and not isinstance(facts[key], dict):
            raise InputError(f"{where}: {key} must be an object or null")
    if facts["random"] is not None:
        check_keys(facts["random"], {"seed", "step"}, (), f"{where}: random")
        for key in ("seed", "step"):
            _count(facts["random"][key], f"{where}: random.{key}")
    if not isinstance(facts["extra"], dict) or not isinstance(facts["optimizers"], list):
        raise InputError(f"{where}: extra must be an object, optimizers a list")
    for rank, entry in enumerate(facts["optimizers"]):
        _check_optimizer(entry, f"{where}: optimizers[{rank}]")


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


def _check_optimizer(entry: Any, where: str) -> None:
    check_keys(entry, (), {"groups", "numbers"}, where)
    groups, numbers = entry.get("groups", []), entry.get("numbers", {})
    if not isinstance(groups, list) or not isinstance(numbers, dict):
        raise InputError(f"{where}: groups must be a list, numbers an object")
    for index, group in enumerate(groups):
        check_keys(group, {"settings", "parameters"}, (), f"{where}.groups[{index}]")
        names = group["parameters"]
        if not isinstance(group["settings"], dict) or not isinstance(names, list) or not all(isinstance(n, str) for n in names):
            raise InputError(f"{where}.groups[{index}]: settings must be an object, parameters a list of names")
    for name, values in numbers.items():
        plain = isinstance(values, dict) and all(
            item is None or isinstance(item, (bool, str)) or _number(item) for item in values.values()
        )
        if not plain:
            raise InputError(f"{where}.numbers: {show(name)} must be an object of numbers and texts")


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300


def _count(value: Any, where: str) -> None:
    whole_number(value, where, 0, (1 << 63) - 1)
