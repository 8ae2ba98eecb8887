"""The memory rule (rule 4): which bytes every device holds as ops and transfers start and end.

An op's outputs take memory when it starts, its temporaries while it runs. A transfer's copy takes memory at the destination
from its start. A copy is freed when the last reader there has ended and, where the tensor is made, the last transfer as well.
What a group owns is part of its resident bytes, which stay for the whole step. This is the rule's only definition beside the
compiled twin (`rlplace.simulator.loop`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlplace.problem import Problem
from rlplace.simulator.timeline import resident_by_device


class Ledger:
    """Bytes in use on every device at one moment of a step.

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
        self.uses: dict[tuple[int, int], int] = {}  # (tensor, device) -> readers and sends that still need the copy
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
                self._add_uses(tensor, self.device[op], 1)
            self._add_uses(tensor, source, len(self.destinations(tensor)))

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
        self.deallocate(device, self.temporary[op])
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
            self.deallocate(device, self.size[tensor])

    def allocate(self, device: int, size: int) -> None:
        """Adds bytes to a device."""
        self.memory[device] += size
        self.peak[device] = max(self.peak[device], self.memory[device])

    def deallocate(self, device: int, size: int) -> None:
        """Removes bytes from a device."""
        self.memory[device] -= size

    def _add_uses(self, tensor: int, device: int, count: int) -> None:
        if count:
            self.uses[tensor, device] = self.uses.get((tensor, device), 0) + count
