"""When ops would run: the FIFO executor that ParDNN emulates, and the executor of this project, in one form.

The memory step needs start and end of every op and transfer. `fifo` emulates the paper's executor: a device takes ops in the
order in which they become ready, and transfers never wait for each other. `listed` reads the same off a simulation, whose
executor goes by priority and lets transfers queue; plans are judged there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.planners.common.evaluate import Assignment
from rlplace.planners.common.oparrays import op_arrays
from rlplace.problem import Problem
from rlplace.simulator import Timeline


@dataclass(frozen=True, eq=False)
class ExecutedStep:
    """One executed step.

    Axes: N ops, X transfers.

    Attributes:
        start_s, end_s: float64 [N].
        tensor, destination: int32 [X].
        sent_s, arrived_s: float64 [X], when each transfer starts to move and when it is there.
    """

    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    tensor: NDArray[np.int32]
    destination: NDArray[np.int32]
    sent_s: NDArray[np.float64]
    arrived_s: NDArray[np.float64]

    @property
    def makespan_s(self) -> float:
        """End of the last op."""
        return float(self.end_s.max(initial=0.0))


def fifo(problem: Problem, devices: Assignment) -> ExecutedStep:
    """Emulates the FIFO executor; missing links are priced as `rlplace.planners.common.groupgraph.finite_links` prices them.

    Args:
        problem: The problem.
        devices: int32 [G], every group on a device where it has a time.
    """
    from rlplace.planners.pardnn import fifo_kernel

    a = op_arrays(problem)
    ops, tensors, count = problem.num_ops, problem.num_tensors, problem.num_devices
    start, end = np.zeros(ops), np.zeros(ops)
    arrival = np.full((tensors, count), -1.0)
    fifo_kernel.fifo(
        devices, start, end, arrival, np.zeros(count), a.num_made_inputs.copy(), np.zeros(ops), np.empty(ops + 1),
        np.empty(ops + 1, dtype=np.int64), a.time_s, a.op_group, a.input_ptr, a.inputs, a.producer, a.holder, a.output_ptr,
        a.outputs, a.consumer_ptr, a.consumers, a.size, a.table, a.tables, a.latency, a.inverse,
    )  # fmt: skip
    tensor, destination = np.nonzero(arrival >= 0.0)
    sent = np.where(a.producer[tensor] >= 0, end[np.maximum(a.producer[tensor], 0)], 0.0)
    return ExecutedStep(start, end, tensor.astype(np.int32), destination.astype(np.int32), sent, arrival[tensor, destination])


def listed(line: Timeline) -> ExecutedStep:
    """The run of a simulated plan with one micro-batch."""
    return ExecutedStep(
        line.start_s, line.end_s, line.transfer_tensor, line.transfer_destination, line.transfer_start_s, line.transfer_end_s
    )
