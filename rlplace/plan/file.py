"""Plan files: version 2 is written, version 1 is read as well; every value checked (docs/formats.md).

A plan holds a strategy and, where single groups are placed, a placement. The strategy of a placement plan has one stage, whose
axis `branch` counts the devices that groups are placed on; its blocks are left out, since the placement says more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from rlplace.errors import InputError
from rlplace.limits import DEVICES, MICROBATCHES
from rlplace.plan.plan import Older, PlacementPlan
from rlplace.plan.prediction import Prediction
from rlplace.plan.strategy import Axis, Strategy
from rlplace.problem.source import check_source
from rlplace.records import Count, Record, build, plain
from rlplace.schedule import GPIPE, renamed_schedule, schedule_named

_Index = Annotated[int, Meta(ge=0, lt=1 << 31)]
_Entry = Annotated[int, Meta(ge=-(1 << 31), lt=1 << 62)]
_Number = Annotated[float, Meta(gt=-1e300, lt=1e300)]
_Microbatches = Annotated[int, Meta(ge=1, le=MICROBATCHES)]
_One = Meta(min_length=1, max_length=1)
_LIST = "list"  # what placements run under: whatever is ready
_Nothing: NDArray[np.int32] = np.zeros(0, dtype=np.int32)


class _Group(Record, frozen=True):
    """The part of the model that a group holds."""

    name: str
    modules: list[str] = msgspec.field(default_factory=list)
    ops: list[str] = msgspec.field(default_factory=list)


class _Placement(Record, frozen=True):
    """Devices of groups; an `order` of several micro-batches (version 1) holds pairs."""

    problem: str
    device_of_group: list[_Index]
    priority: list[_Number] | None = None
    order: Any = None
    stage_of_group: list[_Index] | None = None
    recompute: list[list[_Index]] | None = None


class _Stage(Record, frozen=True):
    """The stage of a placement plan: all devices; data axes outside, the devices of a replica inside."""

    devices: Annotated[tuple[Annotated[int, Meta(ge=0, lt=DEVICES)], ...], Meta(min_length=1)]
    mesh: dict[Axis, Count] = msgspec.field(default_factory=dict)
    sharding: Annotated[int, Meta(ge=0, le=1)] = 0


class _Around(Record, frozen=True):
    """The strategy of a placement plan; without `batch` and `microbatch` the problem has the number of samples."""

    stages: Annotated[tuple[_Stage, ...], _One]
    microbatches: Annotated[tuple[_Microbatches, ...], _One] = (1,)
    microbatch: Annotated[tuple[Count, ...], _One] | None = None
    batch: Count | None = None
    schedule: str = _LIST


class _Plan(Record, frozen=True):
    """A plan file of version 2; strategy, placement and prediction have readers of their own."""

    planner: str
    seed: _Entry
    strategy: Any
    question: str | None = None
    placement: _Placement | None = None
    groups: list[_Group] | None = None
    source: dict[str, Any] | None = None
    predicted: Any = msgspec.field(default_factory=dict)


class _FirstPlan(_Placement, frozen=True, kw_only=True):
    """A plan file of version 1: always a placement, with all keys on one level."""

    planner: str
    seed: _Entry
    microbatches: _Microbatches = 1
    schedule: str = _LIST
    replicas: Annotated[list[list[_Index]], Meta(min_length=1)] | None = None
    optimizer_sharding: bool = False
    groups: list[_Group] | None = None
    source: dict[str, Any] | None = None
    predicted: Any = msgspec.field(default_factory=dict)


def plan_to_dict(plan: PlacementPlan) -> dict[str, Any]:
    """A plan as the data of a file without its header, defaults left out."""
    data: dict[str, Any] = {"planner": plan.planner, "seed": plan.seed}
    if plan.strategy is not None:
        data |= {"question": plan.problem, "strategy": plan.strategy.to_dict()}
    else:
        kept = ("problem", "device_of_group", "priority", "order")
        placement = {key: plain(value) for key in kept if (value := getattr(plan, key)) is not None}
        data |= {"strategy": _around(plan), "placement": placement}
    data |= {key: plain(value) for key in ("groups", "source") if (value := getattr(plan, key)) is not None}
    predicted = plan.predicted.to_dict()
    return data | ({"predicted": predicted} if predicted else {})


def _around(plan: PlacementPlan) -> dict[str, Any]:
    """The strategy of a placement plan."""
    width = int(plan.device_of_group.max(initial=0)) + 1
    stage: dict[str, Any] = {"devices": list(range(width))} | ({"mesh": {"branch": width}} if width > 1 else {})
    data: dict[str, Any] = {"microbatches": [1], "stages": [stage]}
    return data if plan.samples is None else {"batch": plan.samples, "microbatch": [plan.samples], **data}


def plan_from_dict(data: dict[str, Any]) -> PlacementPlan:
    """Builds a plan from the data of a file without its header, of either version.

    Raises:
        InputError: Names the key that is wrong.
    """
    placement = data.get("placement")
    if "shards" in data or (isinstance(placement, dict) and "shards" in placement):
        raise InputError(
            "plan: its shards cut single ops, which plans no longer do; plan a strategy with a tensor axis: "
            "rlplace place MODEL --batch N --planner pase"
        )
    if "device_of_group" in data:
        first = build(_FirstPlan, data, "plan")
        if first.order is not None and ("priority" in data or "schedule" in data):
            raise InputError("plan: order excludes priority and schedule")
        schedule = renamed_schedule(first.schedule, first.device_of_group, first.stage_of_group)
        return _placement_plan(
            first, first, data, (first.microbatches, schedule), None, first.replicas, first.optimizer_sharding
        )
    plan = build(_Plan, data, "plan")
    if plan.placement is not None:
        if plan.question is not None:
            raise InputError("plan: a placement plan answers its placement's problem; leave question out")
        return _placement_plan(plan, plan.placement, data, *_from_around(plan.strategy))
    if plan.question is None:
        raise InputError("plan: key 'question' is missing: the fingerprint of what a strategy answers")
    if plan.source is not None:
        check_source(plan.source, "plan")
    return PlacementPlan(
        plan.question, plan.planner, plan.seed, _Nothing, strategy=Strategy.from_dict(plan.strategy, "plan: strategy"),
        groups=None if plan.groups is None else data["groups"], source=plan.source,
        predicted=Prediction.from_dict(plan.predicted, "plan: predicted"),
    )  # fmt: skip


def _from_around(data: Any) -> tuple[tuple[int, str], int | None, list[list[int]], bool]:
    """Micro-batches and schedule (version 1), samples of a micro-batch, devices by replica, and a sharded optimizer."""
    around = build(_Around, data, "plan: strategy")
    (stage,), (microbatches,) = around.stages, around.microbatches
    where = "plan: strategy: stages[0]"
    strange = next((axis for axis in stage.mesh if axis not in ("replicate", "shard", "branch")), None)
    if strange is not None:
        raise InputError(f"{where}: a placement plan has the axes replicate or shard, and branch; found {strange}")
    replicate, shard, width = (stage.mesh.get(axis, 1) for axis in ("replicate", "shard", "branch"))  # type: ignore[call-overload]
    if replicate > 1 and shard > 1:
        raise InputError(f"{where}: in a placement plan all replicas share the optimizer state (shard), or none (replicate)")
    if replicate * shard * width != len(stage.devices):
        raise InputError(f"{where}: a mesh of {replicate * shard * width} devices, found {len(stage.devices)}; make them agree")
    if (stage.sharding > 0) != (shard > 1):
        raise InputError(
            f"{where}: sharding level {stage.sharding} with shard {shard}; level 1 shares the optimizer state over it"
        )
    replicas = replicate * shard
    if (around.batch is None) != (around.microbatch is None):
        raise InputError("plan: strategy: give both batch and microbatch, or neither")
    samples = None if around.microbatch is None else around.microbatch[0]
    if samples is not None and around.batch != replicas * microbatches * samples:
        raise InputError(
            f"plan: strategy: batch is {around.batch}, but {replicas} replicas of {microbatches} micro-batches of {samples} "
            f"are {replicas * microbatches * samples} samples; make them agree"
        )
    rows = [list(stage.devices[r * width : (r + 1) * width]) for r in range(replicas)]
    return (microbatches, around.schedule), samples, rows, shard > 1


def _placement_plan(
    plan: _Plan | _FirstPlan,
    placement: _Placement,
    data: Mapping[str, Any],
    turns: tuple[int, str],
    samples: int | None,
    rows: Sequence[Sequence[int]] | None,
    shared: bool,
) -> PlacementPlan:
    microbatches, schedule = turns
    order = placement.order
    try:
        schedule_named(schedule if schedule != _LIST else GPIPE)
    except InputError as error:
        raise InputError(f"plan: {error}") from None
    if order is not None:
        if placement.priority is not None or schedule != _LIST:
            raise InputError("plan: order excludes priority and schedule")
        order = build(list[list[_Entry]], order, "plan: order") if microbatches == 1 else None
    if plan.source is not None:
        check_source(plan.source, "plan")
    devices = np.array(placement.device_of_group, dtype=np.int32)
    older = _older(rows or (), placement, shared, microbatches, None if schedule == _LIST else schedule)
    if rows is not None and len(rows) == 1:  # other names of the same devices
        devices = np.array(rows[0], dtype=np.int32)[devices]
        order = None if order is None else _renamed(order, rows[0])
    return PlacementPlan(
        problem=placement.problem,
        planner=plan.planner,
        seed=plan.seed,
        device_of_group=devices,
        priority=None if placement.priority is None else np.array(placement.priority, dtype=np.float64),
        order=order,
        samples=samples,
        older=older,
        groups=None if plan.groups is None else data["groups"],
        source=plan.source,
        predicted=Prediction.from_dict(plan.predicted, "plan: predicted"),
    )


def _older(
    rows: Sequence[Sequence[int]], placement: _Placement, shared: bool, microbatches: int, schedule: str | None
) -> Older | None:
    """The settings of a file beside a placement; None where there are none."""
    groups, recompute = len(placement.device_of_group), placement.recompute or ()
    width = 1 + max(placement.device_of_group, default=-1)
    named = [device for row in rows for device in row]
    if rows and (len({len(row) for row in rows}) > 1 or len(rows[0]) < width):
        raise InputError(f"plan: replicas must be lists of equal length, one entry for each of {width} devices")
    if len(set(named)) < len(named):
        raise InputError("plan: replicas must name different devices")
    if shared and len(rows) < 2:
        raise InputError("plan: optimizer_sharding shares the optimizer state between replicas, but the plan has one")
    again = [group for segment in recompute for group in segment]
    if len(set(again)) < len(again) or any(group >= groups for group in again):
        raise InputError(f"plan: recompute must hold distinct groups in 0..{groups - 1}")
    stages = placement.stage_of_group or ()
    if stages and len(stages) != groups:
        raise InputError(f"plan: stage_of_group has {len(stages)} entries, the plan {groups} groups")
    if len(rows) < 2 and not recompute and microbatches == 1 and schedule is None:
        return None
    copies = tuple(map(tuple, rows)) if len(rows) > 1 else ()
    return Older(microbatches, schedule, tuple(stages), copies, tuple(map(tuple, recompute)), shared)


def _renamed(order: list[list[Any]], row: Sequence[int]) -> list[list[Any]]:
    """The order by device, with the devices renumbered."""
    renamed: list[list[Any]] = [[] for _ in range(max(len(order), *(device + 1 for device in row)))]
    for device, items in zip(row, order, strict=False):
        renamed[device] = items
    return renamed
