"""The compiled twin of `rlplace.simulator.reference`: the same step, bit for bit, some hundred times quicker.

Everything numba compiles lives in this one file, because numba's on-disk cache only notices changes of the file that holds
the compiled function. `rlplace.simulator.lowering` builds the arrays, `rlplace.simulator.api` is what people call.

Where this differs in form, not in result, from the reference:
    * A ready task is known by its *rank* (position in the order of highest priority, then smaller number), so that a
      device's ready heap compares one integer. With an explicit order, ranks number the ops of device 0, then of device 1,
      and so on, each in the order given, and a device starts nothing but its next rank.
    * A tensor's copies on other devices occupy *slots* ``consumer_ptr[t], consumer_ptr[t] + 1, ...`` in order of device
      (there are never more than consumers). Slot order is therefore the order (tensor number, destination) in which
      transfers that end together are processed, and ``N + 1 + slot`` is the key of their events, after all tasks.
    * Every channel has a queue of transfers, the running one at its head. "All its channels are free and no earlier waiting
      transfer wants any of them" is the same as "it heads the queue of each of its channels"; `blocked` counts the others.

Sums run left to right in float64; no fast-math, so the compiler may neither reorder nor contract them.
"""

# mypy: allow-untyped-defs, disable-error-code="assignment"

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

DONE, CANNOT_RUN, STUCK, BAD_DEVICE = range(4)
"""Outcome of a simulation; CANNOT_RUN: a null time or missing link; BAD_DEVICE: `device_of_group` is out of range."""


IDLE, RUNNING, DUE = range(3)
"""State of a device; DUE: idle, and in the list of those that may have something to start."""

# A division by zero cannot happen, so no code for its error; only `simulate_plans` and `bottom_levels` are called from outside,
# so the others need no wrappers. Both shorten the first start, when all of this is compiled.
_SHARED = {"cache": True, "error_model": "numpy", "no_cfunc_wrapper": True}
_INNER = {"error_model": "numpy", "no_cfunc_wrapper": True, "no_cpython_wrapper": True}


class Graph(NamedTuple):
    """A problem as flat arrays; the axes are those of `Problem`, and C is the number of channels."""

    time_s: Any  # float64 [N, D]
    op_group: Any  # int32 [N]
    num_inputs: Any  # int32 [N]
    alloc_bytes: Any  # int64 [N], outputs and temporaries
    free_bytes: Any  # int64 [N], temporaries and outputs that nobody consumes
    input_ptr: Any  # int32 [N + 1]
    inputs: Any  # int32 [E], tensors
    output_ptr: Any  # int32 [N + 2]
    outputs: Any  # int32 [.], tensors with consumers that an op makes; the last row: that groups own
    tensor_producer: Any  # int32 [T]
    tensor_owner: Any  # int32 [T]
    tensor_bytes: Any  # int64 [T]
    tensor_table: Any  # int32 [T], index into table_s, -1 where latency + bytes / bandwidth applies
    table_s: Any  # float64 [., D, D]
    consumer_ptr: Any  # int32 [T + 1]
    consumers: Any  # int32 [E]
    edge_tensor: Any  # int32 [E]
    bandwidth: Any  # float64 [D, D]
    latency: Any  # float64 [D, D]
    channel_ptr: Any  # int32 [D * D + 1]
    channels: Any  # int32 [.]
    width: Any  # int32 [1], most channels that a transfer holds, at least 1
    resident_bytes: Any  # int64 [G]
    reserved_bytes: Any  # int64 [D]
    limit_bytes: Any  # int64 [D], -1 where there is no limit


class Work(NamedTuple):
    """Buffers of one simulation, reused by the next."""

    device_of_op: Any  # int32 [N]
    duration_s: Any  # float64 [N]
    missing: Any  # int32 [N], inputs not yet present
    source: Any  # int32 [T], device that holds the tensor first
    source_uses: Any  # int32 [T], consumers and sends that still need the copy there
    copies: Any  # int32 [T], other devices that host a consumer
    copy_device: Any  # int32 [E], by slot
    copy_uses: Any  # int32 [E], by slot
    blocked: Any  # int32 [E], by slot: channels whose queue it does not head
    joined: Any  # int32 [E], by slot: when it joined the queues
    following: Any  # int32 [E * width], next slot in a channel's queue, by slot and position in its list of channels
    head: Any  # int32 [C], slot at the head of a channel's queue, -1 when empty
    tail: Any  # int32 [C], index into `following` of the last entry
    startable: Any  # int32 [E + width], slots that an event lets start
    ready: Any  # int32 [N], ready heaps of the devices one after another
    ready_ptr: Any  # int32 [D + 1]
    ready_size: Any  # int32 [D]
    state: Any  # int8 [D], IDLE, RUNNING or DUE
    due: Any  # int32 [D], devices that may have something to start
    position: Any  # int32 [D], rank that comes next when an order is given
    heap_s: Any  # float64 [D + E], ends of running tasks and transfers
    heap_key: Any  # int32 [D + E]
    memory: Any  # int64 [D]
    peak: Any  # int64 [D]
    busy_s: Any  # float64 [D]
    start_s: Any  # float64 [N]
    end_s: Any  # float64 [N]
    transfer_slot: Any  # int32 [E], in order of start
    transfer_start_s: Any  # float64 [E]
    transfer_end_s: Any  # float64 [E]


@njit(forceinline=True, **_INNER)
def _push_event(heap_s, heap_key, size, time, key):
    """Adds to a binary heap ordered by (time, key)."""
    i = size
    while i > 0:
        parent = (i - 1) >> 1
        if heap_s[parent] < time or (heap_s[parent] == time and heap_key[parent] < key):
            break
        heap_s[i], heap_key[i] = heap_s[parent], heap_key[parent]
        i = parent
    heap_s[i], heap_key[i] = time, key


@njit(forceinline=True, **_INNER)
def _pop_event(heap_s, heap_key, size):
    """Removes the first event and returns its key; `size` counts it."""
    first = heap_key[0]
    size -= 1
    time, key = heap_s[size], heap_key[size]
    i = 0
    while True:
        child = 2 * i + 1
        if child >= size:
            break
        right = child + 1
        if right < size and (
            heap_s[right] < heap_s[child] or (heap_s[right] == heap_s[child] and heap_key[right] < heap_key[child])
        ):
            child = right
        if time < heap_s[child] or (time == heap_s[child] and key < heap_key[child]):
            break
        heap_s[i], heap_key[i] = heap_s[child], heap_key[child]
        i = child
    heap_s[i], heap_key[i] = time, key
    return first


@njit(forceinline=True, **_INNER)
def _add_ready(ready, base, size, rank):
    """Adds a rank to the ready heap of `size` entries that starts at `base`."""
    i = size
    while i > 0:
        parent = (i - 1) >> 1
        if ready[base + parent] < rank:
            break
        ready[base + i] = ready[base + parent]
        i = parent
    ready[base + i] = rank


@njit(forceinline=True, **_INNER)
def _take_ready(ready, base, size):
    """Removes and returns the lowest rank of the ready heap that starts at `base`; `size` counts it."""
    size -= 1
    first, last = ready[base], ready[base + size]
    i = 0
    while True:
        child = 2 * i + 1
        if child >= size:
            break
        if child + 1 < size and ready[base + child + 1] < ready[base + child]:
            child += 1
        if last < ready[base + child]:
            break
        ready[base + i] = ready[base + child]
        i = child
    ready[base + i] = last
    return first


@njit(**_INNER)
def _prepare(g, w, device_of_group):
    """Fills `w` for a plan: where each op and copy sits, who uses them, resident bytes; returns an outcome."""
    time_s, op_group, num_inputs, reserved_bytes, resident_bytes = (
        g.time_s, g.op_group, g.num_inputs, g.reserved_bytes, g.resident_bytes
    )  # fmt: skip
    tensor_producer, tensor_owner, consumer_ptr, consumers, bandwidth = (
        g.tensor_producer, g.tensor_owner, g.consumer_ptr, g.consumers, g.bandwidth
    )  # fmt: skip
    device_of_op, duration_s, missing, ready_ptr, ready_size = (
        w.device_of_op,
        w.duration_s,
        w.missing,
        w.ready_ptr,
        w.ready_size,
    )
    source_of, source_uses, copies, copy_device, copy_uses = w.source, w.source_uses, w.copies, w.copy_device, w.copy_uses
    state, due, position, head, memory, peak, busy_s = w.state, w.due, w.position, w.head, w.memory, w.peak, w.busy_s

    num_ops, num_devices = time_s.shape
    outcome = DONE
    for device in range(num_devices):
        memory[device] = reserved_bytes[device]
        busy_s[device] = 0.0
        ready_size[device] = 0
        state[device] = DUE
        due[device] = device
        ready_ptr[device + 1] = 0
    for group in range(len(device_of_group)):
        device = device_of_group[group]
        if device < 0 or device >= num_devices:
            return BAD_DEVICE
        memory[device] += resident_bytes[group]
    for device in range(num_devices):
        peak[device] = memory[device]
    for channel in range(len(head)):
        head[channel] = -1
    for op in range(num_ops):
        device = device_of_group[op_group[op]]
        device_of_op[op] = device
        ready_ptr[device + 1] += 1
        time = time_s[op, device]
        duration_s[op] = time
        missing[op] = num_inputs[op]
        if time != time:
            outcome = CANNOT_RUN
    ready_ptr[0] = 0
    for device in range(num_devices):
        position[device] = ready_ptr[device]
        ready_ptr[device + 1] += ready_ptr[device]
    for tensor in range(len(copies)):
        producer = tensor_producer[tensor]
        source = device_of_op[producer] if producer >= 0 else device_of_group[tensor_owner[tensor]]
        first = consumer_ptr[tensor]
        end, uses = first, 0
        for edge in range(first, consumer_ptr[tensor + 1]):
            device = device_of_op[consumers[edge]]
            if device == source:
                uses += 1
                continue
            slot = end  # the slots of a tensor are kept sorted by device
            while slot > first and copy_device[slot - 1] > device:
                slot -= 1
            if slot > first and copy_device[slot - 1] == device:
                copy_uses[slot - 1] += 1
                continue
            for other in range(end, slot, -1):
                copy_device[other], copy_uses[other] = copy_device[other - 1], copy_uses[other - 1]
            copy_device[slot], copy_uses[slot] = device, 1
            end += 1
            if bandwidth[source, device] == 0.0:
                outcome = CANNOT_RUN
        source_of[tensor] = source
        copies[tensor] = end - first
        source_uses[tensor] = uses + end - first
    return outcome


@njit(**_INNER)
def _run(g, w, rank_of_op, op_of_rank, ordered):
    """Rule 3 on a prepared plan; returns (outcome, step time, number of transfers).

    One long function over local names: a tuple of arrays passed on to helpers would count references at every call.
    """
    alloc_bytes, free_bytes, input_ptr, inputs, output_ptr, outputs = (
        g.alloc_bytes, g.free_bytes, g.input_ptr, g.inputs, g.output_ptr, g.outputs
    )  # fmt: skip
    tensor_producer, tensor_bytes, tensor_table, table_s = g.tensor_producer, g.tensor_bytes, g.tensor_table, g.table_s
    consumer_ptr, consumers, edge_tensor, bandwidth, latency = (
        g.consumer_ptr, g.consumers, g.edge_tensor, g.bandwidth, g.latency
    )  # fmt: skip
    channel_ptr, channels, width = g.channel_ptr, g.channels, g.width[0]
    device_of_op, duration_s, missing = w.device_of_op, w.duration_s, w.missing
    source_of, source_uses, copies, copy_device, copy_uses = w.source, w.source_uses, w.copies, w.copy_device, w.copy_uses
    blocked, joined, following, head, tail, startable = w.blocked, w.joined, w.following, w.head, w.tail, w.startable
    ready, ready_ptr, ready_size, state, position = w.ready, w.ready_ptr, w.ready_size, w.state, w.position
    due, heap_s, heap_key, memory, peak, busy_s = w.due, w.heap_s, w.heap_key, w.memory, w.peak, w.busy_s
    start_s, end_s, transfer_slot, transfer_start_s, transfer_end_s = (
        w.start_s, w.end_s, w.transfer_slot, w.transfer_start_s, w.transfer_end_s
    )  # fmt: skip

    num_ops, num_devices = g.time_s.shape
    for op in range(num_ops):
        if missing[op] == 0:
            device = device_of_op[op]
            _add_ready(ready, ready_ptr[device], ready_size[device], rank_of_op[op])
            ready_size[device] += 1

    now, done, transfers, entries = 0.0, 0, 0, 0
    events = np.int64(0)  # no literal: that would compile the heaps once more
    waiting = num_devices  # length of `due`
    key = num_ops  # the first event: the step begins, and what groups own is there
    while True:
        while True:  # everything that ends now
            found = 0  # transfers that this event lets start
            if key < num_ops:  # a task ends: free temporaries, unused outputs, inputs whose last use this was
                done += 1
                device = device_of_op[key]
                state[device] = DUE
                due[waiting] = device
                waiting += 1
                freed = free_bytes[key]
                for i in range(input_ptr[key], input_ptr[key + 1]):
                    tensor = inputs[i]
                    if source_of[tensor] == device:
                        source_uses[tensor] -= 1
                        if source_uses[tensor] == 0 and tensor_producer[tensor] >= 0:
                            freed += tensor_bytes[tensor]
                    else:
                        slot = consumer_ptr[tensor]
                        while copy_device[slot] != device:
                            slot += 1
                        copy_uses[slot] -= 1
                        if copy_uses[slot] == 0:
                            freed += tensor_bytes[tensor]
                memory[device] -= freed
            if key <= num_ops:  # its outputs are present here and queue for the other devices that host a consumer
                for i in range(output_ptr[key], output_ptr[key + 1]):
                    tensor = outputs[i]
                    source = source_of[tensor]
                    first = consumer_ptr[tensor]
                    for edge in range(first, consumer_ptr[tensor + 1]):
                        op = consumers[edge]
                        if device_of_op[op] == source:
                            missing[op] -= 1
                            if missing[op] == 0:
                                _add_ready(ready, ready_ptr[source], ready_size[source], rank_of_op[op])
                                ready_size[source] += 1
                                if state[source] == IDLE:
                                    state[source] = DUE
                                    due[waiting] = source
                                    waiting += 1
                    for slot in range(first, first + copies[tensor]):
                        pair = source * num_devices + copy_device[slot]
                        begin = channel_ptr[pair]
                        behind = 0
                        for k in range(begin, channel_ptr[pair + 1]):
                            channel, node = channels[k], slot * width + k - begin
                            if head[channel] < 0:
                                head[channel] = slot
                            else:
                                following[tail[channel]] = slot
                                behind += 1
                            following[node] = -1
                            tail[channel] = node
                        blocked[slot] = behind
                        joined[slot] = entries
                        entries += 1
                        if behind == 0:
                            startable[found] = slot
                            found += 1
            else:  # a transfer ends: the tensor is present there, its channels go to the next in their queues
                slot = key - num_ops - 1
                tensor, device = edge_tensor[slot], copy_device[slot]
                source = source_of[tensor]
                source_uses[tensor] -= 1
                if source_uses[tensor] == 0 and tensor_producer[tensor] >= 0:
                    memory[source] -= tensor_bytes[tensor]
                for edge in range(consumer_ptr[tensor], consumer_ptr[tensor + 1]):
                    op = consumers[edge]
                    if device_of_op[op] == device:
                        missing[op] -= 1
                        if missing[op] == 0:
                            _add_ready(ready, ready_ptr[device], ready_size[device], rank_of_op[op])
                            ready_size[device] += 1
                            if state[device] == IDLE:
                                state[device] = DUE
                                due[waiting] = device
                                waiting += 1
                pair = source * num_devices + device
                begin = channel_ptr[pair]
                for k in range(begin, channel_ptr[pair + 1]):
                    heir = following[slot * width + k - begin]
                    head[channels[k]] = heir
                    if heir >= 0:
                        blocked[heir] -= 1
                        if blocked[heir] == 0:
                            i = found  # several start in the order in which they joined
                            while i > 0 and joined[startable[i - 1]] > joined[heir]:
                                startable[i] = startable[i - 1]
                                i -= 1
                            startable[i] = heir
                            found += 1
            for i in range(found):
                slot = startable[i]
                tensor, device = edge_tensor[slot], copy_device[slot]
                source = source_of[tensor]
                if tensor_table[tensor] < 0:
                    time = latency[source, device] + tensor_bytes[tensor] / bandwidth[source, device]
                else:
                    time = table_s[tensor_table[tensor], source, device]
                memory[device] += tensor_bytes[tensor]
                peak[device] = max(peak[device], memory[device])
                transfer_slot[transfers] = slot
                transfer_start_s[transfers] = now
                transfer_end_s[transfers] = now + time
                transfers += 1
                _push_event(heap_s, heap_key, events, now + time, num_ops + 1 + slot)
                events += 1
            if events == 0 or heap_s[0] != now:
                break
            key = _pop_event(heap_s, heap_key, events)
            events -= 1
        for i in range(waiting):  # in any order: what starts on one device does not depend on the others
            device = due[i]
            state[device] = IDLE
            if ready_size[device] == 0:
                continue
            if ordered and ready[ready_ptr[device]] != position[device]:
                continue
            op = np.int64(op_of_rank[_take_ready(ready, ready_ptr[device], ready_size[device])])
            ready_size[device] -= 1
            position[device] += 1
            state[device] = RUNNING
            start_s[op], end_s[op] = now, now + duration_s[op]
            busy_s[device] += duration_s[op]
            memory[device] += alloc_bytes[op]
            peak[device] = max(peak[device], memory[device])
            _push_event(heap_s, heap_key, events, now + duration_s[op], op)
            events += 1
        waiting = 0
        if events == 0:
            return (DONE if done == num_ops else STUCK), now, transfers
        now = heap_s[0]
        key = _pop_event(heap_s, heap_key, events)
        events -= 1


@njit(**_SHARED)
def simulate_plans(graph, work, rank_of_op, op_of_rank, ordered, device_of_group, outcome, step_s, peak_bytes, busy_s):
    """Simulates one plan per row of `device_of_group`; `work` holds the timeline of the last row.

    Args:
        graph: A `Graph` as a plain tuple (numba unpacks those quicker than named ones).
        work: A `Work` as a plain tuple.
        rank_of_op: int32 [N], see the module docstring.
        op_of_rank: int32 [N], its inverse.
        ordered: The ranks are an explicit order (which then belongs to the only row).
        device_of_group: int32 [K, G].
        outcome: int8 [K], filled with DONE, CANNOT_RUN, STUCK (only an order can get stuck) or BAD_DEVICE.
        step_s: float64 [K], filled; NaN when the step cannot complete.
        peak_bytes: int64 [K, D], filled; resident and reserved bytes alone for CANNOT_RUN.
        busy_s: float64 [K, D], filled; zeros for CANNOT_RUN.

    Returns:
        Of the last row: step time (inf when it cannot complete), summed relative memory overflow, number of transfers.
    """
    g, w = Graph(*graph), Work(*work)
    step, overflow, transfers = np.inf, 0.0, 0
    for row in range(len(device_of_group)):
        result = _prepare(g, w, device_of_group[row])
        step, transfers = np.inf, 0
        if result == DONE:
            result, step, transfers = _run(g, w, rank_of_op, op_of_rank, ordered)
            if result != DONE:
                step = np.inf
        outcome[row] = result
        step_s[row] = step if result == DONE else np.nan
        overflow = 0.0
        for device in range(len(g.limit_bytes)):
            peak, limit = w.peak[device], g.limit_bytes[device]
            peak_bytes[row, device] = peak
            busy_s[row, device] = w.busy_s[device]
            if limit >= 0 and peak > limit:
                overflow += (peak - limit) / limit
    return step, overflow, transfers


@njit(**_SHARED)
def bottom_levels(topological_order, time_s, output_ptr, outputs, consumer_ptr, consumers, level):
    """Fills `level` float64 [N] with `reference.default_priority`: mean time plus the longest way to the end."""
    for i in range(len(level) - 1, -1, -1):
        op = topological_order[i]
        total, count, longest = 0.0, 0, 0.0
        for device in range(time_s.shape[1]):
            time = time_s[op, device]
            if time == time:
                total += time
                count += 1
        for j in range(output_ptr[op], output_ptr[op + 1]):
            tensor = outputs[j]
            for edge in range(consumer_ptr[tensor], consumer_ptr[tensor + 1]):
                longest = max(longest, level[consumers[edge]])
        level[op] = total / count + longest
