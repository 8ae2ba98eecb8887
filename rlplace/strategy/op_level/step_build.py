"""Tasks of a step in the order in which devices run them, as a problem with that order."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from rlplace.cluster.links import Device, Links
from rlplace.problem import BACKWARD, FORWARD, UPDATE, Collective, Problem
from rlplace.problem.check import COLLECTIVE
from rlplace.problem.order import grouped
from rlplace.strategy.costs import Floats
from rlplace.strategy.op_level.stage_ops import Ints, PassRows

PHASE_OF_PART = {"F": FORWARD, "B": BACKWARD, "I": BACKWARD, "W": BACKWARD, "U": UPDATE}

UPDATE_RUN = "U"
"""`DeviceRun.kind` of updates."""

SEND, TIE, GATHER = "send", "tie", "gather"
"""First words of the keys of exchanges. Then follow lane, stage, target stage, micro-batch and bytes of a stage transfer, the
number of a tie; else the place, then the block, or the number of a bucket."""

LONGEST = 100
"""Characters of a device's name, which joins those of several devices."""


class DeviceRun(NamedTuple):
    """Ops that a device runs one after another."""

    device: int
    kind: str  # as in `rlplace.plan.actions`, or `UPDATE_RUN`, with an op a block of the device
    stage: int  # -1 for updates; likewise `microbatch`
    microbatch: int
    first: int  # its first op
    part: PassRows | None  # its ops, in order; None for updates


class Exchange(NamedTuple):
    """A collective as one device takes part in it.

    Attributes:
        key: Devices with this key run it together; see `SEND`.
        name: Name of the op.
        seconds: Its time.
        channels: Channels that it occupies.
        part: As `DeviceRun.kind`.
        held_bytes: Temporary bytes of the op.
    """

    key: Hashable
    name: str
    seconds: float
    channels: Iterable[Hashable]
    part: str
    held_bytes: int = 0


class StepBuild:
    """Tasks of a step on some devices. Every op runs once; a device runs its ops in the order in which they were added.

    Attributes:
        devices: Number of devices.
        waiting: For each device the ops that its next op waits for.
        last: For each device its last op, -1 before the first.
        runs: Ops of devices beside collectives with one another.
        exchanges: These collectives, in the order of the problem's, by their keys: ops and channels.
    """

    def __init__(self, devices: int) -> None:
        self.devices = devices
        self.waiting: list[list[int]] = [[] for _ in range(devices)]
        self.last = [-1] * devices
        self.runs: list[DeviceRun] = []
        self.exchanges: dict[Hashable, tuple[list[int], tuple[int, ...]]] = {}
        self._order: list[list[Ints]] = [[] for _ in range(devices)]
        self._count = 0
        self._ops: list[tuple[Floats, Ints, int, int]] = []
        self._names: list[str] = []
        self._tensors: list[tuple[Ints, Ints, Ints]] = []
        self._edges: list[tuple[int, int, int]] = []
        self._channels: dict[Hashable, int] = {}

    def run(self, device: int, part: str, name: str, seconds: Floats, temporary: Ints, labels: Sequence[str] = ()) -> int:
        """Adds ops that a device runs next, one after another, with labels before the name; returns the first."""
        base = self._add(device, part, name, seconds, temporary, labels)
        self._order[device].append(np.arange(base, self._count))
        for op in self.waiting[device]:
            self.edge(op, base)
        self.waiting[device] = []
        self.last[device] = self._count - 1
        return base

    def exchange(self, device: int, one: Exchange, after: Iterable[int]) -> int:
        """Adds a device's op of a collective, after other ops; returns it."""
        op = self._add(device, one.part, one.name, np.array([one.seconds]), np.array([one.held_bytes]))
        held = tuple(sorted(self._channels.setdefault(channel, len(self._channels)) for channel in one.channels))
        self.exchanges.setdefault(one.key, ([], held))[0].append(op)
        for before in after:
            self.edge(before, op)
        return op

    def edge(self, source: int, target: int, size_bytes: int = 0) -> None:
        """Makes an op wait for `source`, whose output lives until then; nothing for -1."""
        if source >= 0:
            self._edges.append((source, size_bytes, target))

    def tensors(self, source: Ints, size_bytes: Ints, target: Ints) -> None:
        """Adds many edges."""
        self._tensors.append((source, size_bytes, target))

    def _add(self, device: int, part: str, name: str, seconds: Floats, temporary: Ints, labels: Sequence[str] = ()) -> int:
        base, count = self._count, len(seconds)
        self._ops.append((seconds, temporary, device, PHASE_OF_PART[part]))
        if labels:
            self._names += [f"{label} {name}.{row}" for row, label in enumerate(labels)]
        else:
            self._names += [name] if count == 1 else [f"{name}.{row}" for row in range(count)]
        self._count += count
        return base

    def problem(self, name: str, samples: int, names: list[str], resident_bytes: list[int]) -> tuple[Problem, list[list[int]]]:
        """Returns the step as a problem with a group a device, of these names, and the ops of each in order.

        Transfers between devices are collectives; all other edges between ops of different devices take no time.
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
        same = source == target  # without another reader
        readers = np.flatnonzero(~same)
        ptr, consumers = grouped(readers, target[readers], len(source))
        pairs = (self.devices, self.devices)
        problem = Problem(
            name=name,
            samples_per_microbatch=samples,
            devices=tuple(Device(name[:LONGEST]) for name in names),
            links=Links(np.ones(pairs), np.zeros(pairs), channels=(((),) * self.devices,) * self.devices),
            group_names=tuple(name[:LONGEST] for name in names),
            resident_bytes=np.array(resident_bytes, dtype=np.int64),
            group_device=np.arange(self.devices, dtype=np.int32),
            op_names=tuple(self._names),
            op_group=device,
            op_phase=phase,
            time_s=np.repeat(seconds[:, None], self.devices, axis=1),
            temporary_bytes=np.concatenate([item[1] for item in self._ops]).astype(np.int64),
            tensor_producer=source.astype(np.int32),
            tensor_bytes=size,
            consumer_ptr=ptr,
            consumers=consumers.astype(np.int32),
            op_kind=tuple(kinds.tolist()),
            collectives=tuple(Collective(tuple(ops), channels) for ops, channels in self.exchanges.values()),
        )  # fmt: skip
        return problem, [np.concatenate(rows).tolist() if rows else [] for rows in self._order]
