"""From recorded ATen ops to the arrays of an `OpGraph`: which op owns what, and which storages flow between ops."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlplace.graph.kinds import base_name, kind_of
from rlplace.graph.opgraph import ACTIVATION, BACKWARD, BUFFER, FORWARD, GRADIENT, INPUT, PARAMETER, UPDATE, OpGraph, Parameter
from rlplace.graph.record import BACKWARD_OF, FORWARD_OF, NOBODY, UPDATE_OF, Event, Recorder

Key = tuple[str, int]
"""An op before it has a number: phase of `record` and label or parameter index."""


class CyclicStepError(RuntimeError):
    """Ops of the captured granularity wait on each other, for example when the forward runs a backward of its own."""


@dataclass(frozen=True)
class Leaf:
    """A parameter or buffer of the fake copy.

    Attributes:
        record: What the graph says about it.
        storage: Its storage number.
        gradient_storage: Storage of its gradient after the step, None without one.
    """

    record: Parameter
    storage: int
    gradient_storage: int | None


@dataclass
class _Op:
    events: list[int] = field(default_factory=list)
    flops: float = 0.0
    bytes: int = 0


@dataclass
class Assembly:
    """Intermediate state: events by op, storages by who touches them."""

    recorder: Recorder
    leaves: Sequence[Leaf]
    optimizer: tuple[float, float]

    def __post_init__(self) -> None:
        self.events = self.recorder.events
        self.creator = {s: i for i, event in enumerate(self.events) for s in event.creates}
        self.owner_of_event: list[Key | None] = [
            None if event.phase == NOBODY else (event.phase, event.owner) for event in self.events
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
        """Gives ops that autograd ran for nobody to the op that made their input, or that first reads their output."""
        count = 0
        orphans: list[int] = []
        for index, event in enumerate(self.events):
            if self.owner_of_event[index] is not None:
                continue
            count += not event.is_view
            made_by = [self.owner_of_event[self.creator[s]] for s in event.reads if s in self.creator]
            self.owner_of_event[index] = next((key for key in reversed(made_by) if key is not None), None)
            if self.owner_of_event[index] is None:
                orphans.append(index)
        for index in reversed(orphans):
            made = set(self.events[index].creates)
            for later in range(index + 1, len(self.events)):
                if made.intersection(self.events[later].reads) and self.owner_of_event[later] is not None:
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
        """Storages that autograd copies into a fresh gradient buffer, right after it has made the buffer."""
        event = self.events[made_at]
        if event.reads:
            return list(event.reads)
        for later in self.events[made_at + 1 : made_at + 4]:
            if storage in later.writes:
                return [s for s in later.reads if s != storage]
        return []

    def _collect_ops(self) -> dict[Key, _Op]:
        ops: dict[Key, _Op] = {(FORWARD_OF, label): _Op() for label in range(len(self.recorder.labels))}
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
        """Per storage, who touches it in execution order, and whether they write it."""
        touches: dict[int, list[tuple[Key, bool]]] = {}

        def touch(storage: int, key: Key, writes: bool) -> None:
            rows = touches.setdefault(storage, [])
            if not rows or rows[-1] != (key, writes):
                rows.append((key, writes))

        order: list[tuple[int, int, Key]] = []
        last = 0
        for label in range(len(self.recorder.labels)):
            key = (FORWARD_OF, label)
            events = self.ops[key].events
            if events:
                last = max(last, events[-1])
            else:
                order.append((last, label, key))
        silent = iter(sorted(order))
        waiting = next(silent, None)
        for index, (event, key) in enumerate(zip(self.events, self.owner_of_event, strict=True)):
            while waiting is not None and waiting[0] < index:
                self._touch_silent(waiting[2], touch)
                waiting = next(silent, None)
            if key is None or key not in self.ops:
                continue
            for storage in event.reads:
                touch(storage, key, storage in event.writes)
            for storage in event.writes:
                if storage not in event.reads:
                    touch(storage, key, True)
        while waiting is not None:
            self._touch_silent(waiting[2], touch)
            waiting = next(silent, None)
        return touches

    def _touch_silent(self, key: Key, touch: Any) -> None:
        """A forward op that dispatched nothing passes its input on, as dropout does in evaluation."""
        label = self.recorder.labels[key[1]]
        for storage in label.inputs:
            if storage in label.outputs:
                touch(storage, key, False)

    def is_view(self, key: Key) -> bool:
        return all(self.events[i].is_view for i in self.ops[key].events)

    def producer(self, storage: int) -> Key | None:
        made_at = self.creator.get(storage)
        return None if made_at is None else self.owner_of_event[made_at]

    def dominant(self, key: Key) -> Event | None:
        """The ATen op that an op mostly consists of: by FLOPs at 100 per byte, or bytes."""
        work = [self.events[i] for i in self.ops[key].events if not self.events[i].is_view]
        return max(work, key=lambda e: max(e.flops / 100.0, float(e.bytes)), default=None)

    def kind(self, key: Key) -> str:
        if key[0] == UPDATE_OF:
            return "optimizer"
        label = self.recorder.labels[key[1]]
        if label.whole:
            return "module"
        whole = kind_of(base_name(label.target))
        if whole in ("attention", "recurrent", "scan"):
            return whole
        if key[0] == FORWARD_OF and self.is_view(key):
            return "view"
        event = self.dominant(key)
        return whole if event is None else kind_of(event.name)


def build_graph(assembly: Assembly, inputs: Sequence[int], **fields: Any) -> OpGraph:
    """Numbers the ops, forms the tensors and returns the checked graph.

    Args:
        assembly: Events by op.
        inputs: Storages of the example inputs.
        fields: `name`, `samples`, `capture` and `source` of the graph.
    """
    tensors = _Tensors(assembly)
    order = _execution_order(assembly, tensors)
    number = {key: index for index, key in enumerate(order)}
    labels = assembly.recorder.labels
    names, targets, modules, dtypes = [], [], [], []
    phase = np.zeros(len(order), dtype=np.int8)
    forward = np.full(len(order), -1, dtype=np.int32)
    parameter = np.full(len(order), -1, dtype=np.int32)
    flops = np.zeros(len(order))
    moved = np.zeros(len(order), dtype=np.int64)
    dims: dict[int, dict[str, int]] = {}
    for index, key in enumerate(order):
        kind, owner = key
        op, event = assembly.ops[key], assembly.dominant(key)
        flops[index], moved[index] = op.flops, op.bytes
        dtypes.append("none" if event is None else event.dtype)
        if kind == UPDATE_OF:
            record = assembly.leaves[owner].record
            phase[index], parameter[index] = UPDATE, owner
            names.append(f"{record.name}/update")
            targets.append("optimizer")
            modules.append(record.name.rpartition(".")[0])
            flops[index] += assembly.optimizer[0] * _elements(record)
            moved[index] += int(assembly.optimizer[1] * record.size_bytes) + 2 * record.optimizer_bytes
            dtypes[-1] = record.dtype
            continue
        label = labels[owner]
        modules.append(label.module)
        forward[index] = number[(FORWARD_OF, owner)]
        if kind == FORWARD_OF:
            names.append(label.name)
            targets.append(label.target)
            products = [assembly.events[i].dims for i in op.events if assembly.events[i].dims]
            if len(products) == 1 and products[0]:
                dims[index] = products[0]
        else:
            phase[index] = BACKWARD
            names.append(f"{label.name}.backward")
            targets.append(label.target if event is None else f"aten.{event.name}")
    rows = tensors.rows(inputs, number)
    return OpGraph(
        op_names=tuple(names),
        op_target=tuple(targets),
        op_kind=tuple(assembly.kind(key) for key in order),
        op_module=tuple(modules),
        op_phase=phase,
        op_forward=forward,
        op_parameter=parameter,
        op_dtype=tuple(dtypes),
        op_flops=flops,
        op_bytes=moved,
        op_temporary_bytes=np.array([tensors.temporary_bytes(key) for key in order], dtype=np.int64),
        op_colocate=_colocation(assembly, order, number),
        parameters=tuple(leaf.record for leaf in assembly.leaves),
        tensor_role=np.array([row[0] for row in rows], dtype=np.int8),
        tensor_parameter=np.array([row[1] for row in rows], dtype=np.int32),
        tensor_producer=np.array([row[2] for row in rows], dtype=np.int32),
        tensor_bytes=np.array([row[3] for row in rows], dtype=np.int64),
        consumer_ptr=np.concatenate([[0], np.cumsum([len(row[4]) for row in rows])]).astype(np.int64),
        consumers=np.array([op for row in rows for op in row[4]], dtype=np.int32),
        op_dims=dims,
        **fields,
    )


def _elements(record: Parameter) -> int:
    return int(np.prod(record.shape, dtype=np.int64))


class _Tensors:
    """Storages as tensors: one row each with its producer and its consumers."""

    def __init__(self, assembly: Assembly) -> None:
        self.assembly = assembly
        self.external: list[tuple[int, list[Key]]] = []
        self.made: list[tuple[Key, int, tuple[Key, ...]]] = []
        self.ordering: dict[Key, dict[Key, None]] = {}
        self._inner: dict[Key, list[int]] = {}
        for storage in range(len(assembly.recorder.storages)):
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
                self.made.append((producer, int(assembly.recorder.storages[storage].nbytes()), tuple(users)))
        elif storage not in assembly.gradient_storages:
            self._inner.setdefault(producer, []).append(storage)

    def _order_writes(self, touches: list[tuple[Key, bool]], producer: Key | None) -> None:
        """After an in-place write, everybody up to and including the next writer waits for it."""
        for index, (writer, writes) in enumerate(touches):
            if not writes or writer == producer:
                continue
            for reader, again in touches[index + 1 :]:
                if reader != writer:
                    self.ordering.setdefault(writer, {})[reader] = None
                if again and reader != writer:
                    break

    def edges(self) -> list[tuple[Key, Key]]:
        """Every dependency between ops that are not updates."""
        result = [(producer, user) for producer, _, users in self.made for user in users]
        result += [(writer, reader) for writer, readers in self.ordering.items() for reader in readers]
        return result

    def temporary_bytes(self, key: Key) -> int:
        """Peak of the storages that only this op touches, from their first to their last use."""
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
            size = int(self.assembly.recorder.storages[storage].nbytes())
            change[position] = change.get(position, 0) + size
            change[last[storage] + 0.5] = change.get(last[storage] + 0.5, 0) - size
        live = peak = 0
        for position in sorted(change):
            live += change[position]
            peak = max(peak, live)
        return peak

    def rows(self, inputs: Sequence[int], number: dict[Key, int]) -> list[tuple[int, int, int, int, list[int]]]:
        """Rows (role, parameter, producer, bytes, consumers), in order of producer."""
        leaf_of_storage = {leaf.storage: index for index, leaf in reversed(list(enumerate(self.assembly.leaves)))}
        rows: list[tuple[int, int, int, int, list[int]]] = []
        users_of = dict(self.external)
        for index, leaf in enumerate(self.assembly.leaves):
            users = (
                sorted(number[key] for key in users_of.get(leaf.storage, ())) if leaf_of_storage[leaf.storage] == index else []
            )
            if leaf.record.trainable:
                users.append(number[(UPDATE_OF, index)])
            rows.append((BUFFER if leaf.record.is_buffer else PARAMETER, index, -1, leaf.record.size_bytes, users))
        for storage, keys in self.external:
            size = int(self.assembly.recorder.storages[storage].nbytes())
            if storage not in leaf_of_storage and keys:
                rows.append((INPUT, -1, -1, size, sorted(number[key] for key in keys)))
        merged: dict[tuple[int, tuple[int, ...]], int] = {}
        for producer, size, keys_of in self.made:
            users = sorted(number[key] for key in keys_of)
            place = number[producer], tuple(users)
            # What an op saves for its own backward op has one lifetime and never travels: one tensor.
            if merged.get(place) is not None and producer[0] == FORWARD_OF and keys_of == ((BACKWARD_OF, producer[1]),):
                merged[place] += size
            elif place in merged:
                rows.append((ACTIVATION, -1, place[0], size, users))
            else:
                merged[place] = size
        rows += [(ACTIVATION, -1, producer, size, list(users)) for (producer, users), size in merged.items()]
        for writer, readers in self.ordering.items():
            rows.append((ACTIVATION, -1, number[writer], 0, sorted(number[key] for key in readers)))
        for index, sources in self.assembly.gradient_sources.items():
            record = self.assembly.leaves[index].record
            if record.trainable:
                update = number[(UPDATE_OF, index)]
                rows += [(GRADIENT, index, number[key], record.gradient_bytes, [update]) for key in sources]
        return sorted(rows, key=lambda row: (row[2], row[0]))


def _execution_order(assembly: Assembly, tensors: _Tensors) -> list[Key]:
    """Forward, backward, update; backward ops by the time of their first work, as far as dependencies allow."""
    keys = [key for key in assembly.ops if key[0] != UPDATE_OF]
    priority = {
        key: (0, key[1]) if key[0] == FORWARD_OF else (1, assembly.ops[key].events[0]) for key in keys
    }  # fmt: skip
    successors: dict[Key, list[Key]] = {key: [] for key in keys}
    missing = dict.fromkeys(keys, 0)
    for source, target in set(tensors.edges()):
        successors[source].append(target)
        missing[target] += 1
    ready = [(priority[key], key) for key in keys if not missing[key]]
    heapq.heapify(ready)
    order: list[Key] = []
    while ready:
        _, key = heapq.heappop(ready)
        order.append(key)
        for target in successors[key]:
            missing[target] -= 1
            if not missing[target]:
                heapq.heappush(ready, (priority[target], target))
    if len(order) < len(keys):
        stuck = next(key for key in keys if missing[key] > 0)
        raise CyclicStepError(f"op {assembly.recorder.labels[stuck[1]].name} waits on a cycle")
    return order + sorted(key for key in assembly.ops if key[0] == UPDATE_OF)


def _colocation(assembly: Assembly, order: list[Key], number: dict[Key, int]) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Union of the ops that must share a device; the smallest op number of each set stands for it."""
    parent = list(range(len(order)))

    def find(op: int) -> int:
        while parent[op] != op:
            parent[op] = parent[parent[op]]
            op = parent[op]
        return op

    def unite(a: int, b: int) -> None:
        a, b = find(a), find(b)
        parent[max(a, b)] = min(a, b)

    for key in order:
        if key[0] == BACKWARD_OF:
            unite(number[key], number[(FORWARD_OF, key[1])])
    views = {key for key in order if key[0] == FORWARD_OF and assembly.is_view(key)}
    for storage, touches in assembly.touches.items():
        producer = assembly.producer(storage)
        forward = [(key, writes) for key, writes in touches if key[0] == FORWARD_OF]
        writers = [key for key, writes in forward if writes]
        aliases = [key for key, _ in forward if key in views]
        if producer is not None and producer[0] == FORWARD_OF:
            group = [producer, *writers, *aliases]
        elif writers:
            # An in-place chain on an input or buffer has no producer to follow; everybody who sees it stays together.
            group = [key for key, _ in forward]
        else:
            continue
        for key in group[1:]:
            unite(number[group[0]], number[key])
    return np.array([find(op) for op in range(len(order))], dtype=np.int32)
