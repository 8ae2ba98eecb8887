"""Memory by liveness: what a sequence of ops holds while it runs as one task, and what an update holds for a moment."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlplace.graph.optimizers import OPTIMIZERS
from rlplace.plan import PlacementPlan
from rlplace.problem import Problem


def inner_temporary_bytes(
    task: NDArray[np.int64],
    num_tasks: int,
    op_temporary_bytes: NDArray[np.int64],
    producer: NDArray[np.int64],
    last_use: NDArray[np.int64],
    tensor_bytes: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Temporary bytes of tasks that run their ops one after another.

    A task holds all tensors that leave it from its start to its end; on top of them it needs its inner peak, as far as that
    exceeds them. Ops run in order of their number within each task.

    Args:
        task: int [N], the task of every op.
        num_tasks: Number of tasks.
        op_temporary_bytes: int [N].
        producer: int [T], of tensors that ops make.
        last_use: int [T], the last op of the producer's own task that reads the tensor; the producer itself when nobody
            reads it; -1 when the tensor leaves the task.
        tensor_bytes: int [T].

    Returns:
        int64 [num_tasks].
    """
    count = len(task)
    sequence = np.argsort(task, kind="stable")  # ops of a task are neighbours, in order
    position = np.empty(count, dtype=np.int64)
    position[sequence] = np.arange(count)
    start = np.searchsorted(task[sequence], np.arange(num_tasks + 1))
    leaves = last_use < 0
    end = np.where(leaves, start[task[producer] + 1] - 1, position[np.maximum(last_use, 0)])
    change = np.zeros(count + 1, dtype=np.int64)
    np.add.at(change, position[producer], tensor_bytes)
    np.add.at(change, end + 1, -tensor_bytes)
    live = np.cumsum(change[:-1]) + op_temporary_bytes[sequence]
    peak = np.zeros(num_tasks, dtype=np.int64)
    held = start[1:] > start[:-1]
    if held.any():
        peak[held] = np.maximum.reduceat(live, start[:-1][held])
    leaving = np.zeros(num_tasks, dtype=np.int64)
    np.add.at(leaving, task[producer[leaves]], tensor_bytes[leaves])
    temporary: NDArray[np.int64] = np.maximum(peak - leaving, 0)
    return temporary


def foreach_update_bytes(
    problem: Problem, plan: PlacementPlan, optimizer: str, *, master_weights: bool = False
) -> NDArray[np.int64]:
    """What every device holds while torch's foreach update runs: all that is resident, and the copies that the update makes.

    Activations are gone by then. The executor's peaks leave the copies out (an op of one group knows nothing of the others),
    so where this exceeds them a plan needs ``fused=True`` or ``foreach=False``.

    Args:
        problem: The problem.
        plan: A plan for it.
        optimizer: One of `rlplace.graph.optimizers.OPTIMIZERS`.
        master_weights: Whether the state holds a float32 copy of the weights besides its moments.

    Returns:
        int64 [D], 0 for devices that hold no group.
    """
    kind = OPTIMIZERS[optimizer]
    copies = kind.moments + master_weights
    held = np.maximum(problem.optimizer_bytes, 0)
    if plan.optimizer_sharding and plan.replicas is not None:
        held = -(-held // len(plan.replicas))
    resident = problem.resident_bytes - np.maximum(problem.optimizer_bytes, 0) + held
    extra = held * kind.foreach_temporaries // copies if copies else np.zeros_like(held)
    total = np.zeros(problem.num_devices, dtype=np.int64)
    for row in plan.replicas or [list(range(problem.num_devices))]:
        np.add.at(total, np.asarray(row)[plan.device_of_group], resident + extra)
    reserved = np.array([device.reserved_bytes for device in problem.devices], dtype=np.int64)
    needed: NDArray[np.int64] = np.where(total > 0, total + reserved, 0)
    return needed
