"""The reference simulator with tasks that change their device: the mechanics behind `benchmarks.papers.compiler.assist`.

A task that has not started may move. What it would have read stays or goes on as for any reader less on the old device and one
more on the new one: copies without readers are freed, transfers without a reader are taken out of the queue, and
what the new device lacks joins the queue of waiting transfers, sent from a device that has it.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from rlplace.problem import UPDATE, Problem
from rlplace.simulator.reference import _TRANSFER, ReferenceRun


class MovingRun(ReferenceRun):
    """State of one simulation in which tasks move.

    Attributes:
        planned: The problem with the times that the plan rests on; `problem` has the actual ones.
        copies: Per value the devices that have it.
        moving: Source and end of every transfer that runs, by (value, destination).
        until_s: When a channel is expected to be free of what it carries, by planned times.
        weight_group: Group of each value that represents a group's weights; these come after the values of the step.
    """

    def __init__(
        self, planned: Problem, actual: Problem, device_of_group: NDArray[np.int32], priority: NDArray[np.float64]
    ) -> None:
        super().__init__(actual, device_of_group, priority, None)
        self.planned = planned
        self.group = planned.op_group.tolist()
        self.home = device_of_group.tolist()
        self.unmade = [int(not owned) for owned in self.owned]  # whether the maker of each value has still to end
        self.copies: list[set[int]] = [set() for _ in self.source]
        self.moving: dict[tuple[int, int], tuple[int, float]] = {}
        self.until_s: dict[int, float] = {}
        self.weight_group: dict[int, int] = {}
        self.weight_value: dict[tuple[int, int], int] = {}  # (group, device) -> value
        self.returned: set[int] = set()  # groups whose gradient is sent home

    # What the base class does, with copies accounted for.

    def finish_op(self, op: int) -> None:
        for value in self.outputs[op]:
            self.unmade[value] = 0
        super().finish_op(op)

    def arrive(self, value: int, device: int) -> None:
        self.copies[value].add(device)
        for task in self.readers[value]:
            if self.device[task] == device and np.isnan(self.start[task]):
                self.satisfy(task)

    def start_transfer(self, value: int, source: int, destination: int) -> None:
        end = self.now + self.transfer_s(value, source, destination)
        self.moving[value, destination] = source, end
        self.allocate(destination, self.size[value])
        self.transfers.append((self.now, end, value, source, destination))
        for channel in self.channels[source][destination]:
            self.until_s[channel] = end
        heapq.heappush(self.events, (end, _TRANSFER, value, destination))

    def start_collective(self, index: int) -> None:
        super().start_collective(index)
        members = self.members[index]
        end = self.now + max(float(self.planned.time_s[task, self.device[task]]) for task in members)
        for channel in self.problem.collectives[index].channels:
            self.until_s[channel] = end

    def finish_transfer(self, value: int, destination: int) -> None:
        source, _ = self.moving.pop((value, destination))
        self.busy_channels.difference_update(self.channels[source][destination])
        self.drop_use(value, source)
        self.arrive(value, destination)
        if self.uses.get((value, destination), 0) == 0:  # its readers have moved away meanwhile
            self.release(value, destination)

    def release(self, value: int, device: int) -> None:
        if value in self.weight_group:
            if device != self.source[value]:
                self.copies[value].discard(device)
                self.memory[device] -= self.size[value]
            return
        if self.problem.tensor_owner[value] < 0 or device != self.source[value]:
            self.copies[value].discard(device)
        super().release(value, device)

    def transfer_s(self, value: int, source: int, destination: int) -> float:
        """Returns seconds of a transfer without waiting; the same planned and actually."""
        table = self.problem.tensor_transfer_s.get(value)
        if table is not None:
            return float(table[source, destination])
        return self.problem.links.transfer_s(source, destination, self.size[value])

    # Moving.

    def move(self, task: int, to: int) -> None:
        """Gives a task that has not started to another device."""
        here = self.device[task]
        self.ready[here].discard(task)
        group = self.group[task]
        late = []  # values whose uses are counted anew, because they were not made yet
        for value in [v for v in self.inputs[task] if v in self.weight_group]:
            self.inputs[task].remove(value)
            self.readers[value].remove(task)
            self._leave(value, here)
        if to != self.home[group] and (size := self.weight_bytes(group)) > 0:
            self._attach_weights(task, group, to, size)
        self.device[task] = to
        for value in self.inputs[task]:
            if self.unmade[value] > 0:
                late.append(value)
                continue
            self._join(value, to)
            if value not in self.weight_group:
                self._leave(value, here)
        for value in self.outputs[task]:
            self.source[value] = to
            self._charge_gradient(value, group, to)
            late.append(value)
        for value in late:
            self._count_uses(value)
        self.missing[task] = sum(to not in self.copies[value] for value in self.inputs[task])
        if self.missing[task] == 0:
            self.admit(task)

    def weight_bytes(self, group: int) -> int:
        """Returns bytes that a device needs to run the ops of a group that it does not own."""
        size = int(self.problem.weight_bytes[group])
        return size if size >= 0 else int(self.problem.resident_bytes[group])

    def gradient_bytes(self, group: int) -> int:
        """Returns bytes that go back to the owner of a group for its update."""
        size = int(self.problem.gradient_bytes[group])
        return size if size >= 0 else int(self.problem.resident_bytes[group])

    def _attach_weights(self, task: int, group: int, to: int, size: int) -> None:
        value = self.weight_value.get((group, to))
        if value is None:
            value = self.weight_value[group, to] = len(self.source)
            self.weight_group[value] = group
            self.source.append(self.home[group])
            self.readers.append([])
            self.unmade.append(0)
            self.size.append(size)
            self.uses[value, self.home[group]] = 1  # the owner keeps its weights
            self.copies.append({self.home[group]})
        self.readers[value].append(task)
        self.inputs[task].append(value)

    def _charge_gradient(self, value: int, group: int, to: int) -> None:
        """Makes a gradient that its own group uses take no bytes, as they are resident; from another device it is sent."""
        update = any(self.problem.op_phase[t] == UPDATE and self.group[t] == group for t in self.readers[value])
        if update and self.size[value] == 0 and group not in self.returned and to != self.home[group]:
            self.returned.add(group)
            self.size[value] = self.gradient_bytes(group)

    def _join(self, value: int, device: int) -> None:
        """Adds a reader on a device; the value is sent there if it is neither there nor on its way."""
        known = device in self.copies[value] or (value, device) in self.moving
        known = known or any(v == value and d == device for v, _, d in self.waiting)
        self.uses[value, device] = self.uses.get((value, device), 0) + 1
        if not known:
            source = self.nearest(value, device)
            self.uses[value, source] += 1
            self.waiting.append((value, source, device))

    def _leave(self, value: int, device: int) -> None:
        """Removes a reader on a device."""
        if device in self.copies[value]:
            self.drop_use(value, device)
            return
        self.uses[value, device] -= 1
        if self.uses[value, device] == 0:
            for entry in [e for e in self.waiting if e[0] == value and e[2] == device]:
                self.waiting.remove(entry)
                self.drop_use(value, entry[1])

    def nearest(self, value: int, device: int) -> int:
        """Returns the device with a copy from which a transfer takes least."""
        return min(self.copies[value], key=lambda d: (self.transfer_s(value, d, device), d))

    def _count_uses(self, value: int) -> None:
        """Counts readers and sends of a value that is not made yet, by device."""
        for device in range(len(self.running)):
            self.uses.pop((value, device), None)
        for task in self.readers[value]:
            key = (value, self.device[task])
            self.uses[key] = self.uses.get(key, 0) + 1
        source = self.source[value]
        for _ in self.destinations(value):
            self.uses[value, source] = self.uses.get((value, source), 0) + 1
