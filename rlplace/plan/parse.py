"""Reading plans: from plain JSON data to a `PlacementPlan`, every value checked."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from rlplace.errors import InputError
from rlplace.limits import MICROBATCHES
from rlplace.plan.plan import PlacementPlan
from rlplace.plan.prediction import Prediction
from rlplace.problem.source import check_source
from rlplace.records import Count, Record, build
from rlplace.schedule import LIST, schedule_named

_Index = Annotated[int, Meta(ge=0, lt=1 << 31)]
_Entry = Annotated[int, Meta(ge=-(1 << 31), lt=1 << 62)]
_Number = Annotated[float, Meta(gt=-1e300, lt=1e300)]


class _Group(Record, frozen=True):
    """What of the model a group holds."""

    name: str
    modules: list[str] = msgspec.field(default_factory=list)
    ops: list[str] = msgspec.field(default_factory=list)


class _Plan(Record, frozen=True):
    """What a plan file holds; `predicted` is read by `rlplace.plan.prediction`."""

    problem: str
    planner: str
    seed: _Entry
    device_of_group: list[_Index]
    priority: list[_Number] | None = None
    order: list[list[_Entry | tuple[_Entry, _Entry]]] | None = None
    microbatches: Annotated[int, Meta(ge=1, le=MICROBATCHES)] = 1
    schedule: str = LIST
    stage_of_group: list[_Index] | None = None
    replicas: Annotated[list[list[_Index]], Meta(min_length=1)] | None = None
    shards: dict[str, dict[str, Count]] | None = None
    recompute: list[list[_Index]] | None = None
    optimizer_sharding: bool = False
    groups: list[_Group] | None = None
    source: dict[str, Any] | None = None
    predicted: Any = msgspec.field(default_factory=dict)


def plan_from_dict(data: dict[str, Any]) -> PlacementPlan:
    """Builds a plan from the data of a file.

    Raises:
        InputError: Names the key that is wrong.
    """
    plan = build(_Plan, data, "plan")
    try:
        schedule_named(plan.schedule)
    except InputError as error:
        raise InputError(f"plan: {error}") from None
    if plan.order is not None:
        if "priority" in data or "schedule" in data:
            raise InputError("plan: order excludes priority and schedule")
        pairs = plan.microbatches > 1
        if any(isinstance(item, tuple) != pairs for row in plan.order for item in row):
            held = "[op, microbatch] pairs" if pairs else "op numbers"
            raise InputError(f"plan: order: with {plan.microbatches} micro-batches it holds {held}")
    if plan.source is not None:
        check_source(plan.source, "plan")
    return PlacementPlan(
        problem=plan.problem,
        planner=plan.planner,
        seed=plan.seed,
        device_of_group=np.array(plan.device_of_group, dtype=np.int32),
        priority=None if plan.priority is None else np.array(plan.priority, dtype=np.float64),
        order=plan.order,
        microbatches=plan.microbatches,
        schedule=plan.schedule,
        stage_of_group=None if plan.stage_of_group is None else np.array(plan.stage_of_group, dtype=np.int32),
        replicas=plan.replicas,
        shards=plan.shards,
        recompute=plan.recompute,
        optimizer_sharding=plan.optimizer_sharding,
        groups=None if plan.groups is None else data["groups"],
        source=plan.source,
        predicted=Prediction.from_dict(plan.predicted, "plan: predicted"),
    )
