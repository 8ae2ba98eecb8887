"""Arguments of the simulator, checked and brought into the form that compiled code reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InputError
from rlplace.problem import Problem

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
    fits = devices.ndim == len(shape) and all(want in (-1, size) for want, size in zip(shape, devices.shape, strict=True))
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


def priority_ranks(problem: Problem, lowered: Lowered, priority: Sequence[float] | NDArray[Any] | None) -> NDArray[np.uint32]:
    """uint32 [2, N], rank of every op and op of every rank."""
    from rlplace.simulator.lowering import compiled_ranks

    return lowered.ranks if priority is None else compiled_ranks(problem, check_priority(priority, problem))


def order_ranks(order: Sequence[Sequence[int]], count: int) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Ranks that number the ops of device 0 in the order given, then of device 1, and so on; and each one's first rank."""
    from rlplace.simulator.lowering import with_inverse

    listed = np.array([op for row in order for op in row], dtype=np.int64)
    others = np.ones(count, dtype=bool)  # ops of collectives are in no order
    others[listed] = False
    op_of_rank = np.concatenate([listed, np.flatnonzero(others)])
    position = np.cumsum([0] + [len(row) for row in order[:-1]]).astype(np.uint32)
    return with_inverse(op_of_rank), position
