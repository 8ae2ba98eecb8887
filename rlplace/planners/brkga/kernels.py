"""Compiled decoder of `brkga`: a list scheduler that random keys steer.

The pricing of transfers is that of `rlplace.planners.common.listkernels`.
"""

# Compiled functions take their types from their arguments.
# mypy: disable-error-code="no-untyped-def, assignment"
from __future__ import annotations

import numpy as np

from rlplace.compiled import entry, stamp_of
from rlplace.planners.common import listkernels
from rlplace.planners.common.listkernels import _inputs_present, _pop, _push


def _compile(stamp):
    @entry
    def decode(
        keys, barred, bias_s, rank, limit, result, room, finish, arrival, channel_free, free, missing, heap_key, heap_op, heap,
        num_missing, order, output_ptr, outputs, consumer_ptr, consumers, time_s, op_group, footprint, input_ptr, inputs,
        producer, holder, size, table, tables, latency, inverse, channel_ptr, channels,
    ):  # fmt: skip
        """Fills `result` int32 [P, G], the assignment of every chromosome.

        Ready ops go in order of `rank` float64 [N], upward rank times 1/2 + the group's priority key. The first op of a group
        decides: of the devices whose affinity is at least `barred` (all, when there are none) the one with the smallest finish
        time plus `bias_s` times 1 - affinity, devices with room before others.

        keys: float64 [P, G, D + 1], affinities to the devices, then the priority.
        limit: float64 [D] bytes. num_missing: int64 [N]. The rest is working memory, and arrays of `OpArrays`.
        """
        _ = stamp
        num_ops, num_devices = time_s.shape
        no, yes = np.bool_(0), np.bool_(1)
        first = np.int64(0)
        for row in range(len(keys)):
            devices, key = result[row], keys[row]
            devices[:] = -1
            room[:], free[:], channel_free[:], missing[:] = limit, 0.0, 0.0, num_missing
            arrival[:, :] = -1.0
            heap[first] = 0
            for i in range(num_ops):
                op = np.int64(order[i])
                if missing[op] == 0:
                    _push(first, heap_key, heap_op, heap, -rank[op] * (0.5 + key[op_group[op], num_devices]), op)
            while heap[first] > 0:
                op = heap_op[first, 0]
                _pop(first, heap_key, heap_op, heap)
                group = op_group[op]
                device = np.int64(devices[group])
                if device < 0:
                    best, best_fits = np.inf, False
                    for attempt in range(2):
                        for d in range(num_devices):
                            affinity = key[group, d]
                            if time_s[op, d] == np.inf or (attempt == 0 and affinity < barred):
                                continue
                            ready = _inputs_present(
                                op, d, no, yes, devices, finish, arrival, channel_free, input_ptr, inputs, producer, holder,
                                size, table, tables, latency, inverse, channel_ptr, channels,
                            )  # fmt: skip
                            value = max(ready, free[d]) + time_s[op, d] + bias_s * (1.0 - affinity)
                            fits = room[d] >= footprint[group]
                            if (fits and not best_fits) or (fits == best_fits and value < best):
                                best, best_fits, device = value, fits, np.int64(d)
                        if device >= 0:
                            break
                    devices[group] = device
                    room[device] -= footprint[group]
                ready = _inputs_present(
                    op, device, yes, yes, devices, finish, arrival, channel_free, input_ptr, inputs, producer, holder,
                    size, table, tables, latency, inverse, channel_ptr, channels,
                )  # fmt: skip
                free[device] = max(ready, free[device]) + time_s[op, device]
                finish[op] = free[device]
                for k in range(output_ptr[op], output_ptr[op + 1]):
                    for j in range(consumer_ptr[outputs[k]], consumer_ptr[outputs[k] + 1]):
                        consumer = np.int64(consumers[j])
                        missing[consumer] -= 1
                        if missing[consumer] == 0:
                            priority = rank[consumer] * (0.5 + key[op_group[consumer], num_devices])
                            _push(first, heap_key, heap_op, heap, -priority, consumer)
            for group in range(len(devices)):
                if devices[group] < 0:  # no ops: nothing to schedule
                    devices[group] = key[group, :num_devices].argmax()

    return decode


decode = _compile(stamp_of(listkernels))
