"""What the compiled simulator reads and writes: records and flat arrays.

Things that are read together sit together in one record, so that each costs one cache line. Numbers are unsigned, because
numba then knows that an index is not negative. Small lists share one array (`Graph.words`, `Work.words`), as every array that
is passed to compiled code costs time.

Words: a *task* is one execution of an op and a *value* what it makes (`rlplace.simulator.tasks`); a *reader* is a task that
waits for a value; a *slot* is an entry in the queues of channels: a copy of a value on another device, or a collective.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

NONE = 0xFFFFFFFF
"""No slot, no collective."""

TASK = np.dtype(
    [
        ("alloc_bytes", "i8"),  # outputs (but not values of several producers) and temporaries
        ("free_bytes", "i8"),  # temporaries and outputs that nobody reads
        ("inputs", "u4"),  # its row of `inputs` begins here and ends where that of the next task begins
        ("outputs", "u4"),
        ("op", "u4"),
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
        ("unmade", "u4"),  # producers that have not ended, where there are several
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
        ("position", "u4"),  # rank that comes next when an order is given; where passes are kept, the one that it is working on
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
    """The tasks of a step and the machine. Axes: K tasks, V values, E readers, D devices, N ops, G groups."""

    time_s: Any  # float64 [N, number of unlike devices]
    task: Any  # TASK [K + 2]; row K: what exists when the step begins
    readers: Any  # READER [E]
    pair: Any  # PAIR [D * D]
    table_s: Any  # float64 [., D, D]
    bytes: Any  # int64 [G + 2 D]: resident by group, reserved by device, limit by device (-1: none)
    words: Any  # uint32 [.], parts COLUMN to LINKS
    layout: Any  # int64, where each of the parts begins and the last one ends, then BATCHES to WIDTH


# Parts of `Graph.words`.
(
    COLUMN,  # [D], device's column of `time_s`
    MISSING,  # [K], inputs, and 1 for a gate
    FIRST,  # tasks that miss nothing
    INPUTS,  # values with bytes that a task reads
    OUTPUTS,  # values with readers that a task makes; the last row: that groups own
    OWNER,  # groups of that last row
    CHANNELS,  # held by pairs of devices and by collectives
    GATHERED,  # values of several producers
    GATHERED_PTR,  # [K + 1] if there are any
    GATHERED_OF,  # those that a task makes
    COLLECTIVE_OF,  # [K] if there are any, NONE for other tasks
    MEMBER_PTR,  # [collectives + 1]
    MEMBERS,  # tasks, ascending
    HELD,  # [collectives + 1], their rows of `channels` begin there
    MICROBATCH,  # [K] unless priorities alone decide, and so the following
    OP_GROUP,  # [N]
    EARLY_TASK,  # [N], number of an op's task in every micro-batch but the last, from the micro-batch's first
    GATED,  # ops that wait at gates
    CLOSES,  # [N], what the end of an op's task counts for
    APART_PTR,  # [N + 1]
    APART,  # groups whose stage an op that closes APART_STAGES closes
    LINKS,  # pairs of groups: a forward op of the second reads what one of the first makes
    PASS_PTR,  # [2 * micro-batches + 1] if passes are kept: ranks of each pass, backward and update before forward
) = range(23)

# What follows in `Graph.layout`.
(
    BATCHES,  # micro-batches
    GATES,  # those of the `rlplace.schedule.Schedule`
    EARLY_TASKS,  # tasks of a micro-batch, except the last
    WIDTH,  # channels of the widest slot, at least 1
) = range(24, 28)

# What the end of an op's task counts for: no stage, its own, those of `APART`, or its own if nothing else closes that.
NO_STAGE, OWN_STAGE, APART_STAGES, SPARE_STAGE = range(4)


class Work(NamedTuple):
    """State of one simulation, reused by the next."""

    value: Any  # VALUE [V + 1]
    slot: Any  # SLOT [E + collectives]
    channel: Any  # CHANNEL [channels]
    device: Any  # DEVICE [D]
    event: Any  # EVENT [D + E + collectives], a heap
    ready: Any  # uint64 [D, words], ready tasks of each device by rank; see `rlplace.simulator.queues`
    words: Any  # uint32 [.], parts WAITS to SPARE
    layout: Any  # int64, where each of the parts begins and the last one ends, then TRANSFERS
    time_s: Any  # float64 [2, K], start and end of every task, or [2, 0] when nobody wants to know
    transfer: Any  # TRANSFER [E] or [0]


# Parts of `Work.words`.
(
    WAITS,  # [K], what a task still waits for
    FOLLOWING,  # [slots * width], next slot in a channel's queue, by slot and position in its list of channels
    STARTABLE,  # [slots + width], slots that an event lets start
    DUE_DEVICES,  # [2 D], devices that may have something to start
    ABSENT,  # [collectives], tasks that still wait
    GATE_PTR,  # [stages + 1]
    GATE_OPS,  # [gated], by stage
    OPENED,  # [stages], gates that are open
    LEFT,  # [stages * micro-batches], tasks that a batch still waits for
    SPARE,  # [stages], 1 where no backward closes the stage
) = range(10)

TRANSFERS = 11
"""Where `Work.layout` says how many transfers have started."""
