"""Memory in use over a step: a timeline's allocations and frees in the order in which the executor makes them.

The times are known, so nothing is decided again: tasks and transfers start and end when the timeline says. Only the order of
what happens within one instant is found out, by the executor's rules 3 and 4, because a peak may last no time at all.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.problem import Problem
from rlplace.simulator import Timeline
from rlplace.simulator.ledger import Ledger
from rlplace.simulator.tasks import TaskGraph, task_graph
from rlplace.simulator.timeline import resident_by_device

_TASK, _TRANSFER = 0, 1


@dataclass(frozen=True, eq=False)
class MemoryCurve:
    """Bytes in use on one device, a step function with P points.

    Attributes:
        time_s: float64 [P], ascending; several points of one time are what an instant passes through.
        in_use_bytes: int64 [P], from this point to the next one, resident and reserved bytes included.
    """

    time_s: NDArray[np.float64]
    in_use_bytes: NDArray[np.int64]

    @property
    def peak_bytes(self) -> int:
        """The largest value."""
        return int(self.in_use_bytes.max())

    def thinned(self, points: int) -> MemoryCurve:
        """A curve of at most so many points (at least 8): of every stretch its first, lowest, highest and last one."""
        count = len(self.time_s)
        if count <= points:
            return self
        buckets = max(1, points // 4 - 1)
        bucket = np.arange(count) * buckets // count
        sort = np.lexsort((self.in_use_bytes, bucket))
        first = np.flatnonzero(np.diff(bucket, prepend=-1))
        last = np.append(first[1:], count) - 1
        kept = np.unique(np.concatenate([first, last, sort[first], sort[last], [int(self.in_use_bytes.argmax())]]))
        return MemoryCurve(self.time_s[kept], self.in_use_bytes[kept])


def memory_curves(problem: Problem, device_of_group: NDArray[np.int32], timeline: Timeline) -> list[MemoryCurve]:
    """The memory of every device over the step; its maximum is the simulator's peak.

    Args:
        problem: What was simulated: for a plan with replicas and the like, what `rlplace.expand` returns.
        device_of_group: int [G] of that problem.
        timeline: A run of that problem. When the step does not complete, the curves are the resident bytes.
    """
    devices = np.asarray(device_of_group, dtype=np.int32)
    if timeline.step_time_s is None:
        return [MemoryCurve(np.zeros(1), np.array([size])) for size in resident_by_device(problem, devices).tolist()]
    replay = _Replay(problem, timeline, task_graph(problem, timeline.microbatches), devices)
    replay.run()
    end = timeline.step_time_s
    return [
        MemoryCurve(np.array([*times, end]), np.array([*sizes, sizes[-1]], dtype=np.int64))
        for times, sizes in zip(replay.times, replay.sizes, strict=True)
    ]


class _Replay(Ledger):
    """The executor's ledger, kept by the times of a timeline; names as in `rlplace.simulator.reference`."""

    def __init__(
        self,
        problem: Problem,
        timeline: Timeline,
        tasks: TaskGraph,
        device_of_group: NDArray[np.int32],
    ) -> None:
        super().__init__(problem, tasks, device_of_group)
        self.timeline = timeline
        self.start, self.end = timeline.start_s.tolist(), timeline.end_s.tolist()
        self.channels = problem.links.effective_channels
        self.now = 0.0
        self.times: list[list[float]] = [[0.0] for _ in problem.devices]
        self.sizes: list[list[int]] = [[size] for size in self.memory]
        self.events: list[tuple[float, int, int, int]] = []
        self.busy_channels: set[int] = set()
        self._index_collectives()
        value_of = {key: v for v, key in enumerate(zip(tasks.tensor.tolist(), tasks.value_microbatch.tolist(), strict=True))}
        keys = zip(timeline.transfer_tensor.tolist(), timeline.transfer_microbatch.tolist(), strict=True)
        self.transfer_value = [value_of[key] for key in keys]
        self.next_transfer = 0

    def _index_collectives(self) -> None:
        """The members of every collective, and those that miss inputs; only for them it matters when inputs arrive."""
        tasks = self.tasks
        self.members = [
            tasks.collective_tasks[tasks.collective_ptr[i] : tasks.collective_ptr[i + 1]].tolist()
            for i in range(len(tasks.collective))
        ]
        self.collective_of = {task: i for i, members in enumerate(self.members) for task in members}
        self.missing = {task: len(self.inputs[task]) for task in self.collective_of}
        self.coming = sorted(range(len(self.members)), key=lambda i: self.start[self.members[i][0]], reverse=True)
        self.due: list[int] = []  # collectives that start in this instant

    def run(self) -> None:
        rank = np.empty(self.problem.num_ops, dtype=np.int64)
        rank[self.problem.topological_order] = np.arange(self.problem.num_ops)
        order = np.lexsort((rank[self.tasks.op], self.timeline.end_s, self.timeline.start_s)).tolist()
        queue = [task for task in reversed(order) if task not in self.collective_of]
        running: set[int] = set()
        waiting: list[int] = []  # tasks that start in this instant
        for value, left in enumerate(self.unmade):
            if left == 0:
                self.arrive(value, self.source[value])
        self.start_transfers()
        while True:
            while self.events and self.events[0][0] == self.now:
                _, kind, item, destination = heapq.heappop(self.events)
                if kind == _TRANSFER:
                    self.finish_transfer(item, destination)
                elif item in self.collective_of:
                    self.finish_collective(self.collective_of[item])
                else:
                    running.discard(self.device[item])
                    self.finish_task(item)
                self.start_transfers()
            while queue and self.start[queue[-1]] == self.now:
                waiting.append(queue.pop())
            held = []
            for task in waiting:
                if self.device[task] in running:
                    held.append(task)
                    continue
                running.add(self.device[task])
                self.hold_outputs(task)
                heapq.heappush(self.events, (self.end[task], _TASK, task, 0))
            waiting = held
            if not self.events:
                return
            self.now = self.events[0][0]

    def finish_task(self, task: int) -> None:
        self.free_inputs(task)
        for value in self.outputs[task]:
            if self.unmade[value] == 0:
                self.arrive(value, self.device[task])

    def finish_transfer(self, value: int, destination: int) -> None:
        source = self.source[value]
        self.busy_channels.difference_update(self.channels[source][destination])
        self.drop_use(value, source)
        self.arrive(value, destination)

    def finish_collective(self, index: int) -> None:
        self.busy_channels.difference_update(self.problem.collectives[self.tasks.collective[index]].channels)
        for task in sorted(self.members[index]):
            self.finish_task(task)

    def start_transfers(self) -> None:
        """Starts what the timeline starts now, as soon as it can; transfers are recorded in the order of their starts."""
        line = self.timeline
        while self.next_transfer < len(self.transfer_value):
            i = self.next_transfer
            value, source, destination = self.transfer_value[i], int(line.transfer_source[i]), int(line.transfer_destination[i])
            held = self.channels[source][destination]
            if line.transfer_start_s[i] != self.now or self.unmade[value] or not self.busy_channels.isdisjoint(held):
                break
            self.busy_channels.update(held)
            self.allocate(destination, self.size[value])
            heapq.heappush(self.events, (float(line.transfer_end_s[i]), _TRANSFER, value, destination))
            self.next_transfer += 1
        while self.coming and self.start[self.members[self.coming[-1]][0]] == self.now:
            self.due.append(self.coming.pop())
        for index in list(self.due):
            held = self.problem.collectives[self.tasks.collective[index]].channels
            members = sorted(self.members[index])
            if self.busy_channels.isdisjoint(held) and not any(self.missing[task] for task in members):
                self.due.remove(index)
                self.busy_channels.update(held)
                for task in members:
                    self.hold_outputs(task)
                heapq.heappush(self.events, (self.end[members[0]], _TASK, members[0], 0))

    def arrive(self, value: int, device: int) -> None:
        if self.collective_of:
            for task in self.readers[value]:
                if task in self.missing and self.device[task] == device:
                    self.missing[task] -= 1

    def allocate(self, device: int, size: int) -> None:
        super().allocate(device, size)
        self.note(device, size)

    def deallocate(self, device: int, size: int) -> None:
        super().deallocate(device, size)
        self.note(device, -size)

    def note(self, device: int, size: int) -> None:
        """Notes a new value; of several changes of one instant in the same direction only the last is kept."""
        if size == 0:
            return
        times, sizes, value = self.times[device], self.sizes[device], self.memory[device]
        if times[-1] == self.now and len(sizes) > 1 and (sizes[-1] > sizes[-2]) == (size > 0):
            sizes[-1] = value
        else:
            times.append(self.now)
            sizes.append(value)
