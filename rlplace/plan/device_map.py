"""A plan rounded to whole modules, for engines that place modules and not ops.

Every module that runs ops itself goes to the device that runs most of them, the lower index on a tie. Ops that lose the vote
are counted, so that a caller can say what the rounding changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rlplace.errors import InputError
from rlplace.plan.plan import PlacementPlan, require_placement


@dataclass(frozen=True)
class ModuleRounding:
    """A plan at module granularity.

    Attributes:
        device_of_module: Device index by path, for every module that runs ops itself.
        ops: Ops that voted.
        ops_moved: Ops whose module went to another device than the plan gave the op.
    """

    device_of_module: Mapping[str, int]
    ops: int
    ops_moved: int


def plan_groups(plan: PlacementPlan) -> list[tuple[Mapping[str, Any], int]]:
    """Returns the plan's groups, each with its device.

    Raises:
        InputError: The plan does not say which modules and ops its groups hold.
    """
    require_placement(plan, "plan", "rlplace.distribute and 'rlplace run' run it, under torchrun")
    if plan.groups is None:
        raise InputError(
            "plan: it does not say which modules its groups hold, because it was made from a problem file; "
            "plan again from the model: rlplace.place(model, cluster, example_inputs=...) or 'rlplace place MODEL'"
        )
    if len(plan.groups) != len(plan.device_of_group):
        raise InputError(f"plan: {len(plan.groups)} groups, but device_of_group has {len(plan.device_of_group)} entries")
    return [(group, int(device)) for group, device in zip(plan.groups, plan.device_of_group, strict=True)]


LOSS_OP = "loss_fn"
"""Name of the captured op of a loss function that is not a part of the model."""


def device_of_loss(plan: PlacementPlan) -> int | None:
    """Returns device index of the loss function that the plan was captured with; None when the model computes its own loss."""
    devices = [device for group, device in plan_groups(plan) if LOSS_OP in group.get("ops", ())]
    return devices[0] if devices else None


def device_of_op(plan: PlacementPlan) -> dict[str, int]:
    """Returns device index by captured forward op name (``module.path/node``), the loss function's left out.

    Raises:
        InputError: No groups, or an op in two groups that sit on different devices.
    """
    devices: dict[str, int] = {}
    for group, device in plan_groups(plan):
        for name in group.get("ops", ()):
            if devices.setdefault(name, device) != device:
                raise InputError(
                    f"plan: op {name!r} is in groups on two devices (its backward pass runs elsewhere); "
                    "plan the problem without splitting its backward pass"
                )
    devices.pop(LOSS_OP, None)
    return devices


def round_to_modules(plan: PlacementPlan, canonical: Mapping[str, str] | None = None) -> ModuleRounding:
    """Rounds a plan to modules by a vote of each module's own ops.

    Args:
        plan: A plan with groups.
        canonical: First path of each module by path, so that a module reached under several paths votes once; default: all
            paths are different modules.
    """
    votes: dict[str, Counter[int]] = {}
    for name, device in device_of_op(plan).items():
        path = name.rpartition("/")[0]
        path = path if canonical is None else canonical.get(path, path)
        votes.setdefault(path, Counter())[device] += 1
    ops = sum(count.total() for count in votes.values())
    voted = {path: min(count, key=lambda d: (-count[d], d)) for path, count in votes.items()}
    moved = sum(count.total() - count[voted[path]] for path, count in votes.items())
    # Groups captured at module granularity name no ops; their modules are the unit.
    for group, device in plan_groups(plan):
        if not group.get("ops"):
            for path in group.get("modules", ()):
                voted.setdefault(path if canonical is None else canonical.get(path, path), device)
    return ModuleRounding(voted, ops, moved)


def to_device_map(plan: PlacementPlan) -> dict[str, int]:
    """Returns the plan in the ``device_map`` format of accelerate and transformers.

    Subtrees that sit on one device are one entry; the whole model on one device is ``{"": device}``. A module whose children
    sit on several devices is left to its children: a parameter that such a module holds itself is not in the map.

    Returns:
        Device index by module path, parents before children.
    """
    rounded = round_to_modules(plan).device_of_module
    below: dict[str, set[int]] = {}
    for path, device in rounded.items():
        for prefix in path_prefixes(path):
            below.setdefault(prefix, set()).add(device)
    entries: dict[str, int] = {}
    for path in sorted(below, key=lambda p: (p.count("."), p) if p else (-1, "")):
        covered = any(prefix in entries for prefix in path_prefixes(path)[:-1])
        if not covered and len(below[path]) == 1:
            entries[path] = next(iter(below[path]))
    return entries


def path_prefixes(path: str) -> list[str]:
    """Returns the path's ancestors, root first, and the path itself."""
    if not path:
        return [""]
    parts = path.split(".")
    return ["", *(".".join(parts[: i + 1]) for i in range(len(parts)))]


def most_below(devices: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Returns by path the device of most entries in a module or below it, the lower index on a tie.

    Args:
        devices: Path and device of every entry.
    """
    votes: dict[str, Counter[int]] = {}
    for path, device in devices:
        for prefix in path_prefixes(path):
            votes.setdefault(prefix, Counter())[device] += 1
    return {path: min(count, key=lambda d: (-count[d], d)) for path, count in votes.items()}


def closest(entries: Mapping[str, int], path: str) -> int | None:
    """Returns the most specific entry for a path: its own, else that of its closest ancestor with one."""
    return next((entries[prefix] for prefix in reversed(path_prefixes(path)) if prefix in entries), None)
