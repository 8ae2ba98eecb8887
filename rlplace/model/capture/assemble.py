"""From recorded ATen ops to the arrays of an `OpGraph`: the owner of each event, and storages that flow between ops."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlplace.model.axes.dims import base_name, kind_of
from rlplace.model.capture.record import BACKWARD_OF, FORWARD_OF, NOBODY, OUTSIDE, UPDATE_OF, Event
from rlplace.model.graph.opgraph import Parameter

if TYPE_CHECKING:
    from rlplace.model.capture.recording import Recording

Key = tuple[str, int]
"""An op before it has a number: phase of `record` and label or parameter index."""


class CyclicStepError(RuntimeError):
    """Ops of the captured granularity wait on each other, for example when the forward runs a backward of its own."""


@dataclass(frozen=True)
class Leaf:
    """A parameter or buffer of the fake copy.

    Attributes:
        record: Its entry in the graph.
        storage: Its storage number.
        gradient_storage: Storage of its gradient after the step, None without one.
        idle: Whether it requires a gradient and receives none.
    """

    record: Parameter
    storage: int
    gradient_storage: int | None
    idle: bool = False


@dataclass
class _Op:
    events: list[int] = field(default_factory=list)
    flops: float = 0.0
    bytes: int = 0


@dataclass
class Assembly:
    """Intermediate state: events by op, and the ops that touch each storage."""

    recording: Recording
    optimizer: tuple[float, float]

    def __post_init__(self) -> None:
        self.events, self.leaves = self.recording.events, self.recording.leaves
        self.creator = {s: i for i, event in enumerate(self.events) for s in event.creates}
        self.owner_of_event: list[Key | None] = [
            None if event.phase in (NOBODY, OUTSIDE) else (event.phase, event.owner) for event in self.events
        ]
        self.unattributed = self._adopt_orphans()
        self.gradient_sources: dict[int, list[Key]] = {}
        self.gradient_storages: set[int] = set()
        for index, leaf in enumerate(self.leaves):
            if leaf.gradient_storage is not None:
                self._trace_gradient(index, leaf.gradient_storage)
        self.ops = self._collect_ops()
        self.touches = self._collect_touches()

    def _adopt_orphans(self) -> int:
        """Assigns ops that autograd ran for no label to the op that made their input, or that first reads their output."""
        count = 0
        orphans: list[int] = []
        for index, event in enumerate(self.events):
            if self.owner_of_event[index] is not None:
                continue
            count += event.phase == NOBODY and not event.is_view
            made_by = [self.owner_of_event[self.creator[s]] for s in event.reads if s in self.creator]
            self.owner_of_event[index] = next((key for key in reversed(made_by) if key is not None), None)
            if self.owner_of_event[index] is None:
                orphans.append(index)
        for index in reversed(orphans):
            created = set(self.events[index].creates)
            for later in range(index + 1, len(self.events)):
                if created.intersection(self.events[later].reads) and self.owner_of_event[later] is not None:
                    self.owner_of_event[index] = self.owner_of_event[later]
                    break
        return count

    def _trace_gradient(self, parameter: int, storage: int) -> None:
        """Finds the ops that contribute to a parameter's gradient; sums of several ops' parts belong to its update."""
        sources: list[int] = []
        sums: list[int] = []
        pending, seen = [storage], {storage}
        while pending:
            current = pending.pop()
            made_at = self.creator.get(current)
            parts: list[int] = []
            if made_at is not None:
                event = self.events[made_at]
                if event.phase == UPDATE_OF:
                    parts = self._copied_into(made_at, current)
                elif event.phase == BACKWARD_OF and event.same_shape:
                    parts = list(event.reads)
                    sums.append(made_at)
            fresh = [part for part in parts if part not in seen]
            if fresh:
                seen.update(fresh)
                pending.extend(fresh)
            else:
                sources.append(current)
        keys = [self.owner_of_event[self.creator[s]] if s in self.creator else None for s in sources]
        owners = list(dict.fromkeys(key for key in reversed(keys) if key is not None and key[0] != UPDATE_OF))
        if len(owners) > 1:
            for made_at in sums:
                self.owner_of_event[made_at] = (UPDATE_OF, parameter)
        self.gradient_sources[parameter] = owners
        self.gradient_storages.update(seen)

    def _copied_into(self, made_at: int, storage: int) -> list[int]:
        """Returns storages that autograd copies into a fresh gradient buffer, right after it has made the buffer."""
        event = self.events[made_at]
        if event.reads:
            return list(event.reads)
        for later in self.events[made_at + 1 : made_at + 4]:
            if storage in later.writes:
                return [s for s in later.reads if s != storage]
        return []

    def _collect_ops(self) -> dict[Key, _Op]:
        ops: dict[Key, _Op] = {(FORWARD_OF, label): _Op() for label in range(len(self.recording.labels))}
        for index, (event, key) in enumerate(zip(self.events, self.owner_of_event, strict=True)):
            if key is None:
                continue
            op = ops.setdefault(key, _Op())
            op.events.append(index)
            op.flops += event.flops
            op.bytes += event.bytes
        for index, leaf in enumerate(self.leaves):
            if leaf.record.trainable:
                ops.setdefault((UPDATE_OF, index), _Op())
        # Autograd of a view is a view: such backward ops do nothing.
        idle = [k for k, op in ops.items() if k[0] == BACKWARD_OF and all(self.events[i].is_view for i in op.events)]
        for key in idle:
            del ops[key]
        return ops

    def _collect_touches(self) -> dict[int, list[tuple[Key, bool]]]:
        """Returns per storage, the ops that touch it in execution order, and whether they write it."""
        touches: dict[int, list[tuple[Key, bool]]] = {}

        def touch(storage: int, key: Key, writes: bool) -> None:
            rows = touches.setdefault(storage, [])
            if not rows or rows[-1] != (key, writes):
                rows.append((key, writes))

        for event, key in zip(self.events, self.owner_of_event, strict=True):
            if key is None or key not in self.ops:
                continue
            for storage in event.reads:
                touch(storage, key, storage in event.writes)
            for storage in event.writes:
                if storage not in event.reads:
                    touch(storage, key, True)
        return touches

    def is_view(self, key: Key) -> bool:
        return all(self.events[i].is_view for i in self.ops[key].events)

    def launches(self, key: Key) -> int:
        """Returns kernels that an op launches: one for an update, one per ATen op that does work for the others."""
        if key[0] == UPDATE_OF:
            return 1
        return sum(1 for i in self.ops[key].events if self.events[i].flops > 0 or self.events[i].bytes > 0)

    def producer(self, storage: int) -> Key | None:
        made_at = self.creator.get(storage)
        return None if made_at is None else self.owner_of_event[made_at]

    def dominant(self, key: Key) -> Event | None:
        """Returns the ATen op that an op mostly consists of: by FLOPs at 100 per byte, or bytes."""
        work = [self.events[i] for i in self.ops[key].events if not self.events[i].is_view]
        return max(work, key=lambda e: max(e.flops / 100.0, float(e.bytes)), default=None)

    def kind(self, key: Key) -> str:
        if key[0] == UPDATE_OF:
            return "optimizer"
        label = self.recording.labels[key[1]]
        if label.whole:
            return "module"
        whole = kind_of(base_name(label.target))
        if whole in ("attention", "recurrent", "scan"):
            return whole
        if key[0] == FORWARD_OF and self.is_view(key):
            return "view"
        if whole in ("gemm", "bmm", "conv") and any(kind_of(self.events[i].name) == whole for i in self.ops[key].events):
            return whole  # however small the product is beside what else runs, so that the kind does not change with the batch
        event = self.dominant(key)
        return whole if event is None else kind_of(event.name)
