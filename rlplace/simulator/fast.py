"""The compiled twin of `rlplace.simulator.reference`: the same step, bit for bit, some hundred times quicker.

Everything numba compiles lives in this one file, because numba's on-disk cache only notices changes of the file that holds
the compiled function. `rlplace.simulator.lowering` builds the arrays, `rlplace.simulator.api` is what people call.

Where this differs in form, not in result, from the reference:
    * A ready task is known by its *rank* (position in the order of highest priority, then smaller number), so that a
      device's ready heap compares one integer. With an explicit order, ranks number the ops of device 0, then of device 1,
      and so on, each in the order given, and a device starts nothing but its next rank.
    * A tensor's copies on other devices occupy *slots* ``consumer_ptr[t], consumer_ptr[t] + 1, ...`` in order of device
      (there are never more than consumers). Slot order is therefore the order (tensor number, destination) in which
      transfers that end together are processed, and ``N + slot`` is the key of their events, after all tasks.
    * Every channel has a queue of transfers, the running one at its head. "All its channels are free and no earlier waiting
      transfer wants any of them" is the same as "it heads the queue of each of its channels"; `blocked` counts the others.

Sums run left to right in float64; no fast-math, so the compiler may neither reorder nor contract them.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

DONE, CANNOT_RUN, STUCK, BAD_DEVICE = range(4)
"""Outcome of a simulation; CANNOT_RUN: a null time or missing link; BAD_DEVICE: `device_of_group` is out of range."""


class Graph(NamedTuple):
    """A problem as flat arrays; the axes are those of `Problem`, and C is the number of channels."""

    time_s: Any  # float64 [N, D]
    op_group: Any  # int32 [N]
    num_inputs: Any  # int32 [N]
    alloc_bytes: Any  # int64 [N], outputs and temporaries
    free_bytes: Any  # int64 [N], temporaries and outputs that nobody consumes
    input_ptr: Any  # int32 [N + 1]
    inputs: Any  # int32 [E], tensors
    output_ptr: Any  # int32 [N + 1]
    outputs: Any  # int32 [.], tensors with consumers
    tensor_producer: Any  # int32 [T]
    tensor_owner: Any  # int32 [T]
    owner_tensors: Any  # int32 [.], tensors that an owner group holds
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
    resident_bytes: Any  # int64 [G]
    reserved_bytes: Any  # int64 [D]
    limit_bytes: Any  # int64 [D], -1 where there is no limit


class Work(NamedTuple):
    """Buffers of one simulation, reused by the next; W is E times the most channels that a transfer holds."""

    device_of_op: Any  # int32 [N]
    duration_s: Any  # float64 [N]
    missing: Any  # int32 [N], inputs not yet present
    source: Any  # int32 [T], device that holds the tensor first
    source_uses: Any  # int32 [T], consumers and sends that still need the copy there
    copies: Any  # int32 [T], other devices that host a consumer
    copy_device: Any  # int32 [E], by slot
    copy_uses: Any  # int32 [E], by slot
    blocked: Any  # int32 [E], by slot: channels whose queue it does not head
    queued: Any  # int32 [E], by slot: when it joined the queue
    next: Any  # int32 [W], successor in a channel's queue, by slot and position in the slot's channel list
    head: Any  # int32 [C], slot at the head of a channel's queue, -1 when empty
    tail: Any  # int32 [C], index into `next` of the last entry
    candidates: Any  # int32 [.], slots that an ending transfer lets start
    ready: Any  # int32 [N], ready heaps of the devices one after another
    ready_ptr: Any  # int32 [D + 1]
    ready_size: Any  # int32 [D]
    running: Any  # bool [D]
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


@njit
def _push_event(heap_s, heap_key, size, time, key):
    """Adds to a binary heap ordered by (time, key); returns the new size."""
    i = size
    while i > 0:
        parent = (i - 1) >> 1
        if heap_s[parent] < time or (heap_s[parent] == time and heap_key[parent] < key):
            break
        heap_s[i], heap_key[i] = heap_s[parent], heap_key[parent]
        i = parent
    heap_s[i], heap_key[i] = time, key
    return size + 1


@njit
def _pop_event(heap_s, heap_key, size):
    """Removes the first event; returns the new size."""
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
    return size


@njit
def _add_ready(w, device, rank):
    """Adds a rank to the device's ready heap."""
    base = w.ready_ptr[device]
    i = w.ready_size[device]
    w.ready_size[device] = i + 1
    while i > 0:
        parent = (i - 1) >> 1
        if w.ready[base + parent] < rank:
            break
        w.ready[base + i] = w.ready[base + parent]
        i = parent
    w.ready[base + i] = rank


@njit
def _take_ready(w, device):
    """Removes and returns the lowest rank of the device's ready heap."""
    base = w.ready_ptr[device]
    size = w.ready_size[device] - 1
    w.ready_size[device] = size
    first, last = w.ready[base], w.ready[base + size]
    i = 0
    while True:
        child = 2 * i + 1
        if child >= size:
            break
        if child + 1 < size and w.ready[base + child + 1] < w.ready[base + child]:
            child += 1
        if last < w.ready[base + child]:
            break
        w.ready[base + i] = w.ready[base + child]
        i = child
    w.ready[base + i] = last
    return first


@njit
def _prepare(g, w, device_of_group):
    """Fills `w` for a plan: where each op and copy sits, who uses them, resident bytes; returns an outcome."""
    num_ops, num_devices = g.time_s.shape
    outcome = DONE
    for device in range(num_devices):
        w.memory[device] = g.reserved_bytes[device]
        w.busy_s[device] = 0.0
        w.ready_size[device] = 0
        w.running[device] = False
        w.ready_ptr[device + 1] = 0
    for group in range(len(device_of_group)):
        device = device_of_group[group]
        if device < 0 or device >= num_devices:
            return BAD_DEVICE
        w.memory[device] += g.resident_bytes[group]
    for device in range(num_devices):
        w.peak[device] = w.memory[device]
    w.head[:] = -1
    for op in range(num_ops):
        device = device_of_group[g.op_group[op]]
        w.device_of_op[op] = device
        w.ready_ptr[device + 1] += 1
        time = g.time_s[op, device]
        w.duration_s[op] = time
        w.missing[op] = g.num_inputs[op]
        if time != time:
            outcome = CANNOT_RUN
    w.ready_ptr[0] = 0
    for device in range(num_devices):
        w.position[device] = w.ready_ptr[device]
        w.ready_ptr[device + 1] += w.ready_ptr[device]
    for tensor in range(len(g.tensor_bytes)):
        producer = g.tensor_producer[tensor]
        source = w.device_of_op[producer] if producer >= 0 else device_of_group[g.tensor_owner[tensor]]
        first, last = g.consumer_ptr[tensor], g.consumer_ptr[tensor + 1]
        end, uses = first, 0
        for edge in range(first, last):
            device = w.device_of_op[g.consumers[edge]]
            if device == source:
                uses += 1
                continue
            slot = end  # the slots of a tensor are kept sorted by device
            while slot > first and w.copy_device[slot - 1] > device:
                slot -= 1
            if slot > first and w.copy_device[slot - 1] == device:
                w.copy_uses[slot - 1] += 1
                continue
            for other in range(end, slot, -1):
                w.copy_device[other], w.copy_uses[other] = w.copy_device[other - 1], w.copy_uses[other - 1]
            w.copy_device[slot], w.copy_uses[slot] = device, 1
            end += 1
            if g.bandwidth[source, device] == 0.0:
                outcome = CANNOT_RUN
        w.source[tensor] = source
        w.copies[tensor] = end - first
        w.source_uses[tensor] = uses + end - first
    return outcome


@njit
def _arrive(g, w, rank_of_op, tensor, device):
    """The tensor is present on `device`: its consumers there miss one input less."""
    for edge in range(g.consumer_ptr[tensor], g.consumer_ptr[tensor + 1]):
        op = g.consumers[edge]
        if w.device_of_op[op] == device:
            w.missing[op] -= 1
            if w.missing[op] == 0:
                _add_ready(w, device, rank_of_op[op])


@njit
def _start_transfer(g, w, slot, now, size, count):
    """Moves a tensor: allocates the copy and pushes the end; returns the event heap's size."""
    tensor = g.edge_tensor[slot]
    source, device, size_bytes = w.source[tensor], w.copy_device[slot], g.tensor_bytes[tensor]
    table = g.tensor_table[tensor]
    if table < 0:
        time = g.latency[source, device] + size_bytes / g.bandwidth[source, device]
    else:
        time = g.table_s[table, source, device]
    w.memory[device] += size_bytes
    w.peak[device] = max(w.peak[device], w.memory[device])
    w.transfer_slot[count] = slot
    w.transfer_start_s[count] = now
    w.transfer_end_s[count] = now + time
    return _push_event(w.heap_s, w.heap_key, size, now + time, len(g.op_group) + slot)


@njit
def _enqueue(g, w, tensor, now, size, count, joined):
    """Rule 2: one transfer to every other device with a consumer joins the queues, and starts where it heads them all.

    Returns the event heap's size, the number of transfers started and the number that joined a queue so far.
    """
    num_devices, width = len(g.reserved_bytes), len(w.candidates)
    first = g.consumer_ptr[tensor]
    for slot in range(first, first + w.copies[tensor]):
        pair = w.source[tensor] * num_devices + w.copy_device[slot]
        begin = g.channel_ptr[pair]
        blocked = 0
        for k in range(begin, g.channel_ptr[pair + 1]):
            channel, node = g.channels[k], slot * width + k - begin
            if w.head[channel] < 0:
                w.head[channel] = slot
            else:
                w.next[w.tail[channel]] = slot
                blocked += 1
            w.next[node] = -1
            w.tail[channel] = node
        w.blocked[slot] = blocked
        w.queued[slot] = joined
        joined += 1
        if blocked == 0:
            size = _start_transfer(g, w, slot, now, size, count)
            count += 1
    return size, count, joined


@njit
def _finish_transfer(g, w, rank_of_op, slot, now, size, count):
    """Frees the channels and the source's use, then starts what waited for them, in queue order."""
    num_devices, width = len(g.reserved_bytes), len(w.candidates)
    tensor = g.edge_tensor[slot]
    source, device = w.source[tensor], w.copy_device[slot]
    w.source_uses[tensor] -= 1
    if w.source_uses[tensor] == 0 and g.tensor_producer[tensor] >= 0:
        w.memory[source] -= g.tensor_bytes[tensor]
    _arrive(g, w, rank_of_op, tensor, device)
    pair = source * num_devices + device
    begin = g.channel_ptr[pair]
    found = 0
    for k in range(begin, g.channel_ptr[pair + 1]):
        heir = w.next[slot * width + k - begin]
        w.head[g.channels[k]] = heir
        if heir >= 0:
            w.blocked[heir] -= 1
            if w.blocked[heir] == 0:
                i = found
                while i > 0 and w.queued[w.candidates[i - 1]] > w.queued[heir]:
                    w.candidates[i] = w.candidates[i - 1]
                    i -= 1
                w.candidates[i] = heir
                found += 1
    for i in range(found):
        size = _start_transfer(g, w, w.candidates[i], now, size, count)
        count += 1
    return size, count


@njit
def _finish_task(g, w, op):
    """Frees the temporaries, the outputs that nobody consumes and the inputs whose last use this was."""
    device = w.device_of_op[op]
    w.running[device] = False
    freed = g.free_bytes[op]
    for i in range(g.input_ptr[op], g.input_ptr[op + 1]):
        tensor = g.inputs[i]
        if w.source[tensor] == device:
            w.source_uses[tensor] -= 1
            if w.source_uses[tensor] == 0 and g.tensor_producer[tensor] >= 0:
                freed += g.tensor_bytes[tensor]
        else:
            slot = g.consumer_ptr[tensor]
            while w.copy_device[slot] != device:
                slot += 1
            w.copy_uses[slot] -= 1
            if w.copy_uses[slot] == 0:
                freed += g.tensor_bytes[tensor]
    w.memory[device] -= freed


@njit
def _run(g, w, rank_of_op, op_of_rank, ordered):
    """Rule 3 on a prepared plan; returns (outcome, step time, number of transfers)."""
    num_ops, num_devices = g.time_s.shape
    now, done, size, count, joined = 0.0, 0, 0, 0, 0
    for op in range(num_ops):
        if w.missing[op] == 0:
            _add_ready(w, w.device_of_op[op], rank_of_op[op])
    for tensor in g.owner_tensors:
        _arrive(g, w, rank_of_op, tensor, w.source[tensor])
        size, count, joined = _enqueue(g, w, tensor, now, size, count, joined)
    while True:
        while size > 0 and w.heap_s[0] == now:
            key = w.heap_key[0]
            size = _pop_event(w.heap_s, w.heap_key, size)
            if key < num_ops:
                done += 1
                _finish_task(g, w, key)
                for i in range(g.output_ptr[key], g.output_ptr[key + 1]):
                    _arrive(g, w, rank_of_op, g.outputs[i], w.device_of_op[key])
                    size, count, joined = _enqueue(g, w, g.outputs[i], now, size, count, joined)
            else:
                size, count = _finish_transfer(g, w, rank_of_op, key - num_ops, now, size, count)
        for device in range(num_devices):
            if w.running[device] or w.ready_size[device] == 0:
                continue
            if ordered and w.ready[w.ready_ptr[device]] != w.position[device]:
                continue
            w.position[device] += 1
            op = op_of_rank[_take_ready(w, device)]
            w.running[device] = True
            end = now + w.duration_s[op]
            w.start_s[op] = now
            w.end_s[op] = end
            w.busy_s[device] += w.duration_s[op]
            w.memory[device] += g.alloc_bytes[op]
            w.peak[device] = max(w.peak[device], w.memory[device])
            size = _push_event(w.heap_s, w.heap_key, size, end, op)
        if size == 0:
            return (DONE if done == num_ops else STUCK), now, count
        now = w.heap_s[0]


@njit(cache=True)
def simulate_plans(graph, work, rank_of_op, op_of_rank, ordered, device_of_group, outcome, step_s, peak_bytes, busy_s):
    """Simulates one plan per row of `device_of_group`; `work` holds the timeline of the last row.

    Args:
        graph: A `Graph` as a plain tuple (numba unpacks those quicker than named ones).
        work: A `Work` as a plain tuple.
        rank_of_op: int32 [N], see the module docstring.
        op_of_rank: int32 [N], its inverse.
        ordered: The ranks are an explicit order (which then belongs to the only row).
        device_of_group: int32 [K, G].
        outcome: int8 [K], filled with DONE, CANNOT_RUN, STUCK or BAD_DEVICE.
        step_s: float64 [K], filled; NaN when the step cannot complete.
        peak_bytes: int64 [K, D], filled; resident and reserved bytes alone when the step cannot complete.
        busy_s: float64 [K, D], filled; zeros when the step cannot complete.

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
                _prepare(g, w, device_of_group[row])  # back to resident bytes and no busy time
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


@njit(cache=True)
def bottom_levels(topological_order, time_s, output_ptr, outputs, consumer_ptr, consumers):
    """float64 [N], `reference.default_priority`: mean time plus the longest way to the end, without communication."""
    level = np.zeros(len(time_s))
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
    return level
