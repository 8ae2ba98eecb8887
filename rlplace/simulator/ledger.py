"""The memory rule (rule 4): which bytes every device holds as tasks and transfers start and end.

A task's outputs take memory when it starts (what several tasks make together, when the first of them starts), its temporaries
while it runs. A transfer's copy takes memory at the destination from its start. A copy is freed when the last reader there has
ended and, where the value is made, the last transfer as well. What a group owns is part of its resident bytes, which stay for
the whole step. This is the rule's only definition beside the compiled twin (`rlplace.simulator.loop`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlplace.problem import Problem
from rlplace.simulator.tasks import TaskGraph
from rlplace.simulator.timeline import resident_by_device


class Ledger:
    """What every device holds at one moment of a step.

    Attributes:
        memory: Bytes in use by device, resident and reserved bytes included.
        peak: The most that there was.
    """

    def __init__(self, problem: Problem, tasks: TaskGraph, device_of_group: NDArray[np.int32]) -> None:
        self.problem, self.tasks = problem, tasks
        self.device: list[int] = device_of_group[problem.op_group[tasks.op]].tolist()  # of every task
        self.memory: list[int] = resident_by_device(problem, device_of_group).tolist()
        self.peak = list(self.memory)
        self.temporary: list[int] = problem.temporary_bytes[tasks.op].tolist()
        self.outputs: list[list[int]] = [[] for _ in range(tasks.num_tasks)]
        self.inputs: list[list[int]] = [[] for _ in range(tasks.num_tasks)]
        self.size: list[int] = problem.tensor_bytes[tasks.tensor].tolist()
        self.owned: list[bool] = (problem.tensor_owner[tasks.tensor] >= 0).tolist()
        self.unmade: list[int] = []  # producers of each value that have not ended
        self.started: set[int] = set()  # values that take memory already
        self.source: list[int] = []  # device that holds the value first
        self.readers: list[list[int]] = []
        self.uses: dict[tuple[int, int], int] = {}  # (value, device) -> readers and sends that still need the copy
        for value in range(tasks.num_values):
            makers = tasks.producers[tasks.producer_ptr[value] : tasks.producer_ptr[value + 1]].tolist()
            readers = tasks.consumers[tasks.consumer_ptr[value] : tasks.consumer_ptr[value + 1]].tolist()
            owner = int(problem.tensor_owner[tasks.tensor[value]])
            source = self.device[makers[0]] if makers else int(device_of_group[owner])
            self.source.append(source)
            self.readers.append(readers)
            self.unmade.append(len(makers))
            for task in makers:
                self.outputs[task].append(value)
            for task in readers:
                self.inputs[task].append(value)
                self._add_uses(value, self.device[task], 1)
            self._add_uses(value, source, len(self.destinations(value)))

    def destinations(self, value: int) -> list[int]:
        """The other devices that host a reader."""
        return sorted({self.device[task] for task in self.readers[value]} - {self.source[value]})

    def hold_outputs(self, task: int) -> None:
        """A task starts: its outputs and temporaries take memory."""
        for value in self.outputs[task]:
            if value not in self.started:
                self.started.add(value)
                self.allocate(self.device[task], self.size[value])
        self.allocate(self.device[task], self.temporary[task])

    def free_inputs(self, task: int) -> None:
        """A task ends: its temporaries, the inputs that nothing else needs there, and outputs that nobody reads."""
        device = self.device[task]
        self.deallocate(device, self.temporary[task])
        for value in self.inputs[task]:
            self.drop_use(value, device)
        for value in self.outputs[task]:
            self.unmade[value] -= 1
            if self.unmade[value] == 0 and not self.readers[value]:
                self.release(value, device)

    def drop_use(self, value: int, device: int) -> None:
        """A reader there, or a transfer from there, has ended."""
        self.uses[value, device] -= 1
        if self.uses[value, device] == 0:
            self.release(value, device)

    def release(self, value: int, device: int) -> None:
        """Nothing needs the copy any more."""
        if not (self.owned[value] and device == self.source[value]):  # else part of its group's resident bytes
            self.deallocate(device, self.size[value])

    def allocate(self, device: int, size: int) -> None:
        """A device holds so many bytes more."""
        self.memory[device] += size
        self.peak[device] = max(self.peak[device], self.memory[device])

    def deallocate(self, device: int, size: int) -> None:
        """A device holds so many bytes less."""
        self.memory[device] -= size

    def _add_uses(self, value: int, device: int, count: int) -> None:
        if count:
            self.uses[value, device] = self.uses.get((value, device), 0) + count
