"""`Space`: the values that strategies may take. A key that is left out allows all of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from rlplace.errors import InputError, show, unknown_name
from rlplace.plan.schedule import schedule_named
from rlplace.plan.strategy import ContextMethod
from rlplace.records import Count, Record, build, check_record, plain
from rlplace.strategy.costs import RECOMPUTE
from rlplace.strategy.drafts import OFFLOAD, Draft

_Some = Meta(min_length=1)
_Counts = Annotated[tuple[Count, ...], _Some] | None


class Space(Record, frozen=True):
    """Values that a strategy may take. A key binds only where its dimension exists: ``schedule=1f1b`` allows one stage.

    Attributes:
        replicate: Whole copies.
        shard: Devices that share parameters.
        tensor: Tensor-parallel degrees.
        context: Context-parallel degrees.
        context_method: How parts of the sequence attend to all of it: gather, heads, ring.
        expert: Expert-parallel degrees.
        tables: Replicas that divide embedding tables: all, or 1.
        pipeline: Places of the chain of stages.
        virtual: Stages a place.
        sharding: Levels of parameter sharding; levels from 1 up exist where shard is above 1.
        schedule: Names of schedules for chains.
        recompute: Recomputation of blocks: none, selective, full.
        offload: Parts of blocks in host memory: none, optimizer, all.
        microbatch: Samples of one pass of one replica.
        microbatches: Passes of one replica in a step.

    Raises:
        InputError: A value is out of range or unknown.
    """

    replicate: _Counts = None
    shard: _Counts = None
    tensor: _Counts = None
    context: _Counts = None
    context_method: Annotated[tuple[ContextMethod, ...], _Some] | None = None
    expert: _Counts = None
    tables: _Counts = None
    pipeline: _Counts = None
    virtual: _Counts = None
    sharding: Annotated[tuple[Annotated[int, Meta(ge=0, le=3)], ...], _Some] | None = None
    schedule: Annotated[tuple[str, ...], _Some] | None = None
    recompute: Annotated[tuple[Literal["none", "selective", "full"], ...], _Some] | None = None
    offload: Annotated[tuple[Literal["none", "optimizer", "all"], ...], _Some] | None = None
    microbatch: _Counts = None
    microbatches: _Counts = None

    def __post_init__(self) -> None:
        check_record(self, "space")
        for name in self.schedule or ():
            schedule_named(name)

    @staticmethod
    def parse(text: str) -> Space:
        """Reads ``"tensor=1,2,4 sharding=0,1"``.

        Raises:
            InputError: It has another form.
        """
        known = [field.name for field in msgspec.structs.fields(Space)]
        data: dict[str, Any] = {}
        for part in text.split():
            key, equals, values = part.partition("=")
            if not equals or not values:
                raise InputError(f'space: expected KEY=VALUE[,VALUE...] such as "tensor=1,2 sharding=0", found {show(part)}')
            if key not in known:
                raise unknown_name("key of space", key, known)
            if key in data:
                raise InputError(f"space: {key} stands twice; give its values once, separated by commas")
            data[key] = [_value(value) for value in values.split(",")]
        return build(Space, data, "space")

    def text(self) -> str:
        """Returns the space as `parse` reads it."""
        return " ".join(f"{key}={','.join(map(str, values))}" for key, values in plain(self).items())

    def allows(self, key: str, value: Any) -> bool:
        """Returns whether a value of a key is allowed."""
        values = getattr(self, key)
        return values is None or value in values

    def only(self, key: str, values: Iterable[Any]) -> list[Any]:
        """Returns the allowed values among `values`."""
        return [value for value in values if self.allows(key, value)]

    def forbids(self, draft: Draft) -> str | None:
        """Returns the first key that forbids a strategy; None where it is allowed."""
        if draft.beside:
            return next((key for one in draft.pipelines if (key := self.forbids(one)) is not None), None)
        for place in draft.places:
            for key in ("replicate", "shard", "tensor", "context", "expert", "tables", "sharding"):
                value = getattr(place, key)
                exists = place.shard * place.context > 1 if key == "sharding" else value > 1 or getattr(self, key) is not None
                if exists and not self.allows(key, value):
                    return key
            if place.context > 1 and not self.allows("context_method", place.context_method):
                return "context_method"
        if not self.allows("pipeline", len(draft.places)):
            return "pipeline"
        if draft.stages > 1:
            if not self.allows("virtual", draft.stages // len(draft.places)):
                return "virtual"
            if not self.allows("schedule", draft.schedule):
                return "schedule"
        chosen: dict[str, Iterable[Any]] = {
            "recompute": [RECOMPUTE[number] for number in set(draft.recompute)],
            "offload": [OFFLOAD[number] for number in set(draft.offload)],
            "microbatch": draft.microbatch,
            "microbatches": draft.microbatches,
        }
        return next((key for key, values in chosen.items() if not all(self.allows(key, value) for value in values)), None)


def _value(text: str) -> int | str:
    """Returns a number of a sane length, or a word."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else text
