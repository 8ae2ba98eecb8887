"""The realised critical path: the chain of work, transfers and waits that made a step as long as it was.

Walking back from the last task to end: a task ran for some time; before that it was ready and waited while its device was busy
with others; and it became ready when its last input arrived, by a transfer or from a task of its own device, or when the
schedule let it go. A transfer moved for some time; before that it waited for its channels; and it was there to be sent when its
producer ended. So every moment of the step belongs to exactly one link of the chain, and the links' seconds add up to the step.

Waits are part of the chain, and what goes on during a wait is named but not followed: the chain follows what depends on what.
Where several inputs arrived in the same instant the first of them is followed.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.explaining.simulated_plan import SimulatedPlan, channel_holds
from rlplace.schedule import NO_GATES, SCHEDULES
from rlplace.simulator.stages import Gates, gates

COMPUTE, TRANSFER, COLLECTIVE, DEVICE, CHANNEL, ORDER = "compute", "transfer", "collective", "device busy", "link busy", "order"

CAUSES = (COMPUTE, TRANSFER, COLLECTIVE, DEVICE, CHANNEL, ORDER)
"""What a moment of the chain goes by with: an op runs; a tensor moves; a collective runs; a ready op waits for its device; a
transfer or collective waits for its channels; a ready op waits for its turn in the order while its device is idle."""


@dataclass(frozen=True)
class Link:
    """One link of the chain.

    Attributes:
        cause: One of `CAUSES`.
        start_s, end_s: From the beginning of the step.
        device: Where it computes or waits; of a transfer the source; -1 of collectives.
        destination: Receiving device of transfers and their waits, else -1.
        group: Group of the simulated problem that runs, is sent from, or waits.
        op: Op of the simulated problem; of transfers the producer, -1 for a parameter.
        microbatch: Micro-batch of the op.
        blocker: Op that the device is busy with, or that made what the channels are busy with; -1 where nothing is.
    """

    cause: str
    start_s: float
    end_s: float
    device: int
    destination: int
    group: int
    op: int
    microbatch: int
    blocker: int = -1

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end_s - self.start_s


def realised_path(run: SimulatedPlan) -> tuple[Link, ...]:
    """The chain in order of time; links of no length are left out.

    The first link begins at 0, each begins where the one before ends, and the last ends with the step. Empty when the step
    cannot complete.
    """
    if run.line.step_time_s is None or run.tasks.num_tasks == 0:
        return ()
    return tuple(link for link in reversed(list(_Walk(run).back())) if link.end_s > link.start_s)


Before = tuple[bool, int] | None
"""What came last before a link could begin: whether it is a transfer, and its number, else a task's; None: the step began."""


class _Walk:
    """Looks up what was before."""

    def __init__(self, run: SimulatedPlan) -> None:
        self.run, self.line, self.tasks, self.problem = run, run.line, run.tasks, run.problem
        self.device = run.task_device
        readers = np.argsort(self.tasks.consumers, kind="stable")
        value_of = np.repeat(np.arange(self.tasks.num_values), np.diff(self.tasks.consumer_ptr))
        self.input = value_of[readers]
        self.input_ptr = np.searchsorted(self.tasks.consumers[readers], np.arange(self.tasks.num_tasks + 1))
        batches = self.tasks.value_microbatch.tolist()
        number = {key: value for value, key in enumerate(zip(self.tasks.tensor.tolist(), batches, strict=True))}
        sent = zip(self.line.transfer_tensor.tolist(), self.line.transfer_microbatch.tolist(), strict=True)
        self.value_sent = [number[key] for key in sent]  # value of every transfer
        ends = zip(self.value_sent, self.line.transfer_destination.tolist(), strict=True)
        self.arrival = {key: transfer for transfer, key in enumerate(ends)}
        self.collective = np.full(self.tasks.num_tasks, -1, dtype=np.int64)
        for index in range(len(self.tasks.collective)):
            self.collective[self.members(index)] = index
        self.on_device = [self.by_start(self.device == d) for d in range(self.problem.num_devices)]
        self.channels = self.channel_uses()
        self.gates: Gates | None = None
        self.closers: dict[int, list[int]] = {}
        plan = run.plan
        if plan.order is None and SCHEDULES[plan.schedule].gates != NO_GATES:
            self.gates = gates(self.problem, self.tasks, plan.schedule, plan.device_of_group, plan.stage_of_group)
            self.closers = self.gate_closers(self.gates)

    def members(self, index: int) -> NDArray[np.int32]:
        return self.tasks.collective_tasks[self.tasks.collective_ptr[index] : self.tasks.collective_ptr[index + 1]]

    def by_start(self, here: NDArray[np.bool_]) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int32]]:
        """Start, end and op of the tasks that took a device's time, in order."""
        tasks = np.flatnonzero(here & (self.collective < 0) & (self.line.end_s > self.line.start_s))
        tasks = tasks[np.argsort(self.line.start_s[tasks], kind="stable")]
        return self.line.start_s[tasks], self.line.end_s[tasks], self.tasks.op[tasks]

    def channel_uses(self) -> dict[int, list[tuple[float, float, int]]]:
        """By channel who held it: (start, end, op that made what moves), in order of start."""
        uses: dict[int, list[tuple[float, float, int]]] = {}
        for channels, start, end, op, _ in channel_holds(self.run):
            for channel in channels:
                uses.setdefault(channel, []).append((start, end, op))
        for rows in uses.values():
            rows.sort()
        return uses

    def gate_closers(self, stage_gates: Gates) -> dict[int, list[int]]:
        """By stage the tasks whose end opened a gate, in order of time."""
        last: dict[tuple[int, int], int] = {}
        for task, batches in enumerate(stage_gates.counts_for):
            for batch in batches:
                before = last.get(batch)
                if before is None or self.line.end_s[task] > self.line.end_s[before]:
                    last[batch] = task
        closers: dict[int, list[int]] = {}
        for (stage, _), task in last.items():
            closers.setdefault(stage, []).append(task)
        for tasks in closers.values():
            tasks.sort(key=lambda task: float(self.line.end_s[task]))
        return closers

    def back(self) -> Iterator[Link]:
        """The chain from its end."""
        item: Before = (False, int(self.line.end_s.argmax()))
        while item is not None:
            is_transfer, number = item
            if is_transfer:
                item = yield from self.transfer(number)
            elif self.collective[number] >= 0:
                item = yield from self.together(int(self.collective[number]))
            else:
                item = yield from self.task(number)

    def task(self, task: int) -> Generator[Link, None, Before]:
        op, device = int(self.tasks.op[task]), int(self.device[task])
        start, end = float(self.line.start_s[task]), float(self.line.end_s[task])
        group, microbatch = int(self.problem.op_group[op]), int(self.tasks.microbatch[task])
        yield Link(COMPUTE, start, end, device, -1, group, op, microbatch)
        ready, before = self.ready(task)
        begins, ends, ops = self.on_device[device]
        among = slice(int(np.searchsorted(ends, ready, side="right")), int(np.searchsorted(begins, start)))
        spans = list(zip(begins[among].tolist(), ends[among].tolist(), ops[among].tolist(), strict=True))
        for begin, stop, blocker in reversed(_cover(spans, ready, start)):
            cause = DEVICE if blocker >= 0 else ORDER
            yield Link(cause, begin, stop, device, -1, group, op, microbatch, blocker)
        return before

    def transfer(self, x: int) -> Generator[Link, None, Before]:
        source, destination = int(self.line.transfer_source[x]), int(self.line.transfer_destination[x])
        start, end = float(self.line.transfer_start_s[x]), float(self.line.transfer_end_s[x])
        value = self.value_sent[x]
        available, before = self.made(value)
        tensor = int(self.tasks.tensor[value])
        op, owner = int(self.problem.tensor_producer[tensor]), int(self.problem.tensor_owner[tensor])
        group = int(self.problem.op_group[op]) if op >= 0 else owner
        microbatch = max(int(self.tasks.value_microbatch[value]), 0)
        yield Link(TRANSFER, start, end, source, destination, group, op, microbatch)
        held = self.problem.links.effective_channels[source][destination]
        for begin, stop, blocker in reversed(_cover(self.uses(held, available, start), available, start)):
            yield Link(CHANNEL, begin, stop, source, destination, group, op, microbatch, blocker)
        return before

    def together(self, index: int) -> Generator[Link, None, Before]:
        """A collective; it waited for the last input of all its ops."""
        members = self.members(index).tolist()
        task = members[0]
        op = int(self.tasks.op[task])
        start, end = float(self.line.start_s[task]), float(self.line.end_s[task])
        group, microbatch = int(self.problem.op_group[op]), int(self.tasks.microbatch[task])
        yield Link(COLLECTIVE, start, end, -1, -1, group, op, microbatch)
        ready, before = max((self.ready(member) for member in members), key=lambda moment: moment[0])
        held = self.problem.collectives[self.tasks.collective[index]].channels
        for begin, stop, blocker in reversed(_cover(self.uses(held, ready, start), ready, start)):
            yield Link(CHANNEL, begin, stop, -1, -1, group, op, microbatch, blocker)
        return before

    def uses(self, channels: tuple[int, ...], begin: float, end: float) -> list[tuple[float, float, int]]:
        """Who held any of these channels between two moments, in order of start."""
        return sorted(
            {use for channel in channels for use in self.channels.get(channel, ()) if use[1] > begin and use[0] < end}
        )

    def made(self, value: int) -> tuple[float, Before]:
        """When a value is there on the device that makes it, and the task that ended then."""
        makers = self.tasks.producers[self.tasks.producer_ptr[value] : self.tasks.producer_ptr[value + 1]]
        if len(makers) == 0:
            return 0.0, None
        last = int(makers[self.line.end_s[makers].argmax()])
        return float(self.line.end_s[last]), (False, last)

    def ready(self, task: int) -> tuple[float, Before]:
        """When a task had all that it needs, and what came last."""
        best: tuple[float, Before] = (0.0, None)
        for value in self.input[self.input_ptr[task] : self.input_ptr[task + 1]].tolist():
            x = self.arrival.get((value, int(self.device[task])))
            arrived = self.made(value) if x is None else (float(self.line.transfer_end_s[x]), (True, x))
            if arrived[0] > best[0] or best[1] is None:
                best = arrived
        gate = -1 if self.gates is None else int(self.gates.gate[task])
        if self.gates is not None and gate >= 0:
            stage, position = divmod(gate, self.gates.width)
            later = position - self.gates.open_first[stage]
            if later >= 0:
                closer = self.closers[stage][later]
                if self.line.end_s[closer] > best[0]:
                    best = (float(self.line.end_s[closer]), (False, closer))
        return best


def _cover(spans: list[tuple[float, float, int]], begin: float, end: float) -> list[tuple[float, float, int]]:
    """Cuts the time from `begin` to `end` into consecutive pieces, each with who occupies it, -1 where nobody does.

    Args:
        spans: (start, end, who) in order of start; they may overlap, the first to hold is named.
        begin: Seconds.
        end: Seconds.
    """
    pieces: list[tuple[float, float, int]] = []
    at = begin
    for start, stop, who in spans:
        if at >= end:
            break
        if stop <= at:
            continue
        if start > at:
            pieces.append((at, min(start, end), -1))
            at = min(start, end)
        if at < end:
            pieces.append((at, min(stop, end), who))
            at = min(stop, end)
    if at < end:
        pieces.append((at, end, -1))
    return pieces
