"""The compiled FIFO executor; see `rlplace.planners.pardnn.emulator`.

Arrays are those of `rlplace.planners.common.oparrays.OpArrays`.
"""

# Compiled functions take their types from their arguments.
# mypy: disable-error-code="no-untyped-def, assignment"
from __future__ import annotations

from rlplace.compiled import entry, inner


@inner
def _push(keys, items, size, key, item):
    """Adds to a binary heap with the smallest (key, item) on top."""
    i = size
    while i > 0:
        parent = (i - 1) >> 1
        if keys[parent] < key or (keys[parent] == key and items[parent] < item):
            break
        keys[i], items[i] = keys[parent], items[parent]
        i = parent
    keys[i], items[i] = key, item


@inner
def _pop(keys, items, size):
    """Removes the top of the heap of `size` entries; the caller has read it."""
    last = size - 1
    key, item = keys[last], items[last]
    i = 0
    while True:
        child = 2 * i + 1
        if child >= last:
            break
        right = child + 1
        if right < last and (keys[right] < keys[child] or (keys[right] == keys[child] and items[right] < items[child])):
            child = right
        if key < keys[child] or (key == keys[child] and item < items[child]):
            break
        keys[i], items[i] = keys[child], items[child]
        i = child
    keys[i], items[i] = key, item


@inner
def _transfer_s(tensor, source, device, size, table, tables, latency, inverse):
    if table[tensor] >= 0:
        return tables[table[tensor], source, device]
    return latency[source, device] + size[tensor] * inverse[source, device]


@entry
def fifo(
    devices, start, end, arrival, free, missing, ready, heap_key, heap_op, time_s, op_group, input_ptr, inputs, producer,
    holder, output_ptr, outputs, consumer_ptr, consumers, size, table, tables, latency, inverse,
):  # fmt: skip
    """Fills `start`, `end` [N] and `arrival` [T, D] (-1 where a tensor is not sent).

    An op is ready when its last input is there, which is known when its last producer has been given its time. No op that
    becomes known later can be ready earlier than one that is taken now, so one heap of ready times keeps every device's order.
    free: float64 [D], zeros. missing: int64 [N], inputs that ops must still make. ready: float64 [N], zeros.
    """
    count = 0
    for tensor in range(len(producer)):
        if producer[tensor] < 0:
            source = devices[holder[tensor]]
            for j in range(consumer_ptr[tensor], consumer_ptr[tensor + 1]):
                device = devices[op_group[consumers[j]]]
                if device != source:
                    arrival[tensor, device] = _transfer_s(tensor, source, device, size, table, tables, latency, inverse)
                    ready[consumers[j]] = max(ready[consumers[j]], arrival[tensor, device])
    for op in range(len(missing)):
        if missing[op] == 0:
            _push(heap_key, heap_op, count, ready[op], op)
            count += 1
    while count > 0:
        op = heap_op[0]
        _pop(heap_key, heap_op, count)
        count -= 1
        device = devices[op_group[op]]
        start[op] = max(free[device], ready[op])
        end[op] = start[op] + time_s[op, device]
        free[device] = end[op]
        for k in range(output_ptr[op], output_ptr[op + 1]):
            tensor = outputs[k]
            for j in range(consumer_ptr[tensor], consumer_ptr[tensor + 1]):
                consumer = consumers[j]
                there = devices[op_group[consumer]]
                at = end[op]
                if there != device:
                    if arrival[tensor, there] < 0.0:
                        seconds = _transfer_s(tensor, device, there, size, table, tables, latency, inverse)
                        arrival[tensor, there] = end[op] + seconds
                    at = arrival[tensor, there]
                ready[consumer] = max(ready[consumer], at)
                missing[consumer] -= 1
                if missing[consumer] == 0:
                    _push(heap_key, heap_op, count, ready[consumer], consumer)
                    count += 1
