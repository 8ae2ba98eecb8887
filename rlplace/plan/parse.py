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
    """What a plan file holds; `predicted` is read by `rlplace.plan.prediction`, `order` by what its micro-batches make it."""

    problem: str
    planner: str
    seed: _Entry
    device_of_group: list[_Index]
    priority: list[_Number] | None = None
    order: Any = None
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
    order = plan.order
    if order is not None:
        if "priority" in data or "schedule" in data:
            raise InputError("plan: order excludes priority and schedule")
        # A union of the two would be one type, but msgspec 0.22 crashes on constrained numbers beside pairs.
        kind = list[list[_Entry]] if plan.microbatches == 1 else list[list[tuple[_Entry, _Entry]]]
        order = build(kind, order, "plan: order")
    if plan.source is not None:
        check_source(plan.source, "plan")
    return PlacementPlan(
        problem=plan.problem,
        planner=plan.planner,
        seed=plan.seed,
        device_of_group=np.array(plan.device_of_group, dtype=np.int32),
        priority=None if plan.priority is None else np.array(plan.priority, dtype=np.float64),
        order=order,
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
