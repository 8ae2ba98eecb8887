"""Reading plans: from plain JSON data to a `PlacementPlan`, every value checked."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InputError, show
from rlplace.files import check_keys
from rlplace.limits import MICROBATCHES
from rlplace.plan.plan import PlacementPlan
from rlplace.plan.prediction import Prediction
from rlplace.problem.source import check_source
from rlplace.schedule import LIST, SCHEDULES

_REQUIRED = {"problem", "planner", "seed", "device_of_group"}
_OPTIONAL = {
    "priority", "order", "microbatches", "schedule", "stage_of_group", "replicas", "shards", "recompute",
    "optimizer_sharding", "groups", "source", "predicted",
}  # fmt: skip


def plan_from_dict(data: dict[str, Any]) -> PlacementPlan:
    """Builds a plan from the data of a file.

    Raises:
        InputError: Names the key that is wrong.
    """
    check_keys(data, _REQUIRED, _OPTIONAL, "plan")
    if not isinstance(data["problem"], str) or not isinstance(data["planner"], str):
        raise InputError("plan: problem and planner must be strings")
    schedule = data.get("schedule", LIST)
    if schedule not in tuple(SCHEDULES):
        raise InputError(f"plan: schedule must be one of {', '.join(SCHEDULES)}")
    microbatches = _whole(data.get("microbatches", 1), "microbatches")
    if not 1 <= microbatches <= MICROBATCHES:
        raise InputError(f"plan: microbatches must be in 1..{MICROBATCHES}, found {microbatches}")
    order = data.get("order")
    if order is not None:
        if "priority" in data or "schedule" in data:
            raise InputError("plan: order excludes priority and schedule")
        order = _parse_order(order, microbatches)
    priority = data.get("priority")
    if priority is not None:
        if not isinstance(priority, list) or not all(_finite(p) for p in priority):
            raise InputError("plan: priority must be a list of finite numbers")
        priority = np.array(priority, dtype=np.float64)
    stages = data.get("stage_of_group")
    for key, kind in (("shards", dict), ("source", dict), ("groups", list)):
        if key in data and not isinstance(data[key], kind):
            raise InputError(f"plan: {key} must be {'an object' if kind is dict else 'a list'}")
    if "source" in data:
        check_source(data["source"], "plan")
    return PlacementPlan(
        problem=data["problem"],
        planner=data["planner"],
        seed=_whole(data["seed"], "seed"),
        device_of_group=_whole_list(data["device_of_group"], "device_of_group"),
        priority=priority,
        order=order,
        microbatches=microbatches,
        schedule=schedule,
        stage_of_group=None if stages is None else _whole_list(stages, "stage_of_group"),
        replicas=_parse_replicas(data.get("replicas")),
        shards=_parse_shards(data.get("shards")),
        recompute=_parse_recompute(data.get("recompute")),
        optimizer_sharding=_parse_flag(data.get("optimizer_sharding", False), "optimizer_sharding"),
        groups=_parse_groups(data.get("groups")),
        source=data.get("source"),
        predicted=Prediction.from_dict(data.get("predicted", {}), "plan: predicted"),
    )


def _parse_order(value: Any, microbatches: int) -> list[list[Any]]:
    if not isinstance(value, list) or not all(isinstance(row, list) for row in value):
        raise InputError("plan: order must be one list of ops per device")
    if microbatches == 1:
        return [[_whole(item, "order") for item in row] for row in value]
    if not all(isinstance(item, list) and len(item) == 2 for row in value for item in row):
        raise InputError("plan: with several micro-batches, order holds [op, microbatch] pairs")
    return [[(_whole(op, "order"), _whole(mb, "order")) for op, mb in row] for row in value]


def _parse_replicas(value: Any) -> list[list[int]] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not value:
        raise InputError("plan: replicas must be a non-empty list of device lists")
    return [_whole_list(row, "replicas").tolist() for row in value]


def _parse_recompute(value: Any) -> list[list[int]] | None:
    if value is None:
        return None
    if not isinstance(value, list):
        raise InputError("plan: recompute must be a list of lists of groups")
    return [_whole_list(row, "recompute").tolist() for row in value]


def _parse_flag(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise InputError(f"plan: {where}: expected true or false, found {show(value)}")
    return value


def _parse_shards(value: Any) -> dict[str, dict[str, int]] | None:
    if value is None:
        return None
    for name, dims in value.items():
        if not isinstance(dims, dict) or any(_whole(parts, f"shards[{show(name)}]") < 1 for parts in dims.values()):
            raise InputError(f"plan: shards[{show(name)}]: expected an object of dimensions and positive numbers of parts")
    return dict(value)


def _parse_groups(value: Any) -> list[dict[str, Any]] | None:
    if value is None:
        return None
    for index, item in enumerate(value):
        check_keys(item, {"name"}, {"modules", "ops"}, f"plan: groups[{index}]")
        lists = [item.get("modules", []), item.get("ops", [])]
        named = all(isinstance(x, list) and all(isinstance(name, str) for name in x) for x in lists)
        if not named or not isinstance(item["name"], str):
            raise InputError(f"plan: groups[{index}]: name must be a string, modules and ops lists of names")
    return list(value)


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300


def _whole(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not -(1 << 31) <= value < 1 << 62:
        raise InputError(f"plan: {where}: {show(value)} is not a whole number")
    return value


def _whole_list(value: Any, where: str) -> NDArray[np.int32]:
    if not isinstance(value, list):
        raise InputError(f"plan: {where}: expected a list of whole numbers")
    numbers = [_whole(item, where) for item in value]
    if any(n < 0 or n >= 1 << 31 for n in numbers):
        raise InputError(f"plan: {where}: a number is out of range")
    return np.array(numbers, dtype=np.int32)
