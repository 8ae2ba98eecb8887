"""Plan files, version 2, every value checked (docs/formats.md).

A plan holds a strategy and, where single groups are placed, a placement. The strategy of a placement plan has one stage, whose
axis `branch` counts the devices that groups are placed on; its blocks are left out, since the placement says more.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from rlplace.errors import InputError
from rlplace.limits import PROBLEM_DEVICES
from rlplace.plan.plan import PlacementPlan
from rlplace.plan.prediction import Prediction
from rlplace.plan.strategy import Strategy
from rlplace.problem.check import check_source
from rlplace.records import Count, Record, build, plain

_Device = Annotated[int, Meta(ge=0, lt=PROBLEM_DEVICES)]
_Entry = Annotated[int, Meta(ge=-(1 << 31), lt=1 << 62)]
_Number = Annotated[float, Meta(gt=-1e300, lt=1e300)]
_Nothing: NDArray[np.int32] = np.zeros(0, dtype=np.int32)


class _Group(Record, frozen=True):
    """The part of the model that a group holds.

    Attributes:
        name: The group.
        modules: Paths of its modules.
        ops: Names of its ops.
    """

    name: str
    modules: list[str] = msgspec.field(default_factory=list)
    ops: list[str] = msgspec.field(default_factory=list)


class _Placement(Record, frozen=True):
    """Devices of groups.

    Attributes:
        problem: Fingerprint of the problem that it solves; any other is refused.
        device_of_group: Coordinate on the axis `branch` by group.
        priority: By op; the ready op with the highest runs first.
        order: By device its op numbers in order, without ops of collectives; excludes `priority`.
    """

    problem: str
    device_of_group: list[_Device]
    priority: list[_Number] | None = None
    order: list[list[_Entry]] | None = None


class _Plan(Record, frozen=True):
    """A plan file; strategy and prediction have readers of their own.

    Attributes:
        planner: Name of the planner.
        seed: Its seed.
        strategy: Replicas, sharding, stages; of a placement plan one stage without blocks, with the axis `branch`.
        question: Hash of graph, cluster, costs, batch and precision; a placement plan has `placement.problem` instead.
        placement: Devices of groups.
        groups: What the groups of a placement hold.
        source: How to build the model and problem again.
        predicted: Step time, memory, rivals.
    """

    planner: str
    seed: _Entry
    strategy: Any
    question: str | None = None
    placement: _Placement | None = None
    groups: list[_Group] | None = None
    source: dict[str, Any] | None = None
    predicted: Any = msgspec.field(default_factory=dict)


def plan_to_dict(plan: PlacementPlan) -> dict[str, Any]:
    """Returns a plan as the data of a file without its header, defaults left out."""
    data: dict[str, Any] = {"planner": plan.planner, "seed": plan.seed}
    if plan.strategy is not None:
        data |= {"question": plan.problem, "strategy": plan.strategy.to_dict()}
    else:
        kept = ("problem", "device_of_group", "priority", "order")
        placement = {key: plain(value) for key in kept if (value := getattr(plan, key)) is not None}
        data |= {"strategy": _around(plan.device_of_group, plan.samples), "placement": placement}
    data |= {key: plain(value) for key in ("groups", "source") if (value := getattr(plan, key)) is not None}
    predicted = plan.predicted.to_dict()
    return data | ({"predicted": predicted} if predicted else {})


def _difference(found: Any, wanted: Any, where: str) -> str | None:
    """Returns the way to the first part of plain data that differs, in type or value; None where all is the same."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        keys = dict.fromkeys((*found, *wanted))
        inside = (_difference(found.get(key), wanted.get(key), f"{where}.{key}") for key in keys)
    elif isinstance(found, list) and isinstance(wanted, list) and len(found) == len(wanted):
        inside = (_difference(*pair, f"{where}[{number}]") for number, pair in enumerate(zip(found, wanted, strict=True)))
    else:
        return None if type(found) is type(wanted) and found == wanted else where
    return next((way for way in inside if way is not None), None)


def _around(device_of_group: NDArray[np.int32], samples: int | None) -> dict[str, Any]:
    """Returns the strategy of a placement plan."""
    width = int(device_of_group.max(initial=0)) + 1
    stage: dict[str, Any] = {"devices": list(range(width))} | ({"mesh": {"branch": width}} if width > 1 else {})
    data: dict[str, Any] = {"microbatches": [1], "stages": [stage]}
    return data if samples is None else {"batch": samples, "microbatch": [samples], **data}


def plan_from_dict(data: dict[str, Any]) -> PlacementPlan:
    """Builds a plan from the data of a file without its header.

    Raises:
        InputError: Names the key that is wrong.
    """
    if "device_of_group" in data:
        raise InputError("plan: a file of version 1, which is no longer read; plan again: rlplace place MODEL")
    plan = build(_Plan, data, "plan")
    if plan.source is not None:
        check_source(plan.source, "plan")
    beside: dict[str, Any] = {
        "groups": None if plan.groups is None else data["groups"],
        "source": plan.source,
        "predicted": Prediction.from_dict(plan.predicted, "plan: predicted"),
    }
    placement = plan.placement
    if placement is None:
        if plan.question is None:
            raise InputError("plan: key 'question' is missing: the fingerprint of what a strategy answers")
        strategy = Strategy.from_dict(plan.strategy, "plan: strategy")
        return PlacementPlan(plan.question, plan.planner, plan.seed, _Nothing, strategy=strategy, **beside)
    if plan.question is not None:
        raise InputError("plan: a placement plan answers its placement's problem; leave question out")
    if placement.order is not None and placement.priority is not None:
        raise InputError("plan: order excludes priority")
    devices = np.array(placement.device_of_group, dtype=np.int32)
    samples = plan.strategy.get("batch") if isinstance(plan.strategy, dict) else None
    build(Count | None, samples, "plan: strategy.batch")
    if (other := _difference(plan.strategy, _around(devices, samples), "strategy")) is not None:
        raise InputError(
            f"plan: {other}: a placement is one pass over one stage with devices 0 to {devices.max(initial=0)} on its axis "
            "branch, and this is another; plan again: rlplace place MODEL"
        )
    return PlacementPlan(
        problem=placement.problem,
        planner=plan.planner,
        seed=plan.seed,
        device_of_group=devices,
        priority=None if placement.priority is None else np.array(placement.priority, dtype=np.float64),
        order=placement.order,
        samples=samples,
        **beside,
    )
