"""The reference simulator: the rules of docs/cost-model/executor.md in plain Python.

This file is the definition of step time and peak memory. `rlplace.simulator.fast` is its compiled twin and must agree bit
for bit; when the two differ, this one is right. It is written to be read against the rules, not to be quick.

Rules, and where they live:
    1. devices, readiness, priority         `ReferenceRun.start_tasks`; `rlplace.simulator.schedules`
    2. transfers and channels               `ReferenceRun.enqueue`, `ReferenceRun.start_transfers`
    3. order within an instant              `ReferenceRun.run`
    4. memory                               `rlplace.simulator.ledger`
    5. step time                            end of the last event
    6. micro-batches and schedules          `rlplace.simulator.tasks`, `stages`, `schedules`; `ReferenceRun.open_gates`

Collectives: a collective joins the queue of waiting transfers when the last input of its last op is present; it starts when its
channels are free, like a transfer, and holds them for the longest of its ops' times. Its ops take memory when it starts and end
with it, in order of their numbers, as one event at the number of its first op. They occupy no device.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.plan.plan import check_order
from rlplace.problem import FORWARD, Problem
from rlplace.schedule import LIST, SCHEDULES, free_schedule
from rlplace.simulator.ledger import Ledger
from rlplace.simulator.records import TRANSFER
from rlplace.simulator.schedules import task_ranks
from rlplace.simulator.stages import gates
from rlplace.simulator.tasks import TaskGraph, order_tasks, task_graph
from rlplace.simulator.timeline import Timeline, fixed_violations, memory_violations, placement_violations, timeline_of

STUCK_ORDER = "the order makes devices wait for each other forever"
STUCK_GATES = "a stage's forward waits for its own backward, which the schedule holds back; use the schedule list"

_TASK, _TRANSFER = 0, 1


def stuck_reason(order: Sequence[Sequence[Any]] | None) -> str:
    """Why a step that has begun cannot complete: nothing but an order or gates can hold tasks back forever."""
    return STUCK_GATES if order is None else STUCK_ORDER


def simulate_reference(
    problem: Problem,
    device_of_group: Sequence[int] | NDArray[Any],
    *,
    priority: NDArray[np.float64] | None = None,
    order: Sequence[Sequence[Any]] | None = None,
    microbatches: int = 1,
    schedule: str = LIST,
    stage_of_group: NDArray[np.int32] | None = None,
) -> Timeline:
    """Simulates one step.

    Args:
        problem: The priced graph.
        device_of_group: int [G].
        priority: float [N], higher starts first; default `default_priority`.
        order: Per device the exact sequence of its ops, or of its (op, micro-batch) pairs; excludes `priority` and `schedule`.
        microbatches: Passes over the forward and backward ops.
        schedule: One of `rlplace.schedule.FREE_SCHEDULES`.
        stage_of_group: int [G], default the device.
    """
    devices = np.asarray(device_of_group, dtype=np.int32)
    free_schedule(schedule)
    if order is not None:
        check_order(order, devices, problem, microbatches)
    moved = fixed_violations(problem, devices)
    tasks = task_graph(problem, microbatches)
    violations = placement_violations(problem, devices)
    if violations:
        return timeline_of(problem, tasks, devices, violations + moved)
    run = ReferenceRun(problem, tasks, devices, priority, order, schedule, stage_of_group)
    run.run()
    if run.done < tasks.num_tasks:
        return timeline_of(problem, tasks, devices, [stuck_reason(order), *moved])
    peak = np.array(run.peak, dtype=np.int64)
    return timeline_of(
        problem, tasks, devices, memory_violations(problem, peak) + moved, step_time_s=run.now, peak_memory_bytes=peak,
        busy_s=np.array(run.busy), times_s=np.array([run.start, run.end]),
        transfers=np.array(run.transfers, dtype=TRANSFER),
    )  # fmt: skip


class ReferenceRun(Ledger):
    """State of one simulation."""

    def __init__(
        self,
        problem: Problem,
        tasks: TaskGraph,
        device_of_group: NDArray[np.int32],
        priority: NDArray[np.float64] | None,
        order: Sequence[Sequence[Any]] | None,
        schedule: str,
        stage_of_group: NDArray[np.int32] | None,
    ) -> None:
        super().__init__(problem, tasks, device_of_group)
        self.op = tasks.op.tolist()
        self.rank = task_ranks(problem, tasks, schedule, priority).tolist()
        self.order = None if order is None else order_tasks(tasks, order)  # per device
        self.channels = problem.links.effective_channels
        self.now, self.done = 0.0, 0
        self.events: list[tuple[float, int, int, int]] = []  # (end, kind, task or value, destination)
        self.running = [-1] * problem.num_devices
        self.keeps_pass = SCHEDULES[schedule].backward_first
        passes = zip((problem.op_phase[tasks.op] == FORWARD).tolist(), tasks.microbatch.tolist(), strict=True)
        self.pass_of = list(passes)  # of every task: its direction and micro-batch
        self.working_on: list[tuple[bool, int] | None] = [None] * problem.num_devices  # pass of the last task started
        self.position = [0] * problem.num_devices  # next entry of `order`
        self.ready: list[set[int]] = [set() for _ in problem.devices]
        self.waiting: list[tuple[int, int, int]] = []  # (value, source, destination) or (-1, collective, -1), in queue order
        self.busy_channels: set[int] = set()
        self.busy = [0.0] * problem.num_devices
        self.start, self.end = [np.nan] * tasks.num_tasks, [np.nan] * tasks.num_tasks
        self.transfers: list[tuple[float, float, int, int, int]] = []  # as `TRANSFER`
        self.missing = [len(values) for values in self.inputs]  # inputs not yet present, and a closed gate
        self.collective = [-1] * tasks.num_tasks
        self.members: list[list[int]] = []
        for index in range(len(tasks.collective)):
            self.members.append(tasks.collective_tasks[tasks.collective_ptr[index] : tasks.collective_ptr[index + 1]].tolist())
            for task in self.members[index]:
                self.collective[task] = index
        self.absent = [len(members) for members in self.members]  # ops of a collective that miss an input
        self.gates = gates(problem, tasks, schedule, device_of_group, stage_of_group)
        self.held: list[list[int]] = [[] for _ in range(self.gates.stages * self.gates.width)]
        for task, gate in enumerate(self.gates.gate.tolist()):
            if gate >= 0:
                self.missing[task] += 1
                self.held[gate].append(task)
        self.opened = [0] * self.gates.stages
        self.left = dict(self.gates.left)

    def run(self) -> None:
        """Rule 3: within an instant all ending events, then task starts, until nothing ends now."""
        for task, count in enumerate(self.missing):
            if count == 0:
                self.admit(task)
        for stage, count in enumerate(self.gates.open_first):
            self.open_gates(stage, count)
        for value, makers in enumerate(self.unmade):
            if makers == 0:
                self.arrive(value, self.source[value])
                self.enqueue(value)
        self.start_transfers()
        while True:
            while self.events and self.events[0][0] == self.now:
                _, kind, item, destination = heapq.heappop(self.events)
                if kind == _TRANSFER:
                    self.finish_transfer(item, destination)
                elif self.collective[item] >= 0:
                    self.finish_collective(self.collective[item])
                else:
                    self.running[self.device[item]] = -1
                    self.finish_task(item)
                self.start_transfers()
            self.start_tasks()
            if not self.events:
                return
            self.now = self.events[0][0]

    def start_tasks(self) -> None:
        """Rule 1: an idle device starts its ready task of lowest rank, or the next one of its order.

        Where the schedule has `backward_first`, it goes on with the micro-batch and direction that it is working on while a
        task of them is ready: a pass is not cut in two by a gradient that arrives in between, because the next stage waits
        for all of it.
        """
        for device, ready in enumerate(self.ready):
            if self.running[device] >= 0 or not ready:
                continue
            if self.order is None:
                going_on = {task for task in ready if self.keeps_pass and self.pass_of[task] == self.working_on[device]}
                task = min(going_on or ready, key=self.rank.__getitem__)
            else:
                task = self.order[device][self.position[device]]
                if task not in ready:
                    continue
                self.position[device] += 1
            ready.remove(task)
            time = float(self.problem.time_s[self.op[task], device])
            self.running[device], self.working_on[device] = task, self.pass_of[task]
            self.busy[device] += time
            self.occupy(task, time)
            heapq.heappush(self.events, (self.now + time, _TASK, task, 0))

    def occupy(self, task: int, time: float) -> None:
        """A task starts."""
        self.start[task], self.end[task] = self.now, self.now + time
        self.hold_outputs(task)

    def finish_task(self, task: int) -> None:
        device = self.device[task]
        self.done += 1
        self.free_inputs(task)
        for value in self.outputs[task]:
            if self.unmade[value] == 0:
                self.arrive(value, device)
                self.enqueue(value)
        for stage, batch in self.gates.counts_for[task]:
            self.left[stage, batch] -= 1
            if self.left[stage, batch] == 0:
                self.open_gates(stage, 1)

    def finish_transfer(self, value: int, destination: int) -> None:
        source = self.source[value]
        self.busy_channels.difference_update(self.channels[source][destination])
        self.drop_use(value, source)
        self.arrive(value, destination)

    def finish_collective(self, index: int) -> None:
        self.busy_channels.difference_update(self.problem.collectives[self.tasks.collective[index]].channels)
        for task in sorted(self.members[index]):
            self.finish_task(task)

    def open_gates(self, stage: int, count: int) -> None:
        """Rule 6: the next gates of a stage open; their tasks wait for their inputs alone."""
        for _ in range(count):
            if self.opened[stage] < self.gates.width:
                for task in self.held[stage * self.gates.width + self.opened[stage]]:
                    self.satisfy(task)
                self.opened[stage] += 1

    def arrive(self, value: int, device: int) -> None:
        """The value is present on `device`: its readers there miss one input less."""
        for task in self.readers[value]:
            if self.device[task] == device:
                self.satisfy(task)

    def satisfy(self, task: int) -> None:
        self.missing[task] -= 1
        if self.missing[task] == 0:
            self.admit(task)

    def admit(self, task: int) -> None:
        """A task misses nothing any more: it is ready, or one op less keeps its collective waiting."""
        index = self.collective[task]
        if index < 0:
            self.ready[self.device[task]].add(task)
            return
        self.absent[index] -= 1
        if self.absent[index] == 0:
            self.waiting.append((-1, index, -1))

    def enqueue(self, value: int) -> None:
        """Rule 2: one transfer to every other device that hosts a reader."""
        self.waiting.extend((value, self.source[value], device) for device in self.destinations(value))

    def start_transfers(self) -> None:
        """Rule 2: a waiting transfer starts when its channels are free and no earlier one wants any of them."""
        wanted: set[int] = set()
        still_waiting = []
        for value, source, destination in self.waiting:
            if value >= 0:
                held = self.channels[source][destination]
            else:
                held = self.problem.collectives[self.tasks.collective[source]].channels
            if wanted.isdisjoint(held) and self.busy_channels.isdisjoint(held):
                self.busy_channels.update(held)
                if value >= 0:
                    self.start_transfer(value, source, destination)
                else:
                    self.start_collective(source)
            else:
                wanted.update(held)
                still_waiting.append((value, source, destination))
        self.waiting = still_waiting

    def start_transfer(self, value: int, source: int, destination: int) -> None:
        table = self.problem.tensor_transfer_s.get(int(self.tasks.tensor[value]))
        links = self.problem.links
        size = self.size[value]
        time = links.transfer_s(source, destination, size) if table is None else float(table[source, destination])
        self.allocate(destination, size)
        self.transfers.append((self.now, self.now + time, value, source, destination))
        heapq.heappush(self.events, (self.now + time, _TRANSFER, value, destination))

    def start_collective(self, index: int) -> None:
        members = sorted(self.members[index])
        time = max(float(self.problem.time_s[self.op[task], self.device[task]]) for task in members)
        for task in members:
            self.occupy(task, time)
        heapq.heappush(self.events, (self.now + time, _TASK, members[0], 0))
