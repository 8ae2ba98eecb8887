"""From recorded ATen ops to the arrays of an `OpGraph`: the owner of each event, and storages that flow between ops.

Recorded storages as the tensors of an `OpGraph`: producer and consumers of each, and which never leave their op.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from rlplace.model.aten import base_name, kind_of
from rlplace.model.capture.optimizers import OptimizerRule
from rlplace.model.capture.record import BACKWARD_OF, FORWARD_OF, OUTSIDE, UNOWNED, UPDATE_OF, Event, Leaf
from rlplace.model.graph.opgraph import ACTIVATION, BUFFER, GRADIENT, INPUT, PARAMETER

if TYPE_CHECKING:
    from rlplace.model.capture.record import Recording


Key = tuple[str, int]
"""An op before it has a number: phase of `record` and label or parameter index."""


class CyclicStepError(RuntimeError):
    """Ops of the captured granularity wait on each other, for example when the forward runs a backward of its own."""


@dataclass
class _Op:
    events: list[int] = field(default_factory=list)
    flops: float = 0.0
    bytes: int = 0


@dataclass
class Assembly:
    """Intermediate state: events by op, and the ops that touch each storage."""

    recording: Recording
    apart: frozenset[str]  # see `rlplace.model.capture.optimizers.apart`
    rule: OptimizerRule

    def __post_init__(self) -> None:
        self.events, self.leaves = self.recording.events, self.recording.leaves
        self.creator = {s: i for i, event in enumerate(self.events) for s in event.creates}
        self.owner_of_event: list[Key | None] = [
            None if event.phase in (UNOWNED, OUTSIDE) else (event.phase, event.owner) for event in self.events
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
            count += event.phase == UNOWNED and not event.is_view
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
        if not self.leaves[parameter].record.sparse:
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
            if leaf.record.sparse:
                self._update_rows(index, leaf, ops)
        # Autograd of a view is a view: such backward ops do nothing.
        idle = [k for k, op in ops.items() if k[0] == BACKWARD_OF and all(self.events[i].is_view for i in op.events)]
        for key in idle:
            del ops[key]
        return ops

    def _update_rows(self, index: int, leaf: Leaf, ops: dict[Key, _Op]) -> None:
        """Counts the update of the rows of a sparse gradient with the op that makes it: both grow with the batch."""
        assert leaf.gradient_storage is not None
        record, rule = leaf.record, self.rule.of(leaf.record.name in self.apart)
        rows = int(self.recording.storages[leaf.gradient_storage].rows)
        update, maker = ops[UPDATE_OF, index], ops[next(iter(self.gradient_sources[index]), (UPDATE_OF, index))]
        moved = rule.passes * (rule.weight_traffic * record.size_bytes + 2 * record.optimizer_bytes)
        (flops, size), (update.flops, update.bytes) = (update.flops, update.bytes), (0.0, 0)
        maker.flops += flops + rule.update_flops((rows, *record.shape[1:]))
        maker.bytes += size + int(moved * rows / record.shape[0])

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
            return (
                whole  # however small the product is beside the other kernels, so that the kind does not change with the batch
            )
        event = self.dominant(key)
        return whole if event is None else kind_of(event.name)


class TensorRow(NamedTuple):
    """A tensor: role, parameter (-1: none), producer (-1: none), bytes, consumers, storage (-1: several, or none)."""

    role: int
    parameter: int
    producer: int
    bytes: int
    consumers: list[int]
    storage: int


class Tensors:
    """Storages as tensors: one row each with its producer and its consumers."""

    def __init__(self, assembly: Assembly) -> None:
        self.assembly = assembly
        self.external: list[tuple[int, list[Key]]] = []
        self.produced: list[tuple[Key, int, tuple[Key, ...]]] = []
        self.ordering: dict[Key, dict[Key, None]] = {}
        self._inner: dict[Key, list[int]] = {}
        for storage in range(len(assembly.recording.storages)):
            self._add(storage)

    def _add(self, storage: int) -> None:
        assembly = self.assembly
        touches = [t for t in assembly.touches.get(storage, ()) if t[0][0] != UPDATE_OF]
        producer = assembly.producer(storage)
        users = list(dict.fromkeys(key for key, _ in touches if key != producer))
        self._order_writes(touches, producer)
        if producer is None or producer not in assembly.ops:
            if storage not in assembly.creator:
                self.external.append((storage, users))
        elif users:
            if producer[0] != UPDATE_OF:
                self.produced.append((producer, storage, tuple(users)))
        elif storage not in assembly.gradient_storages:
            self._inner.setdefault(producer, []).append(storage)

    def _order_writes(self, touches: list[tuple[Key, bool]], producer: Key | None) -> None:
        """Makes all ops after an in-place write, up to and including the next writer, wait for it."""
        for index, (writer, writes) in enumerate(touches):
            if not writes or writer == producer:
                continue
            for reader, again in touches[index + 1 :]:
                if reader != writer:
                    self.ordering.setdefault(writer, {})[reader] = None
                if again and reader != writer:
                    break

    def edges(self) -> list[tuple[Key, Key]]:
        """Returns every dependency between ops that are not updates."""
        result = [(producer, user) for producer, _, users in self.produced for user in users]
        result += [(writer, reader) for writer, readers in self.ordering.items() for reader in readers]
        return result

    def temporary_bytes(self, key: Key) -> int:
        """Returns peak of the storages that only this op touches, from their first to their last use."""
        storages = self._inner.get(key)
        if not storages:
            return 0
        events, inner = self.assembly.events, set(storages)
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for position, index in enumerate(self.assembly.ops[key].events):
            event = events[index]
            for storage in (*event.creates, *event.reads, *event.writes):
                if storage in inner:
                    first.setdefault(storage, position)
                    last[storage] = position
        change: dict[float, int] = {}
        for storage, position in first.items():
            size = int(self.assembly.recording.storages[storage].nbytes())
            change[position] = change.get(position, 0) + size
            change[last[storage] + 0.5] = change.get(last[storage] + 0.5, 0) - size
        live = peak = 0
        for moment in sorted(change):
            live += change[moment]
            peak = max(peak, live)
        return peak

    def rows(self, number: dict[Key, int]) -> list[TensorRow]:
        """Returns rows in order of producer."""
        leaf_of_storage = {leaf.storage: index for index, leaf in reversed(list(enumerate(self.assembly.leaves)))}
        rows: list[TensorRow] = []
        users_of = dict(self.external)
        for index, leaf in enumerate(self.assembly.leaves):
            is_first = leaf_of_storage[leaf.storage] == index
            users = sorted(number[key] for key in users_of.get(leaf.storage, ())) if is_first else []
            if leaf.record.trainable:
                users.append(number[(UPDATE_OF, index)])
            role = BUFFER if leaf.record.is_buffer else PARAMETER
            rows.append(TensorRow(role, index, -1, leaf.record.size_bytes, users, leaf.storage if is_first else -1))
        for storage, keys in self.external:
            size = int(self.assembly.recording.storages[storage].nbytes())
            if storage not in leaf_of_storage and keys:
                rows.append(TensorRow(INPUT, -1, -1, size, sorted(number[key] for key in keys), storage))
        merged: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}
        for producer, storage, keys_of in self.produced:
            size = int(self.assembly.recording.storages[storage].nbytes())
            users = sorted(number[key] for key in keys_of)
            edge = number[producer], tuple(users)
            # The tensors that an op saves for its own backward op have one lifetime and are never sent: one tensor.
            if edge in merged and producer[0] == FORWARD_OF and keys_of == ((BACKWARD_OF, producer[1]),):
                merged[edge] = merged[edge][0] + size, -1
            elif edge in merged:
                rows.append(TensorRow(ACTIVATION, -1, edge[0], size, users, storage))
            else:
                merged[edge] = size, storage
        rows += [
            TensorRow(ACTIVATION, -1, producer, size, list(users), storage)
            for (producer, users), (size, storage) in merged.items()
        ]
        for writer, readers in self.ordering.items():
            rows.append(TensorRow(ACTIVATION, -1, number[writer], 0, sorted(number[key] for key in readers), -1))
        for index, sources in self.assembly.gradient_sources.items():
            record = self.assembly.leaves[index].record
            if record.trainable:
                update = number[(UPDATE_OF, index)]
                rows += [TensorRow(GRADIENT, index, number[key], record.gradient_bytes, [update], -1) for key in sources]
        if any(label.whole for label in self.assembly.recording.labels):
            rows = _joined(rows)
        return sorted(rows, key=lambda row: (row.producer, row.role))


def _joined(rows: list[TensorRow]) -> list[TensorRow]:
    """Joins inputs and activations between the same ops to one tensor: modules kept whole may exchange one for each sample."""
    joined: dict[Any, TensorRow] = {}
    for index, row in enumerate(rows):
        edge = (row.role, row.producer, *row.consumers) if row.role in (INPUT, ACTIVATION) else index
        known = joined.get(edge)
        joined[edge] = row if known is None else row._replace(bytes=row.bytes + known.bytes, storage=-1)
    return list(joined.values())
