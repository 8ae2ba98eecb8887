"""The knowledge and decisions of assistants; the rules are those of `benchmarks.papers.compiler.assist`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.papers.compiler.assist_moves import MovingRun
from rlplace.problem import BACKWARD, BACKWARD_WEIGHT, UPDATE, Problem
from rlplace.simulator.reference import ReferenceRun

LOOKS = 16
"""Queued ops of a device that an idle one looks at, the first ones to run."""


@dataclass(frozen=True)
class Steal:
    """One decision of an assistant.

    Attributes:
        op: The op that was taken.
        followers: Backward ops of its group that went with it.
        source, destination: Devices.
        time_s: When.
        gain_s: By how much earlier its results were expected.
    """

    op: int
    followers: tuple[int, ...]
    source: int
    destination: int
    time_s: float
    gain_s: float


class AssistedRun(MovingRun):
    """State of one assisted simulation."""

    def __init__(
        self,
        planned: Problem,
        actual: Problem,
        device_of_group: NDArray[np.int32],
        priority: NDArray[np.float64],
        movable: NDArray[np.bool_],
        margin_s: float | None,
        move_weights: bool,
        only_late: bool,
    ) -> None:
        super().__init__(planned, actual, device_of_group, priority)
        self.margin_s = margin_s
        self.planned_s = planned.time_s.tolist()
        self.steals: list[Steal] = []
        self.pending = [-1] * planned.num_devices  # op that a device has taken and not started
        self.mobile = mobile_ops(planned, movable, move_weights)
        self.assisted = any(self.mobile)
        self.allowed = planned.group_allowed.tolist()
        self.moved = [False] * planned.num_ops
        self.followers = saved_readers(planned, self.inputs, self.outputs, self.readers) if self.assisted else []
        linked = planned.links.bandwidth_bytes_per_s > 0
        np.fill_diagonal(linked, True)
        self.thieves = [d for d in range(planned.num_devices) if linked[d].all() and linked[:, d].all()]
        self.only_late = only_late
        self.left_s = [0.0] * planned.num_devices  # planned times of what has not started
        for op, device in enumerate(self.device):
            self.left_s[device] += self.planned_s[op][device]
        if self.assisted:
            line = ReferenceRun(planned, device_of_group, priority, None)
            line.run()
            self.planned_start = line.start
            self.planned_peak = line.peak
            self.limit = [math.inf if d.memory_bytes is None else float(d.memory_bytes) for d in planned.devices]
            self.brought = [0] * planned.num_devices

    def start_ops(self) -> None:
        super().start_ops()
        if not self.assisted:
            return
        changed = False
        for device in self.thieves:
            op = self.pending[device]
            if op >= 0 and not math.isnan(self.start[op]):
                self.pending[device] = -1
            if self.running[device] >= 0 or self.ready[device] or self.pending[device] >= 0:
                continue
            best = self.best_steal(device)
            if best is not None:
                self.take(*best, device)
                changed = True
        if changed:
            self.start_transfers()
            super().start_ops()

    def occupy(self, task: int, time: float) -> None:
        super().occupy(task, time)
        self.left_s[self.device[task]] -= self.planned_s[task][self.device[task]]

    def move(self, task: int, to: int) -> None:
        here = self.device[task]
        self.left_s[here] -= self.planned_s[task][here]
        self.left_s[to] += self.planned_s[task][to]
        super().move(task, to)

    def take(self, op: int, gain_s: float, size: int, to: int) -> None:
        """Carries out a decision."""
        here = self.device[op]
        followers = [
            f for f in self.followers[op] if not self.moved[f] and self.device[f] == here and math.isnan(self.start[f])
        ]
        self.steals.append(Steal(op, tuple(followers), here, to, self.now, gain_s))
        self.brought[to] += size
        for task in (op, *followers):
            self.moved[task] = True
            self.move(task, to)
        self.pending[to] = op

    def best_steal(self, to: int) -> tuple[int, float, int] | None:
        """Returns the op that an idle device gains most by taking: op, gain in seconds, bytes; None: nothing is worth it."""
        best: tuple[int, float, int] | None = None
        for here in range(len(self.running)):
            if here == to or self.running[here] < 0 or not self.ready[here]:
                continue
            running = self.running[here]
            planned = self.planned_s[running][here]
            start = max(self.now, self.start[running] + planned)
            rest = start - self.now
            for op in sorted(self.ready[here], key=self.rank.__getitem__)[:LOOKS]:
                stays = start
                start += self.planned_s[op][here]
                if not self.mobile[op] or self.moved[op] or not self.allowed[self.group[op]][to]:
                    continue
                margin = self.margin_s
                if margin is None:
                    margin = float(self.planned.links.latency_s[here, to])
                if self.only_late and stays <= (self.planned_start[op] + margin) * (1 + 1e-9):  # sums are rounded
                    continue
                arrives = self.arrival_s(op, to)
                if arrives + self.planned_s[op][to] >= start - margin:
                    continue
                more = sum(self.planned_s[t][to] for t in (op, *self.followers[op]))
                if self.left_s[to] + more >= self.left_s[here] + rest:
                    continue
                gain = self.delivered_s(op, here, start) - self.delivered_s(op, to, arrives + self.planned_s[op][to])
                if self.followers[op]:  # gradients will take the way that inputs and results take now
                    gain -= arrives - self.now + self.delivered_s(op, to, 0.0) - self.delivered_s(op, here, 0.0)
                if gain <= margin or (best is not None and gain <= best[1]):
                    continue
                size = self.size_of(op, to)
                if max(self.planned_peak[to], self.peak[to]) + self.brought[to] + size <= self.limit[to]:
                    best = op, gain, size
        return best

    def delivered_s(self, op: int, device: int, end: float) -> float:
        """Says when the last reader of an op's results is expected to have them, if it ends on a device at a given time."""
        last = end
        for value in self.outputs[op]:
            for reader in self.readers[value]:
                if self.device[reader] != device and reader not in self.followers[op]:
                    last = max(last, end + self.transfer_s(value, device, self.device[reader]))
        return last

    def arrival_s(self, op: int, to: int) -> float:
        """Says when all inputs of an op are expected on a device."""
        last = self.now
        group = self.group[op]
        queued: dict[int, float] = {}
        for value, source, destination in self.waiting:
            held = self.channels[source][destination] if value >= 0 else ()
            for channel in held:
                queued[channel] = queued.get(channel, 0.0) + self.transfer_s(value, source, destination)
        extra: dict[int, float] = {}

        def sent(source: int, seconds: float) -> float:
            free = self.now
            for channel in self.channels[source][to]:
                at = max(self.now, self.until_s.get(channel, 0.0)) + queued.get(channel, 0.0) + extra.get(channel, 0.0)
                free = max(free, at)
            for channel in self.channels[source][to]:
                extra[channel] = extra.get(channel, 0.0) + seconds
            return free + seconds

        for value in self.inputs[op]:
            if to in self.copies[value]:
                continue
            if (value, to) in self.moving:
                last = max(last, self.moving[value, to][1])
            else:
                source = self.nearest(value, to)
                last = max(last, sent(source, self.transfer_s(value, source, to)))
        size = self.weight_bytes(group)
        if size > 0 and to != self.home[group] and to not in self.copies_of_weights(group, to):
            last = max(last, sent(self.home[group], self.planned.links.transfer_s(self.home[group], to, size)))
        return last

    def copies_of_weights(self, group: int, to: int) -> set[int]:
        value = self.weight_value.get((group, to))
        return set() if value is None else self.copies[value]

    def size_of(self, op: int, to: int) -> int:
        """Returns bytes that an op and its followers bring to a device, all at once."""
        total, group = 0, self.group[op]
        values: set[int] = set()
        for task in (op, *self.followers[op]):
            values.update(v for v in self.inputs[task] if to not in self.copies[v])
            values.update(self.outputs[task])
            total += int(self.planned.temporary_bytes[task])
        if to != self.home[group]:
            total += self.weight_bytes(group) + self.gradient_bytes(group)
        return total + sum(self.size[value] for value in values)


def mobile_ops(problem: Problem, movable: NDArray[np.bool_], move_weights: bool) -> list[bool]:
    """Returns bool per op, whether it may be taken."""
    group = movable & (problem.group_device < 0)
    if not move_weights:
        group = group & (problem.resident_bytes == 0)
    group[problem.tensor_owner[problem.tensor_owner >= 0]] = False
    mobile = group[problem.op_group] & (problem.op_phase != UPDATE)
    for collective in problem.collectives:
        mobile[list(collective.ops)] = False
    found: list[bool] = mobile.tolist()
    return found


def saved_readers(
    problem: Problem, inputs: list[list[int]], outputs: list[list[int]], readers: list[list[int]]
) -> list[tuple[int, ...]]:
    """Returns per op the backward ops of its group that read one of its inputs or outputs: what it saved for them."""
    group, phase = problem.op_group.tolist(), problem.op_phase.tolist()
    found = []
    for op in range(problem.num_ops):
        mine = {
            reader
            for value in (*inputs[op], *outputs[op])
            for reader in readers[value]
            if reader != op and group[reader] == group[op] and phase[reader] in (BACKWARD, BACKWARD_WEIGHT)
        }
        found.append(tuple(sorted(mine)) if phase[op] not in (BACKWARD, BACKWARD_WEIGHT) else ())
    return found
