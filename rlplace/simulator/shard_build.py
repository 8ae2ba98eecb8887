"""Collects the ops, tensors, collectives and groups of a lowered problem."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from math import inf

import numpy as np
from numpy.typing import NDArray

from rlplace.problem import Collective, Problem
from rlplace.problem.build import TensorRow, tensor_fields
from rlplace.problem.check import COLLECTIVE
from rlplace.problem.collectives import collective_channels, collective_s


class Builder:
    """A problem in the making, on the devices of another one."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        fixed = None if problem.sharding is None else problem.sharding.fixed_s
        self._fixed_s = np.zeros_like(problem.time_s) if fixed is None else np.minimum(fixed, np.nan_to_num(problem.time_s))
        self._names: list[str] = []
        self._group: list[int] = []
        self._phase: list[int] = []
        self._time_s: list[NDArray[np.float64]] = []
        self._temporary: list[int] = []
        self._kind: list[str] = []
        self._device: list[int] = []
        self._groups: dict[tuple[int, int], int] = {}
        self._held: list[NDArray[np.int64]] = []
        self._tensors: list[TensorRow] = []
        self._collectives: list[Collective] = []
        self._channels: dict[tuple[int, ...], tuple[int, ...]] = {}

    def group(self, group: int, device: int) -> int:
        """Number of the part of a group on a device."""
        key = group, device
        if key not in self._groups:
            self._groups[key] = len(self._groups)
            self._held.append(np.zeros(3, dtype=np.int64))
        return self._groups[key]

    def hold(self, group: int, device: int, parts: NDArray[np.int64]) -> None:
        """Adds weight, gradient and optimizer bytes to a group on a device."""
        if parts.any():
            self._held[self.group(group, device)] += parts

    def part(self, op: int, device: int, share: float, several: bool) -> int:
        """A part of an op: what is fixed of its time, and a share of the rest."""
        problem, fixed = self._problem, self._fixed_s[op]
        time_s = problem.time_s[op] if share == 1.0 else fixed + (problem.time_s[op] - fixed) * share
        kind = "" if problem.op_kind is None else problem.op_kind[op]
        name = f"{problem.op_names[op]}@{device}" if several else problem.op_names[op]
        temporary = int(np.ceil(int(problem.temporary_bytes[op]) * share))
        return self._op(name, int(problem.op_group[op]), device, int(problem.op_phase[op]), time_s, temporary, kind)

    def _op(
        self, name: str, group: int, device: int, phase: int, time_s: NDArray[np.float64], temporary: int, kind: str
    ) -> int:
        self._names.append(name)
        self._group.append(self.group(group, device))
        self._phase.append(phase)
        self._time_s.append(time_s)
        self._temporary.append(temporary)
        self._kind.append(kind)
        self._device.append(device)
        return len(self._names) - 1

    def more_temporary(self, op: int, size_bytes: int) -> None:
        """Memory that an op needs while it runs, on top of what it has."""
        self._temporary[op] += size_bytes

    def tensor(self, producer: int, size_bytes: int, consumers: set[int], owner: int = -1) -> None:
        """A tensor of an op, or with producer -1 of a group."""
        self._tensors.append((producer, owner, size_bytes, sorted(consumers)))

    def all_reduce(
        self, name: str, group: int, phase: int, inputs: Mapping[int, set[int]], size_bytes: float
    ) -> tuple[dict[int, int], float]:
        """A collective that starts when the inputs of every device are made.

        Returns:
            Its op on every device, and the seconds that it takes.
        """
        problem, devices = self._problem, list(inputs)
        seconds = collective_s(problem.links, "all_reduce", devices, size_bytes)
        done: dict[int, int] = {}
        for device, ops in inputs.items():
            time_s = np.full(problem.num_devices, seconds)
            if seconds == inf:  # no links join the devices: it cannot run
                time_s = np.zeros(problem.num_devices)
                time_s[device] = np.nan
            done[device] = self._op(f"{name}@{device}", group, device, phase, time_s, 0, COLLECTIVE)
            for op in sorted(ops):
                self.tensor(op, 0, {done[device]})
        members = tuple(devices)
        if members not in self._channels:
            self._channels[members] = collective_channels(problem.links, devices)
        self._collectives.append(Collective(tuple(done.values()), self._channels[members]))
        return done, seconds

    def slow(self, device: int, phases: tuple[int, ...], under_s: float, factor: float) -> None:
        """Slows the ops of some phases on a device by the share of their time that runs under collectives."""
        here = [
            op
            for op, (at, phase) in enumerate(zip(self._device, self._phase, strict=True))
            if at == device and phase in phases and self._kind[op] != COLLECTIVE
        ]
        total = float(np.nansum([self._time_s[op][device] for op in here]))
        if total > 0.0:
            share = min(under_s, total) / total
            for op in here:
                self._time_s[op] = self._time_s[op] * (1.0 + (factor - 1.0) * share)

    def finish(self) -> tuple[Problem, NDArray[np.int32]]:
        """The problem, and the device of each of its groups."""
        problem = self._problem
        keys = list(self._groups)
        held = np.stack(self._held) if self._held else np.zeros((0, 3), dtype=np.int64)
        count = len(self._names)
        whole = dataclasses.replace(
            problem,
            group_names=tuple(f"{problem.group_names[group]}@{device}" for group, device in keys),
            resident_bytes=held.sum(axis=1),
            weight_bytes=held[:, 0].copy(),
            gradient_bytes=held[:, 1].copy(),
            optimizer_bytes=held[:, 2].copy(),
            group_device=np.full(len(keys), -1, dtype=np.int32),
            op_names=tuple(self._names),
            op_group=np.array(self._group, dtype=np.int32),
            op_phase=np.array(self._phase, dtype=np.int8),
            time_s=np.stack(self._time_s),
            temporary_bytes=np.array(self._temporary, dtype=np.int64),
            **tensor_fields(self._tensors),
            op_kind=tuple(self._kind) if count and any(self._kind) else None,
            op_dims={},
            tensor_transfer_s={},
            collectives=tuple(self._collectives),
            sharding=None,
            group_ops=None,
            group_modules=None,
        )
        return whole, np.array([device for _, device in keys], dtype=np.int32)
