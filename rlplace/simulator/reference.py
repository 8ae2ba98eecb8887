"""The reference simulator: the rules of a step in plain Python.

This file is the definition of step time and peak memory. `rlplace.simulator.fast` is its compiled twin and must agree bit
for bit; when the two differ, this one is right. It is written to be read against the rules, not to be quick.

Rules:
    1. A device runs one op at a time and is never idle while an op is ready on it. An op is ready when all its inputs are on
       its device. The ready op of highest priority starts; the default priority is the bottom level, the longest way to the end
       of the step by mean op times. (`ReferenceRun.start_ops`, `ranks`)
    2. A tensor goes once to every other device with a reader. A transfer waits for all its channels, in order of arrival, holds
       them for latency + bytes / bandwidth, and occupies no device. (`ReferenceRun.enqueue`, `ReferenceRun.start_transfers`)
    3. Within an instant all ending events come first, then starts of ops. (`ReferenceRun.run`)
    4. Memory: resident and reserved bytes always; outputs and temporaries from the start of their op; copies from the start of
       their transfer; everything is freed after its last use. Memory never delays anything; a plan whose peak exceeds a limit
       is infeasible. (`Ledger`)
    5. The step ends with its last event.

Collectives: a collective joins the queue of waiting transfers when the last input of its last op is present; it starts when its
channels are free, like a transfer, and holds them for the longest of its ops' times. Its ops take memory when it starts and end
with it, in order of their numbers, as one event at the number of its first op. They occupy no device.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.plan.plan import check_order
from rlplace.problem import Problem
from rlplace.simulator.records import TRANSFER
from rlplace.simulator.timeline import (
    Timeline,
    fixed_violations,
    memory_violations,
    placement_violations,
    resident_by_device,
    timeline_of,
)

STUCK = "the order makes devices wait for each other forever"
"""Reason why a step that has begun cannot complete: nothing but an order can hold ops back forever."""

_OP, _TRANSFER = 0, 1


def reference_priority(problem: Problem) -> NDArray[np.float64]:
    """Returns the bottom level of every op: the longest path from its start to the end of the step, without communication.

    An op counts with the mean of `time_s` over the devices that can run it, summed left to right.

    Returns:
        float64 [N] seconds.
    """
    level = np.zeros(problem.num_ops)
    successors: list[list[int]] = [[] for _ in range(problem.num_ops)]
    for producer, consumer in zip(*(ends.tolist() for ends in problem.op_edges), strict=True):
        successors[producer].append(consumer)
    for op in problem.topological_order[::-1].tolist():
        total, count = 0.0, 0
        for time in problem.time_s[op].tolist():
            if time == time:
                total, count = total + time, count + 1
        level[op] = total / count + max((level[s] for s in successors[op]), default=0.0)
    return level


def ranks(problem: Problem, priority: NDArray[np.float64] | None) -> NDArray[np.int32]:
    """Returns order in which ready ops start: lower rank first, that is higher priority, then smaller number.

    Returns:
        int32 [N], distinct.
    """
    rank = np.empty(problem.num_ops, dtype=np.int32)
    rank[np.argsort(-(reference_priority(problem) if priority is None else priority), kind="stable")] = np.arange(
        problem.num_ops
    )
    return rank


def simulate_reference(
    problem: Problem,
    device_of_group: Sequence[int] | NDArray[Any],
    *,
    priority: NDArray[np.float64] | None = None,
    order: Sequence[Sequence[int]] | None = None,
) -> Timeline:
    """Simulates one step.

    Args:
        problem: The priced graph.
        device_of_group: int [G].
        priority: float [N], higher starts first; default `default_priority`.
        order: Per device the exact sequence of its ops; excludes `priority`.
    """
    devices = np.asarray(device_of_group, dtype=np.int32)
    if order is not None:
        check_order(order, devices, problem)
    moved = fixed_violations(problem, devices)
    violations = placement_violations(problem, devices)
    if violations:
        return timeline_of(problem, devices, violations + moved)
    run = ReferenceRun(problem, devices, priority, order)
    run.run()
    if run.done < problem.num_ops:
        return timeline_of(problem, devices, [STUCK, *moved])
    peak = np.array(run.peak, dtype=np.int64)
    return timeline_of(
        problem, devices, memory_violations(problem, peak) + moved, step_time_s=run.now, peak_memory_bytes=peak,
        busy_s=np.array(run.busy), times_s=np.array([run.start, run.end]),
        transfers=np.array(run.transfers, dtype=TRANSFER),
    )  # fmt: skip


class Ledger:
    """Bytes in use on every device at one moment of a step: rule 4, whose only other definition is the compiled twin.

    A copy is freed when the last reader there has ended and, where the tensor is made, the last transfer as well. What a group
    owns is part of its resident bytes, which stay for the whole step.

    Attributes:
        memory: Bytes in use by device, resident and reserved bytes included.
        peak: Largest value of `memory` so far, by device.
    """

    def __init__(self, problem: Problem, device_of_group: NDArray[np.int32]) -> None:
        self.problem = problem
        self.device: list[int] = device_of_group[problem.op_group].tolist()  # of every op
        self.memory: list[int] = resident_by_device(problem, device_of_group).tolist()
        self.peak = list(self.memory)
        self.temporary: list[int] = problem.temporary_bytes.tolist()
        self.outputs: list[list[int]] = [[] for _ in range(problem.num_ops)]
        self.inputs: list[list[int]] = [[] for _ in range(problem.num_ops)]
        self.size: list[int] = problem.tensor_bytes.tolist()
        self.owned: list[bool] = (problem.tensor_owner >= 0).tolist()
        self.source: list[int] = []  # device that holds the tensor first
        self.readers: list[list[int]] = []
        self.uses: Counter[tuple[int, int]] = Counter()  # (tensor, device) -> readers and sends that still need the copy
        ends = problem.consumer_ptr.tolist()
        for tensor, maker in enumerate(problem.tensor_producer.tolist()):
            readers = problem.consumers[ends[tensor] : ends[tensor + 1]].tolist()
            source = self.device[maker] if maker >= 0 else int(device_of_group[problem.tensor_owner[tensor]])
            self.source.append(source)
            self.readers.append(readers)
            if maker >= 0:
                self.outputs[maker].append(tensor)
            for op in readers:
                self.inputs[op].append(tensor)
                self.uses[tensor, self.device[op]] += 1
            self.uses[tensor, source] += len(self.destinations(tensor))

    def destinations(self, tensor: int) -> list[int]:
        """Returns the other devices that host a reader."""
        return sorted({self.device[op] for op in self.readers[tensor]} - {self.source[tensor]})

    def hold_outputs(self, op: int) -> None:
        """Allocates the outputs and temporaries of an op that starts."""
        for tensor in self.outputs[op]:
            self.allocate(self.device[op], self.size[tensor])
        self.allocate(self.device[op], self.temporary[op])

    def free_inputs(self, op: int) -> None:
        """Frees what an op that ends held: temporaries, inputs without further readers there, outputs without readers."""
        device = self.device[op]
        self.allocate(device, -self.temporary[op])
        for tensor in self.inputs[op]:
            self.drop_use(tensor, device)
        for tensor in self.outputs[op]:
            if not self.readers[tensor]:
                self.release(tensor, device)

    def drop_use(self, tensor: int, device: int) -> None:
        """Counts one reader or outgoing transfer of a tensor on a device as ended."""
        self.uses[tensor, device] -= 1
        if self.uses[tensor, device] == 0:
            self.release(tensor, device)

    def release(self, tensor: int, device: int) -> None:
        """Frees a copy that nothing needs any more."""
        if not (self.owned[tensor] and device == self.source[tensor]):  # else part of its group's resident bytes
            self.allocate(device, -self.size[tensor])

    def allocate(self, device: int, size: int) -> None:
        """Adds bytes to a device, or frees them where they are negative."""
        self.memory[device] += size
        self.peak[device] = max(self.peak[device], self.memory[device])


class ReferenceRun(Ledger):
    """State of one simulation."""

    def __init__(
        self,
        problem: Problem,
        device_of_group: NDArray[np.int32],
        priority: NDArray[np.float64] | None,
        order: Sequence[Sequence[int]] | None,
    ) -> None:
        super().__init__(problem, device_of_group)
        self.rank = ranks(problem, priority).tolist()
        self.order = order  # per device
        self.channels = problem.links.effective_channels
        self.now, self.done = 0.0, 0
        self.events: list[tuple[float, int, int, int]] = []  # (end, kind, op or tensor, destination)
        self.running = [-1] * problem.num_devices
        self.position = [0] * problem.num_devices  # next entry of `order`
        self.ready: list[set[int]] = [set() for _ in problem.devices]
        self.waiting: list[tuple[int, int, int]] = []  # (tensor, source, destination) or (-1, collective, -1), in queue order
        self.busy_channels: set[int] = set()
        self.busy = [0.0] * problem.num_devices
        self.start, self.end = [np.nan] * problem.num_ops, [np.nan] * problem.num_ops
        self.transfers: list[tuple[float, float, int, int, int]] = []  # as `TRANSFER`
        self.missing = [len(tensors) for tensors in self.inputs]  # inputs not yet present
        self.members = [sorted(collective.ops) for collective in problem.collectives]
        self.collective = {op: index for index, members in enumerate(self.members) for op in members}
        self.absent = [len(members) for members in self.members]  # ops of a collective that miss an input

    def run(self) -> None:
        """Applies rule 3: within an instant all ending events, then starts of ops, until nothing ends now."""
        for op, count in enumerate(self.missing):
            if count == 0:
                self.admit(op)
        for tensor, owned in enumerate(self.owned):
            if owned:
                self.arrive(tensor, self.source[tensor])
                self.enqueue(tensor)
        self.start_transfers()
        while True:
            while self.events and self.events[0][0] == self.now:
                _, kind, item, destination = heapq.heappop(self.events)
                if kind == _TRANSFER:
                    self.finish_transfer(item, destination)
                elif item in self.collective:
                    self.finish_collective(self.collective[item])
                else:
                    self.running[self.device[item]] = -1
                    self.finish_op(item)
                self.start_transfers()
            self.start_ops()
            if not self.events:
                return
            self.now = self.events[0][0]

    def start_ops(self) -> None:
        """Applies rule 1: an idle device starts its ready op of lowest rank, or the next one of its order."""
        for device, ready in enumerate(self.ready):
            if self.running[device] >= 0 or not ready:
                continue
            if self.order is None:
                op = min(ready, key=self.rank.__getitem__)
            else:
                op = int(self.order[device][self.position[device]])
                if op not in ready:
                    continue
                self.position[device] += 1
            ready.remove(op)
            time = float(self.problem.time_s[op, device])
            self.running[device] = op
            self.busy[device] += time
            self.occupy(op, time)
            heapq.heappush(self.events, (self.now + time, _OP, op, 0))

    def occupy(self, op: int, time: float) -> None:
        """Starts an op."""
        self.start[op], self.end[op] = self.now, self.now + time
        self.hold_outputs(op)

    def finish_op(self, op: int) -> None:
        self.done += 1
        self.free_inputs(op)
        for tensor in self.outputs[op]:
            self.arrive(tensor, self.device[op])
            self.enqueue(tensor)

    def finish_transfer(self, tensor: int, destination: int) -> None:
        source = self.source[tensor]
        self.busy_channels.difference_update(self.channels[source][destination])
        self.drop_use(tensor, source)
        self.arrive(tensor, destination)

    def finish_collective(self, index: int) -> None:
        self.busy_channels.difference_update(self.problem.collectives[index].channels)
        for op in self.members[index]:
            self.finish_op(op)

    def arrive(self, tensor: int, device: int) -> None:
        """Marks a tensor as present on a device: its readers there wait for one input less."""
        for op in self.readers[tensor]:
            if self.device[op] == device:
                self.satisfy(op)

    def satisfy(self, op: int) -> None:
        self.missing[op] -= 1
        if self.missing[op] == 0:
            self.admit(op)

    def admit(self, op: int) -> None:
        """Marks an op as ready, or as one member of its collective for which the others no longer wait."""
        index = self.collective.get(op)
        if index is None:
            self.ready[self.device[op]].add(op)
            return
        self.absent[index] -= 1
        if self.absent[index] == 0:
            self.waiting.append((-1, index, -1))

    def enqueue(self, tensor: int) -> None:
        """Applies rule 2: one transfer to every other device that hosts a reader."""
        self.waiting.extend((tensor, self.source[tensor], device) for device in self.destinations(tensor))

    def start_transfers(self) -> None:
        """Applies rule 2: a waiting transfer starts when its channels are free and no earlier one waits for any of them."""
        wanted: set[int] = set()
        still_waiting = []
        for tensor, source, destination in self.waiting:
            if tensor >= 0:
                held = self.channels[source][destination]
            else:
                held = self.problem.collectives[source].channels
            if wanted.isdisjoint(held) and self.busy_channels.isdisjoint(held):
                self.busy_channels.update(held)
                if tensor >= 0:
                    self.start_transfer(tensor, source, destination)
                else:
                    self.start_collective(source)
            else:
                wanted.update(held)
                still_waiting.append((tensor, source, destination))
        self.waiting = still_waiting

    def start_transfer(self, tensor: int, source: int, destination: int) -> None:
        table = self.problem.tensor_transfer_s.get(tensor)
        links = self.problem.links
        size = self.size[tensor]
        time = links.transfer_s(source, destination, size) if table is None else float(table[source, destination])
        self.allocate(destination, size)
        self.transfers.append((self.now, self.now + time, tensor, source, destination))
        heapq.heappush(self.events, (self.now + time, _TRANSFER, tensor, destination))

    def start_collective(self, index: int) -> None:
        members = self.members[index]
        time = max(float(self.problem.time_s[op, self.device[op]]) for op in members)
        for op in members:
            self.occupy(op, time)
        heapq.heappush(self.events, (self.now + time, _OP, members[0], 0))
