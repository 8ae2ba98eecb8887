"""Queues of the compiled simulator: events by time, ready tasks by rank, channels by order of arrival.

Ready tasks of a device are a set of bits by rank, under two levels of bits that say which words below are not zero. The first
one is found in three steps, however many there are.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

from rlplace.compiled import inner
from rlplace.simulator import records as r
from rlplace.simulator.records import NONE

IDLE, RUNNING, DUE = range(3)
"""State of a device; DUE: idle, and in the list of those that may have something to start."""


@inner(forceinline=True)
def levels(tasks):
    """Returns the offsets of the second and the third level of a set of ready tasks."""
    low = (tasks + 63) >> 6
    middle = (low + 63) >> 6
    top = (middle + 63) >> 6
    return top, top + middle


@inner(forceinline=True)
def part(owner, number):
    """Returns one of the lists that share the words of a `Graph` or a `Work`."""
    return owner.words[owner.layout[number] : owner.layout[number + 1]]


@intrinsic
def _lowest_bit(typingctx, word):
    """Counts trailing zeros: the number of the lowest bit that is set."""

    def codegen(context, builder, signature, args):
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), codegen


@inner(forceinline=True)
def _bit(number):
    return np.uint64(1) << np.uint64(number & 63)


@inner(forceinline=True)
def add_ready(ready, device, due, waiting, middle, low, rank, d):
    """Adds a rank to a device's set; `middle` and `low` are where its levels begin.

    A device that is idle is then due. Without branches, so that numba need not count references here.

    Returns:
        The length of `due`.
    """
    ready[d, low + (rank >> 6)] |= _bit(rank)
    ready[d, middle + (rank >> 12)] |= _bit(rank >> 6)
    ready[d, rank >> 18] |= _bit(rank >> 12)
    idle = device[d].state == IDLE
    device[d].ready += 1
    device[d].state += DUE * idle
    due[waiting] = d
    return np.uint32(waiting + idle)


@inner(forceinline=True)
def is_ready(ready, device, low, rank):
    """Returns whether a rank is in a device's set."""
    return ready[device, low + (rank >> 6)] & _bit(rank) != 0


@inner(forceinline=True)
def remove_ready(ready, device, middle, low, rank):
    """Removes a rank from a device's set."""
    word = ready[device, low + (rank >> 6)] & ~_bit(rank)
    ready[device, low + (rank >> 6)] = word
    if word == 0:
        word = ready[device, middle + (rank >> 12)] & ~_bit(rank >> 6)
        ready[device, middle + (rank >> 12)] = word
        if word == 0:
            ready[device, rank >> 18] &= ~_bit(rank >> 12)


@inner(forceinline=True)
def first_ready(ready, device, middle, low):
    """Returns the lowest rank of a set that is not empty."""
    i = 0
    while ready[device, i] == 0:
        i += 1
    i = (i << 6) + _lowest_bit(ready[device, i])
    i = (i << 6) + _lowest_bit(ready[device, middle + i])
    return (i << 6) + _lowest_bit(ready[device, low + i])


@inner(forceinline=True)
def push_event(event, size, time_s, key):
    """Adds to a heap of `size` events, ordered by (time, key)."""
    i = np.uint32(size)
    while i > 0:
        parent = np.uint32((i - 1) >> 1)
        if event[parent].time_s < time_s or (event[parent].time_s == time_s and event[parent].key < key):
            break
        event[i].time_s, event[i].key = event[parent].time_s, event[parent].key
        i = parent
    event[i].time_s, event[i].key = time_s, key


@inner(forceinline=True)
def pop_event(event, size):
    """Removes the first of `size` events and returns its key."""
    first = event[0].key
    last = np.uint32(size - 1)
    time_s, key = event[last].time_s, event[last].key
    i = np.uint32(0)
    while True:
        child = np.uint32(2 * i + 1)
        if child >= last:
            break
        right = np.uint32(child + 1)
        if right < last and (
            event[right].time_s < event[child].time_s
            or (event[right].time_s == event[child].time_s and event[right].key < event[child].key)
        ):
            child = right
        if time_s < event[child].time_s or (time_s == event[child].time_s and key < event[child].key):
            break
        event[i].time_s, event[i].key = event[child].time_s, event[child].key
        i = child
    event[i].time_s, event[i].key = time_s, key
    return first


@inner(forceinline=True)
def join_queues(slots, channel, channels, following, width, startable, starting, slot, begin, end):
    """Adds a slot to the queues of `channels[begin:end]`; returns how many slots can start now."""
    blocked = 0
    node = np.uint32(slot * width)
    for k in range(begin, end):
        at = channels[k]
        if channel[at].head == NONE:
            channel[at].head = slot
        else:
            following[channel[at].tail] = slot
            blocked += 1
        following[node] = NONE
        channel[at].tail = node
        node = np.uint32(node + 1)
    slots[slot].blocked = blocked
    slots[slot].channels, slots[slot].channels_end = begin, end
    startable[starting] = slot  # whether it can or not: a branch here would make numba count references
    return np.uint32(starting + (blocked == 0))


@inner(forceinline=True)
def leave_queues(slots, channel, channels, following, width, startable, starting, slot):
    """Passes the channels of a slot to the next in their queues; returns how many slots can start now."""
    node = np.uint32(slot * width)
    for k in range(slots[slot].channels, slots[slot].channels_end):
        heir = following[node]
        channel[channels[k]].head = heir
        node = np.uint32(node + 1)
        if heir != NONE:
            blocked = slots[heir].blocked - 1
            slots[heir].blocked = blocked
            if blocked == 0:
                i = starting  # several start in the order in which they joined, which is that of their numbers
                while i > 0 and startable[np.uint32(i - 1)] > heir:
                    startable[i] = startable[np.uint32(i - 1)]
                    i = np.uint32(i - 1)
                startable[i] = heir
                starting = np.uint32(starting + 1)
    return starting


@inner
def member_waits(g, w, collective, used, starting):
    """Counts one member of a collective as ready; with the last one it joins the queues of its channels."""
    absent, held, slots = part(w, r.ABSENT), part(g, r.HELD), w.slot
    absent[collective] -= 1
    if absent[collective] > 0:
        return used, starting
    slots[used].value, slots[used].device = collective, r.NONE
    begin, end = np.int64(held[collective]), np.int64(held[collective + 1])
    starting = join_queues(
        slots, w.channel, part(g, r.CHANNELS), part(w, r.FOLLOWING), g.layout[r.WIDTH], part(w, r.STARTABLE),
        starting, used, begin, end,
    )  # fmt: skip
    return np.uint32(used + 1), starting
