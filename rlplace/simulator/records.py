"""Records and flat arrays of the compiled simulator.

Things that are read together sit together in one record, so that each costs one cache line. Numbers are unsigned, because
numba then knows that an index is not negative. Small lists share one array (`Graph.words`, `Work.words`), as every array that
is passed to compiled code costs time.

Words: a *task* is an op as it runs and a *value* a tensor as it exists; both have the numbers of the problem. A *reader* is a
task that waits for a value; a *slot* is an entry in the queues of channels: a copy of a value elsewhere, or a collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlplace.arrays import Array
from rlplace.errors import InputError
from rlplace.problem import Problem

if TYPE_CHECKING:
    from rlplace.simulator.lowering import Lowered

NONE = 0xFFFFFFFF
"""No slot, no collective."""

TASK = np.dtype(
    [
        ("alloc_bytes", "i8"),  # outputs and temporaries
        ("free_bytes", "i8"),  # temporaries and outputs without readers
        ("inputs", "u4"),  # its row of `inputs` begins here and ends where that of the next task begins
        ("outputs", "u4"),
        ("group", "u4"),
    ],
    align=True,
)
VALUE = np.dtype(
    [
        ("bytes", "i8"),
        ("readers", "u4"),  # its row of readers begins here
        ("table", "i4"),  # index into `table_s`, -1 where latency + bytes / bandwidth applies
        ("source", "u4"),  # device that holds it first
        ("uses", "u4"),  # readers and sends that still need the copy there
        ("slots", "u4"),  # its copies on other devices begin here, by device
    ],
    align=True,
)
READER = np.dtype([("task", "u4"), ("group", "u4")], align=True)
PAIR = np.dtype([("latency_s", "f8"), ("bandwidth", "f8"), ("channels", "u4"), ("channels_end", "u4")], align=True)
DEVICE = np.dtype(
    [
        ("memory", "i8"),
        ("peak", "i8"),
        ("busy_s", "f8"),
        ("ready", "u4"),  # how many tasks are ready
        ("state", "u4"),  # IDLE, RUNNING or DUE
        ("position", "u4"),  # rank that comes next when an order is given
    ],
    align=True,
)
SLOT = np.dtype(
    [
        ("value", "u4"),  # or the collective
        ("device", "u4"),  # NONE for a collective
        ("uses", "u4"),  # readers that still need the copy
        ("blocked", "u4"),  # channels whose queue it does not head
        ("channels", "u4"),  # what it holds: this part of `channels`
        ("channels_end", "u4"),
    ],
    align=True,
)
CHANNEL = np.dtype([("head", "u4"), ("tail", "u4")], align=True)  # slot, NONE if none; index into `following`
EVENT = np.dtype([("time_s", "f8"), ("key", "i8")], align=True)
TRANSFER = np.dtype([("start_s", "f8"), ("end_s", "f8"), ("value", "i4"), ("source", "i4"), ("destination", "i4")], align=True)


class Graph(NamedTuple):
    """The tasks of a step and the machine. Axes: K tasks, U unlike devices, E readers, D devices, G groups."""

    time_s: Any = Array("float64", "K U")
    task: Any = Array(TASK, "K+2")  # row K: what exists when the step begins
    readers: Any = Array(READER, "E")
    pair: Any = Array(PAIR, "D*D")
    table_s: Any = Array("float64", ". D D")
    bytes: Any = Array("int64", "G+2D")  # resident by group, reserved by device, limit by device (-1: none)
    words: Any = Array("uint32", ".")  # parts COLUMN to HELD
    layout: Any = Array("int64", ".")  # where each of the parts begins and the last one ends, then WIDTH


# Parts of `Graph.words`.
(
    COLUMN,  # [D], device's column of `time_s`
    MISSING,  # [K], inputs
    FIRST,  # tasks that miss nothing
    INPUTS,  # values with bytes that a task reads
    OUTPUTS,  # values with readers that a task makes; the last row: that groups own
    OWNER,  # groups of that last row
    CHANNELS,  # held by pairs of devices and by collectives
    COLLECTIVE_OF,  # [K] if there are any, NONE for other tasks
    MEMBER_PTR,  # [collectives + 1]
    MEMBERS,  # tasks, ascending
    HELD,  # [collectives + 1], their rows of `channels` begin there
) = range(11)

WIDTH = 12
"""Entry of `Graph.layout` with the number of channels of the widest slot, at least 1."""


class Work(NamedTuple):
    """State of one simulation, reused by the next. Axes: V values, S slots, H slots and devices, K tasks, E readers.

    K and E are 0 where no times are recorded.
    """

    value: Any = Array(VALUE, "V")  # and the end of the last one's readers
    slot: Any = Array(SLOT, "S")
    channel: Any = Array(CHANNEL, "C")
    device: Any = Array(DEVICE, "D")
    event: Any = Array(EVENT, "H")  # a heap
    ready: Any = Array("uint64", "D R")  # ready tasks of each device by rank; see `rlplace.simulator.queues`
    words: Any = Array("uint32", "W")  # parts WAITS to ABSENT
    layout: Any = Array("int64", "P")  # where each of the parts begins and the last one ends, then TRANSFERS
    time_s: Any = Array("float64", "2 K")  # start and end of every task
    transfer: Any = Array(TRANSFER, "E")


# Parts of `Work.words`.
(
    WAITS,  # [K], what a task still waits for
    FOLLOWING,  # [slots * width], next slot in a channel's queue, by slot and position in its list of channels
    STARTABLE,  # [slots + width], slots that an event lets start
    DUE_DEVICES,  # [2 D], devices that may have something to start
    ABSENT,  # [collectives], tasks that still wait
) = range(5)

TRANSFERS = 6
"""Entry of `Work.layout` with the number of transfers that have started."""


def check_devices(value: Any, shape: tuple[int, ...], problem: Problem) -> NDArray[np.int32]:
    """Returns a contiguous int32 copy of one or several plans, -1 in `shape` standing for any length."""
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
    """Returns float64 [N], every number finite."""
    values = np.asarray(priority, dtype=np.float64)
    if values.shape != (problem.num_ops,):
        raise InputError(f"priority: expected {problem.num_ops} numbers, found shape {values.shape}")
    if not np.isfinite(values).all():
        raise InputError("priority: every number must be finite")
    return values


def priority_ranks(problem: Problem, lowered: Lowered, priority: Sequence[float] | NDArray[Any] | None) -> NDArray[np.uint32]:
    """Returns uint32 [2, N], rank of every op and op of every rank."""
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
