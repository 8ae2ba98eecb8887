"""Recorded storages as the tensors of an `OpGraph`: producer and consumers of each, and which never leave their op."""

from __future__ import annotations

from typing import NamedTuple

from rlplace.model.capture.assemble import Assembly, Key
from rlplace.model.capture.record import BACKWARD_OF, FORWARD_OF, UPDATE_OF
from rlplace.model.graph.opgraph import ACTIVATION, BUFFER, GRADIENT, INPUT, PARAMETER


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
        """After an in-place write, all ops up to and including the next writer wait for it."""
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
            # What an op saves for its own backward op has one lifetime and never travels: one tensor.
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
        return sorted(rows, key=lambda row: (row.producer, row.role))
