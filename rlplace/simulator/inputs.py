"""What people hand to the simulator, checked and brought into the form that compiled code reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InputError
from rlplace.problem import Problem
from rlplace.schedule import NO_GATES
from rlplace.simulator.stages import stage_numbers
from rlplace.simulator.tasks import order_tasks

if TYPE_CHECKING:
    from rlplace.simulator.lowering import Lowered


def check_devices(value: Any, shape: tuple[int, ...], problem: Problem) -> NDArray[np.int32]:
    """A contiguous int32 copy of one or several plans, -1 in `shape` standing for any length."""
    try:
        devices = np.asarray(value)
    except ValueError:
        raise InputError("device_of_group: expected rows of equal length") from None
    if devices.size == 0 and devices.ndim == len(shape):
        devices = devices.astype(np.int32)
    fits = devices.ndim == len(shape) and all(want in (-1, found) for want, found in zip(shape, devices.shape, strict=True))
    if not fits:
        wanted = " x ".join("K" if n < 0 else str(n) for n in shape)
        raise InputError(f"device_of_group: expected {wanted} device numbers, found shape {devices.shape}")
    if devices.dtype.kind not in "iu":
        raise InputError(f"device_of_group: expected whole numbers, found {devices.dtype}")
    if devices.size and (devices.min() < 0 or devices.max() >= problem.num_devices):
        raise InputError(f"device_of_group names a device outside 0..{problem.num_devices - 1}")
    return np.array(devices, dtype=np.int32, order="C")


def check_priority(priority: Sequence[float] | NDArray[Any], problem: Problem) -> NDArray[np.float64]:
    """float64 [N], every number finite."""
    values = np.asarray(priority, dtype=np.float64)
    if values.shape != (problem.num_ops,):
        raise InputError(f"priority: expected {problem.num_ops} numbers, found shape {values.shape}")
    if not np.isfinite(values).all():
        raise InputError("priority: every number must be finite")
    return values


def check_stages(stage_of_group: Sequence[int] | NDArray[Any] | None, problem: Problem) -> NDArray[np.int32] | None:
    """int32 [G], or None for a stage a device."""
    if stage_of_group is None:
        return None
    stages = np.asarray(stage_of_group)
    if stages.shape != (problem.num_groups,) or (stages.size and stages.dtype.kind not in "iu"):
        raise InputError(f"stage_of_group: expected a whole number for each of {problem.num_groups} groups")
    return stages.astype(np.int32)


def stage_words(stage: NDArray[np.int32] | None, lowered: Lowered) -> tuple[NDArray[np.uint32], int | None]:
    """Stages as the compiled simulator numbers them, and how many there are; none and None where they are the devices."""
    if stage is None or lowered.schedule.gates == NO_GATES:
        return np.zeros(0, dtype=np.uint32), None
    numbers = stage_numbers(stage, None).astype(np.uint32)
    return numbers, int(numbers.max(initial=0)) + 1


def priority_ranks(problem: Problem, lowered: Lowered, priority: Sequence[float] | NDArray[Any] | None) -> NDArray[np.uint32]:
    """uint32 [2, K], rank of every task and task of every rank."""
    from rlplace.simulator.lowering import ranks

    if priority is None:
        return lowered.ranks
    return ranks(problem, lowered.tasks, lowered.schedule, check_priority(priority, problem))


def order_ranks(order: Sequence[Sequence[Any]], lowered: Lowered) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Ranks that number the tasks of device 0 in the order given, then of device 1, and so on; and each one's first rank."""
    from rlplace.simulator.lowering import with_inverse

    tasks = lowered.tasks
    listed = np.array([task for row in order_tasks(tasks, order) for task in row], dtype=np.int64)
    others = np.ones(tasks.num_tasks, dtype=bool)  # tasks of collectives are in no order
    others[listed] = False
    task_of_rank = np.concatenate([listed, np.flatnonzero(others)])
    position = np.cumsum([0] + [len(row) for row in order[:-1]]).astype(np.uint32)
    return with_inverse(task_of_rank), position
