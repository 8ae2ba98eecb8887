"""Compiled list scheduling of `m_etf`: earliest task first.

The queues and the pricing of transfers are those of `rlplace.planners.common.listkernels`.
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
    def earliest_task_first(
        priority, mask, devices, room, start, finish, arrival, channel_free, free, missing, done, offered, fresh,
        later_key, later_op, later, now_key, now_op, now, present, output_ptr, outputs, consumer_ptr, consumers,
        time_s, op_group, footprint, input_ptr, inputs, producer, holder, size, table, tables, latency, inverse, channel_ptr,
        channels, num_fresh,
    ):  # fmt: skip
        """Fills `devices`, `start` and `finish`; see `listkernels` for the state of a schedule.

        priority: float64 [N]. mask: bool [D], devices that may be used. free: float64 [D], zeros.
        missing: int64 [N], inputs that ops must still make. done: bool [N]. offered: int64 [N], devices that may take the op.
        fresh: int64 [N], the first `num_fresh` are ops without such inputs.
        later_key, later_op, later: Per device a heap [D, N] of ready ops whose inputs arrive later (by arrival), its size [D].
        now_key, now_op, now: The same for those that could start now (by priority).
        present: float64 [N, D], inf; time at which the inputs of a ready op can be on a device.
        """
        _ = stamp
        num_ops, num_devices = time_s.shape
        no, yes, none = np.bool_(0), np.bool_(1), np.int64(-1)
        scheduled = 0
        while scheduled < num_ops:
            for i in range(num_fresh):
                op = fresh[i]
                group = op_group[op]
                if devices[group] < 0:
                    fits, roomiest = False, -1
                    for device in range(num_devices):
                        if time_s[op, device] < np.inf:
                            fits = fits or (mask[device] and room[device] >= footprint[group])
                            if roomiest < 0 or room[device] > room[roomiest]:
                                roomiest = device
                    if not fits:  # there is always a device with a time
                        devices[group] = roomiest
                        room[roomiest] -= footprint[group]
                for device in range(num_devices):
                    if devices[group] >= 0:
                        if device != devices[group]:
                            continue
                    elif not mask[device] or time_s[op, device] == np.inf or room[device] < footprint[group]:
                        continue
                    ready = _inputs_present(
                        op, device, no, yes, devices, finish, arrival, channel_free, input_ptr, inputs, producer, holder,
                        size, table, tables, latency, inverse, channel_ptr, channels,
                    )  # fmt: skip
                    present[op, device] = ready
                    _push(device, later_key, later_op, later, ready, op)
                    offered[op] += 1
            num_fresh = 0
            best, best_priority, best_device, best_op = np.inf, 0.0, none, none
            for device in range(num_devices):
                while True:
                    while later[device] > 0 and later_key[device, 0] <= free[device]:
                        op = later_op[device, 0]
                        _pop(device, later_key, later_op, later)
                        _push(device, now_key, now_op, now, -priority[op], op)
                    if now[device] > 0:
                        op, begin = now_op[device, 0], free[device]
                    elif later[device] > 0:
                        op, begin = later_op[device, 0], later_key[device, 0]
                    else:
                        break
                    group = op_group[op]
                    stale = done[op] or (devices[group] >= 0 and devices[group] != device)
                    stale = stale or (devices[group] < 0 and room[device] < footprint[group])
                    if not stale:
                        if begin < best or (begin == best and priority[op] > best_priority):
                            best, best_priority, best_device, best_op = begin, priority[op], device, op
                        break
                    if now[device] > 0:
                        _pop(device, now_key, now_op, now)
                    else:
                        _pop(device, later_key, later_op, later)
                    offered[op] -= 1
                    if offered[op] == 0 and not done[op]:
                        # No device is left for it: its group was settled elsewhere, or there is no room anywhere.
                        fresh[num_fresh] = op
                        num_fresh += 1
            if num_fresh > 0:
                continue
            device, op = best_device, best_op
            group = op_group[op]
            if devices[group] < 0:
                devices[group] = device
                room[device] -= footprint[group]
            ready = _inputs_present(
                op, device, yes, yes, devices, finish, arrival, channel_free, input_ptr, inputs, producer, holder,
                size, table, tables, latency, inverse, channel_ptr, channels,
            )  # fmt: skip
            start[op] = max(best, ready)
            finish[op] = start[op] + time_s[op, device]
            free[device] = finish[op]
            done[op] = True
            scheduled += 1
            for k in range(output_ptr[op], output_ptr[op + 1]):
                for j in range(consumer_ptr[outputs[k]], consumer_ptr[outputs[k] + 1]):
                    consumer = consumers[j]
                    missing[consumer] -= 1
                    if missing[consumer] == 0:
                        fresh[num_fresh] = consumer
                        num_fresh += 1

    return earliest_task_first


earliest_task_first = _compile(stamp_of(listkernels))
