"""The paper's executor: a device takes ops in the order in which they become ready, and transfers never wait for each other."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

from rlplace.placement.common.evaluate import Assignment
from rlplace.placement.common.oparrays import op_arrays
from rlplace.problem import Problem


@dataclass(frozen=True, eq=False)
class FifoStep:
    """One executed step; what it names is what `rlplace.simulator.Timeline` calls so.

    Attributes:
        start_s, end_s: float64 [N], times of the ops.
        transfer_tensor, transfer_destination: int32 [X].
        transfer_start_s, transfer_end_s: float64 [X].
    """

    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    transfer_tensor: NDArray[np.int32]
    transfer_destination: NDArray[np.int32]
    transfer_start_s: NDArray[np.float64]
    transfer_end_s: NDArray[np.float64]


def fifo(problem: Problem, devices: Assignment) -> FifoStep:
    """Emulates the FIFO executor; missing links are priced as `rlplace.placement.common.groupgraph.finite_links` prices them.

    An op is ready when its last input is there, which is known when its last producer has been given its time. No op that
    becomes known later can be ready earlier than one that is taken now, so one heap of ready times keeps every device's order.

    Args:
        problem: The problem.
        devices: int32 [G], every group on a device where it has a time.
    """
    a, device_of_op = op_arrays(problem), devices[problem.op_group].tolist()
    start, end, ready = ([0.0] * problem.num_ops for _ in range(3))
    free, missing = [0.0] * problem.num_devices, a.num_made_inputs.tolist()
    arrival: dict[tuple[int, int], tuple[float, float]] = {}

    def deliver(tensor: int, source: int, made_s: float) -> None:
        """Sends a tensor to all devices that read it, once each."""
        for consumer in a.consumers[a.consumer_ptr[tensor] : a.consumer_ptr[tensor + 1]].tolist():
            device, at = device_of_op[consumer], made_s
            if device != source:
                if a.table[tensor] >= 0:
                    seconds = a.tables[a.table[tensor], source, device]
                else:
                    seconds = a.latency[source, device] + a.size[tensor] * a.inverse[source, device]
                at = arrival.setdefault((tensor, device), (made_s, made_s + float(seconds)))[1]
            ready[consumer] = max(ready[consumer], at)

    for tensor in np.flatnonzero(a.producer < 0).tolist():
        deliver(tensor, int(devices[a.holder[tensor]]), 0.0)
    heap = [(ready[op], op) for op in range(problem.num_ops) if missing[op] == 0]
    heapify(heap)
    while heap:
        _, op = heappop(heap)
        device = device_of_op[op]
        start[op] = max(free[device], ready[op])
        end[op] = free[device] = start[op] + float(a.time_s[op, device])
        for tensor in a.outputs[a.output_ptr[op] : a.output_ptr[op + 1]].tolist():
            deliver(tensor, device, end[op])
            for consumer in a.consumers[a.consumer_ptr[tensor] : a.consumer_ptr[tensor + 1]].tolist():
                missing[consumer] -= 1
                if missing[consumer] == 0:
                    heappush(heap, (ready[consumer], consumer))
    sent = sorted(arrival)
    times = np.array([arrival[key] for key in sent]).reshape(-1, 2)
    tensor, destination = np.array(sent, dtype=np.int32).reshape(-1, 2).T
    return FifoStep(np.array(start), np.array(end), tensor, destination, times[:, 0], times[:, 1])
