"""Collects the tasks of a step in the order in which devices run them, and makes a problem and an order of them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlplace.cluster.links import Device, Links
from rlplace.problem import BACKWARD, FORWARD, UPDATE, Collective, Problem
from rlplace.problem.check import COLLECTIVE
from rlplace.problem.order import grouped
from rlplace.strategy.op_level.stage_ops import PassRows

PHASE_OF_PART = {"F": FORWARD, "B": BACKWARD, "I": BACKWARD, "W": BACKWARD, "U": UPDATE}

UPDATE_RUN = "U"
"""Of `DeviceRun.kind`: updates."""

SEND, TIE, GATHER = "send", "tie", "gather"
"""First words of the keys of exchanges: what stages send each other goes on with lane, stage, the other stage,
micro-batch and bytes; a tie with a number; all others with the place, then with the block, or the number of a bucket."""

LONGEST = 100
"""Characters of a device's name; many devices have one together."""


class DeviceRun(NamedTuple):
    """Ops that a device runs one after another.

    Attributes:
        device: Number of the device.
        kind: As in `rlplace.plan.actions`, or `UPDATE_RUN`, with an op a block of the device.
        stage: -1 for updates; likewise `microbatch`.
        microbatch: Number of the micro-batch.
        first: Its first op.
        part: What its ops are, in order; None for updates.
    """

    device: int
    kind: str
    stage: int
    microbatch: int
    first: int
    part: PassRows | None


@dataclass
class StepBuild:
    """Tasks of a step on some devices. Every op runs once; what a device runs, it runs in the order in which it was added.

    Attributes:
        devices: How many there are.
        waiting: For each device the ops that its next op waits for.
        last: For each device its last op, -1 before the first.
        runs: What devices run beside collectives with one another.
        exchanges: Of these collectives, in the order of the problem's, by the keys that `exchange` was given, ops and channels.
    """

    devices: int
    waiting: list[list[int]] = field(default_factory=list)
    last: list[int] = field(default_factory=list)
    runs: list[DeviceRun] = field(default_factory=list)
    exchanges: dict[Hashable, tuple[list[int], tuple[int, ...]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.waiting, self.last = [[] for _ in range(self.devices)], [-1] * self.devices
        self._order: list[list[NDArray[np.int64]]] = [[] for _ in range(self.devices)]
        self._count = 0
        self._ops: list[tuple[NDArray[np.float64], NDArray[np.int64], int, int]] = []
        self._names: list[str] = []
        self._tensors: list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]] = []
        self._edges: list[tuple[int, int, int]] = []
        self._channels: dict[Hashable, int] = {}

    def run(
        self,
        device: int,
        part: str,
        name: str,
        seconds: NDArray[np.float64],
        temporary_bytes: NDArray[np.int64],
        labels: Sequence[str] | None = None,
    ) -> int:
        """Returns ops that a device runs next, one after another, with labels before the name; the number of the first."""
        base = self._add(device, part, name, seconds, temporary_bytes, labels)
        self._order[device].append(np.arange(base, self._count))
        for op in self.waiting[device]:
            self.edge(op, base)
        self.waiting[device] = []
        self.last[device] = self._count - 1
        return base

    def exchange(
        self,
        key: Hashable,
        device: int,
        name: str,
        seconds: float,
        channels: Iterable[Hashable],
        part: str,
        after: Iterable[int],
        held_bytes: int = 0,
    ) -> int:
        """Returns a device's op, after others, of the collective that all devices which give this key make together."""
        op = self._add(device, part, name, np.array([seconds]), np.array([held_bytes]))
        held = tuple(sorted(self._channels.setdefault(channel, len(self._channels)) for channel in channels))
        self.exchanges.setdefault(key, ([], held))[0].append(op)
        for before in after:
            self.edge(before, op)
        return op

    def edge(self, source: int, target: int, size_bytes: int = 0) -> None:
        """An op waits for another one, and what that one makes lives until then."""
        if source >= 0:
            self._edges.append((source, size_bytes, target))

    def tensors(self, source: NDArray[np.int64], size_bytes: NDArray[np.int64], target: NDArray[np.int64]) -> None:
        """Many of them."""
        self._tensors.append((source, size_bytes, target))

    def _add(
        self,
        device: int,
        part: str,
        name: str,
        seconds: NDArray[np.float64],
        temporary: NDArray[np.int64],
        labels: Sequence[str] | None = None,
    ) -> int:
        base, count = self._count, len(seconds)
        self._ops.append((seconds, temporary, device, PHASE_OF_PART[part]))
        if labels is None:
            self._names += [name] if count == 1 else [f"{name}.{row}" for row in range(count)]
        else:
            self._names += [f"{label} {name}.{row}" for row, label in enumerate(labels)]
        self._count += count
        return base

    def problem(self, name: str, samples: int, names: list[str], resident_bytes: list[int]) -> tuple[Problem, list[list[int]]]:
        """Returns the step as a problem with a group a device, of these names, and what each of them runs in order.

        Hand-overs between devices are collectives; what ops on different devices wait for otherwise takes no time.
        """
        counts = [len(item[0]) for item in self._ops]
        seconds = np.concatenate([item[0] for item in self._ops])
        device, phase = (np.repeat([item[at] for item in self._ops], counts) for at in (2, 3))
        members = np.array([op for ops, _ in self.exchanges.values() for op in ops], dtype=np.int64)
        kinds = np.full(self._count, "", dtype=object)
        kinds[members] = COLLECTIVE
        edges = np.array(self._edges, dtype=np.int64).reshape(-1, 3)
        source, size, target = (
            np.concatenate([edges[:, at], *(item[at] for item in self._tensors)]).astype(np.int64) for at in range(3)
        )
        same = source == target  # nobody else reads it
        readers = np.flatnonzero(~same)
        ptr, consumers = grouped(readers, target[readers], len(source))
        none, pairs = np.full(self.devices, -1, dtype=np.int64), (self.devices, self.devices)
        problem = Problem(
            name=name,
            samples_per_microbatch=samples,
            devices=tuple(Device(name[:LONGEST]) for name in names),
            links=Links(np.ones(pairs), np.zeros(pairs), channels=(((),) * self.devices,) * self.devices),
            group_names=tuple(name[:LONGEST] for name in names),
            resident_bytes=np.array(resident_bytes, dtype=np.int64),
            weight_bytes=none, gradient_bytes=none.copy(), optimizer_bytes=none.copy(),
            group_device=np.arange(self.devices, dtype=np.int32),
            op_names=tuple(self._names),
            op_group=device.astype(np.int32),
            op_phase=phase.astype(np.int8),
            time_s=np.repeat(seconds[:, None], self.devices, axis=1),
            temporary_bytes=np.concatenate([item[1] for item in self._ops]).astype(np.int64),
            tensor_producer=source.astype(np.int32),
            tensor_owner=np.full(len(source), -1, dtype=np.int32),
            tensor_bytes=size,
            consumer_ptr=ptr,
            consumers=consumers.astype(np.int32),
            op_kind=tuple(kinds.tolist()),
            collectives=tuple(Collective(tuple(ops), channels) for ops, channels in self.exchanges.values()),
        )  # fmt: skip
        return problem, [np.concatenate(rows).tolist() if rows else [] for rows in self._order]
