"""The reference simulator: DESIGN section 4 for one micro-batch, in plain Python.

This file is the definition of step time and peak memory. `rlplace.simulator.fast` is its compiled twin and must agree bit
for bit; when the two differ, this one is right. It is written to be read against the rules, not to be quick.

Rules, and where they live:
    1. devices, readiness, priority         `_Run.start_tasks`, `default_priority`
    2. transfers and channels               `_Run.enqueue`, `_Run.start_transfers`
    3. order within an instant              `_Run.run`
    4. memory                               `_Run.allocate`, `_Run.release`, `_Run.drop_use`
    5. step time                            end of the last event
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.plan.plan import check_order
from rlplace.problem import Problem
from rlplace.simulator.timeline import (
    Timeline,
    fixed_violations,
    memory_violations,
    placement_violations,
    resident_by_device,
    unfinished,
)

STUCK_ORDER = "the order makes devices wait for each other forever"

_TASK, _TRANSFER = 0, 1


def default_priority(problem: Problem) -> NDArray[np.float64]:
    """Bottom level of every op: the longest path from its start to the end of the step, without communication.

    An op counts with the mean of `time_s` over the devices that can run it, summed left to right.

    Returns:
        float64 [N] seconds.
    """
    level = np.zeros(problem.num_ops)
    successors: list[list[int]] = [[] for _ in range(problem.num_ops)]
    for tensor, consumer in zip(problem.edge_tensor.tolist(), problem.consumers.tolist(), strict=True):
        producer = int(problem.tensor_producer[tensor])
        if producer >= 0:
            successors[producer].append(consumer)
    for op in problem.topological_order[::-1].tolist():
        total, count = 0.0, 0
        for time in problem.time_s[op].tolist():
            if time == time:
                total, count = total + time, count + 1
        level[op] = total / count + max((level[s] for s in successors[op]), default=0.0)
    return level


def simulate_reference(
    problem: Problem,
    device_of_group: Sequence[int] | NDArray[Any],
    *,
    priority: NDArray[np.float64] | None = None,
    order: Sequence[Sequence[int]] | None = None,
) -> Timeline:
    """Simulates one step with one micro-batch.

    Args:
        problem: The priced graph.
        device_of_group: int [G].
        priority: float [N], higher starts first; default `default_priority`.
        order: Per device the exact sequence of its ops; excludes `priority`.
    """
    devices = np.asarray(device_of_group, dtype=np.int32)
    if order is not None:
        check_order(order, devices, problem)
    device_of_op = devices[problem.op_group]
    moved = fixed_violations(problem, devices)
    violations = placement_violations(problem, devices)
    if violations:
        return unfinished(problem, devices, device_of_op, violations + moved)
    run = _Run(problem, devices, default_priority(problem) if priority is None else priority, order)
    run.run()
    if run.done < problem.num_ops:
        return unfinished(problem, devices, device_of_op, [STUCK_ORDER, *moved])
    peak = np.array(run.peak, dtype=np.int64)
    violations = memory_violations(problem, peak) + moved
    transfers = run.transfers
    return Timeline(
        step_time_s=run.now,
        feasible=not violations,
        violations=tuple(violations),
        peak_memory_bytes=peak,
        busy_s=np.array(run.busy),
        device_of_op=device_of_op,
        start_s=np.array(run.start),
        end_s=np.array(run.end),
        transfer_tensor=np.array([t[0] for t in transfers], dtype=np.int32),
        transfer_source=np.array([t[1] for t in transfers], dtype=np.int32),
        transfer_destination=np.array([t[2] for t in transfers], dtype=np.int32),
        transfer_start_s=np.array([t[3] for t in transfers], dtype=np.float64),
        transfer_end_s=np.array([t[4] for t in transfers], dtype=np.float64),
    )


class _Run:
    """State of one simulation."""

    def __init__(
        self,
        problem: Problem,
        device_of_group: NDArray[np.int32],
        priority: NDArray[np.float64],
        order: Sequence[Sequence[int]] | None,
    ) -> None:
        self.problem, self.priority, self.order = problem, priority, order
        self.device_of_op = device_of_group[problem.op_group].tolist()
        self.channels = problem.links.effective_channels
        self.now, self.done = 0.0, 0
        self.events: list[tuple[float, int, int, int]] = []  # (end, kind, op or tensor, destination)
        self.running = [-1] * problem.num_devices
        self.position = [0] * problem.num_devices  # next entry of `order`
        self.ready: list[set[int]] = [set() for _ in problem.devices]
        self.waiting: list[tuple[int, int, int]] = []  # (tensor, source, destination), in queue order
        self.busy_channels: set[int] = set()
        self.memory = resident_by_device(problem, device_of_group).tolist()
        self.peak = list(self.memory)
        self.busy = [0.0] * problem.num_devices
        self.start, self.end = [np.nan] * problem.num_ops, [np.nan] * problem.num_ops
        self.transfers: list[tuple[int, int, int, float, float]] = []
        self.missing = [0] * problem.num_ops  # inputs not yet present
        self.outputs: list[list[int]] = [[] for _ in range(problem.num_ops)]
        self.inputs: list[list[int]] = [[] for _ in range(problem.num_ops)]
        self.source: list[int] = []  # device that holds the tensor first
        self.consumers: list[list[int]] = []
        self.uses: dict[tuple[int, int], int] = {}  # (tensor, device) -> consumers and sends that still need the copy
        for tensor in range(problem.num_tensors):
            producer, owner = int(problem.tensor_producer[tensor]), int(problem.tensor_owner[tensor])
            consumers = problem.consumers[problem.consumer_ptr[tensor] : problem.consumer_ptr[tensor + 1]].tolist()
            source = self.device_of_op[producer] if producer >= 0 else int(device_of_group[owner])
            self.source.append(source)
            self.consumers.append(consumers)
            if producer >= 0:
                self.outputs[producer].append(tensor)
            for op in consumers:
                self.missing[op] += 1
                self.inputs[op].append(tensor)
                key = (tensor, self.device_of_op[op])
                self.uses[key] = self.uses.get(key, 0) + 1
            for _ in self.destinations(tensor):
                self.uses[tensor, source] = self.uses.get((tensor, source), 0) + 1

    def run(self) -> None:
        """Rule 3: within an instant all ending events, then task starts, until nothing ends now."""
        for op, count in enumerate(self.missing):
            if count == 0:
                self.ready[self.device_of_op[op]].add(op)
        for tensor, owner in enumerate(self.problem.tensor_owner.tolist()):
            if owner >= 0:
                self.arrive(tensor, self.source[tensor])
                self.enqueue(tensor)
        self.start_transfers()
        while True:
            while self.events and self.events[0][0] == self.now:
                _, kind, item, destination = heapq.heappop(self.events)
                if kind == _TASK:
                    self.finish_task(item)
                else:
                    self.finish_transfer(item, destination)
                self.start_transfers()
            self.start_tasks()
            if not self.events:
                return
            self.now = self.events[0][0]

    def start_tasks(self) -> None:
        """Rule 1: an idle device starts its ready task of highest priority, or the next one of its order."""
        for device, ready in enumerate(self.ready):
            if self.running[device] >= 0 or not ready:
                continue
            if self.order is None:
                op = min(ready, key=lambda o: (-self.priority[o], o))
            else:
                op = self.order[device][self.position[device]]
                if op not in ready:
                    continue
                self.position[device] += 1
            ready.remove(op)
            time = float(self.problem.time_s[op, device])
            self.running[device] = op
            self.start[op], self.end[op] = self.now, self.now + time
            self.busy[device] += time
            for tensor in self.outputs[op]:
                self.allocate(device, int(self.problem.tensor_bytes[tensor]))
            self.allocate(device, int(self.problem.temporary_bytes[op]))
            heapq.heappush(self.events, (self.now + time, _TASK, op, 0))

    def finish_task(self, op: int) -> None:
        device = self.device_of_op[op]
        self.running[device] = -1
        self.done += 1
        self.memory[device] -= int(self.problem.temporary_bytes[op])
        for tensor in self.inputs[op]:
            self.drop_use(tensor, device)
        for tensor in self.outputs[op]:
            if not self.consumers[tensor]:
                self.release(tensor, device)
        for tensor in self.outputs[op]:
            self.arrive(tensor, device)
            self.enqueue(tensor)

    def finish_transfer(self, tensor: int, destination: int) -> None:
        source = self.source[tensor]
        self.busy_channels.difference_update(self.channels[source][destination])
        self.drop_use(tensor, source)
        self.arrive(tensor, destination)

    def arrive(self, tensor: int, device: int) -> None:
        """The tensor is present on `device`: its consumers there miss one input less."""
        for op in self.consumers[tensor]:
            if self.device_of_op[op] == device:
                self.missing[op] -= 1
                if self.missing[op] == 0:
                    self.ready[device].add(op)

    def destinations(self, tensor: int) -> list[int]:
        return sorted({self.device_of_op[op] for op in self.consumers[tensor]} - {self.source[tensor]})

    def enqueue(self, tensor: int) -> None:
        """Rule 2: one transfer to every other device that hosts a consumer."""
        self.waiting.extend((tensor, self.source[tensor], device) for device in self.destinations(tensor))

    def start_transfers(self) -> None:
        """Rule 2: a waiting transfer starts when its channels are free and no earlier one wants any of them."""
        wanted: set[int] = set()
        still_waiting = []
        for tensor, source, destination in self.waiting:
            held = self.channels[source][destination]
            if wanted.isdisjoint(held) and self.busy_channels.isdisjoint(held):
                self.busy_channels.update(held)
                size = int(self.problem.tensor_bytes[tensor])
                table = self.problem.tensor_transfer_s.get(tensor)
                links = self.problem.links
                time = links.transfer_s(source, destination, size) if table is None else float(table[source, destination])
                self.allocate(destination, size)
                self.transfers.append((tensor, source, destination, self.now, self.now + time))
                heapq.heappush(self.events, (self.now + time, _TRANSFER, tensor, destination))
            else:
                wanted.update(held)
                still_waiting.append((tensor, source, destination))
        self.waiting = still_waiting

    def allocate(self, device: int, size: int) -> None:
        self.memory[device] += size
        self.peak[device] = max(self.peak[device], self.memory[device])

    def drop_use(self, tensor: int, device: int) -> None:
        self.uses[tensor, device] -= 1
        if self.uses[tensor, device] == 0:
            self.release(tensor, device)

    def release(self, tensor: int, device: int) -> None:
        owned = self.problem.tensor_owner[tensor] >= 0 and device == self.source[tensor]
        if not owned:  # an owner's tensor is part of its group's resident bytes
            self.memory[device] -= int(self.problem.tensor_bytes[tensor])
