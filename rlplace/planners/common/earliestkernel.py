"""Compiled list scheduling of `m_etf` and `m_sct`: earliest task first, with devices that wait for a favorite child if any.

The queues and the pricing of transfers are those of `rlplace.planners.common.listkernels`.
"""

# Compiled functions take their types from their arguments.
# mypy: disable-error-code="no-untyped-def, assignment"
from __future__ import annotations

import numpy as np

from rlplace.compiled import entry, inner, stamp_of
from rlplace.planners.common import listkernels
from rlplace.planners.common.listkernels import _inputs_present, _pop, _push


@inner
def _latest_start(op, group, devices, mask, room, footprint, present, free):
    """Time at which every device that may take the op could have started it."""
    if devices[group] >= 0:
        return max(free[devices[group]], present[op, devices[group]])
    latest = 0.0
    for device in range(len(mask)):
        if mask[device] and room[device] >= footprint[group] and present[op, device] < np.inf:
            latest = max(latest, free[device], present[op, device])
    return latest


@inner
def _awaits(op, device, group, devices, mask, room, footprint, present, free):
    """Whether no other device could start the open op, a favorite, earlier than this one."""
    if op < 0 or devices[group] >= 0 or present[op, device] == np.inf:
        return False
    if not mask[device] or room[device] < footprint[group]:
        return False
    mine = max(free[device], present[op, device])
    for other in range(len(mask)):
        if mask[other] and room[other] >= footprint[group] and max(free[other], present[op, other]) < mine:
            return False
    return True


def _compile(stamp):
    @entry
    def earliest_task_first(
        favorite, priority, mask, devices, room, start, finish, arrival, channel_free, free, missing, done, offered, fresh,
        later_key, later_op, later, now_key, now_op, now, present, inputs_s, last, output_ptr, outputs, consumer_ptr, consumers,
        time_s, op_group, footprint, input_ptr, inputs, producer, holder, size, table, tables, latency, inverse, channel_ptr,
        channels, num_fresh,
    ):  # fmt: skip
        """Fills `devices`, `start` and `finish`; see `listkernels` for the state of a schedule.

        favorite: int32 [N], favorite child of every op, -1 for none.
        priority: float64 [N]. mask: bool [D], devices that may be used. free: float64 [D], zeros.
        missing: int64 [N], inputs that ops must still make. done: bool [N]. offered: int64 [N], devices that may take the op.
        fresh: int64 [N], the first `num_fresh` are ops without such inputs.
        later_key, later_op, later: Per device a heap [D, N] of ready ops whose inputs arrive later (by arrival), its size [D].
        now_key, now_op, now: The same for those that could start now (by priority).
        present: float64 [N, D], inf; time at which the inputs of a ready op can be on a device.
        inputs_s: float64 [N], zeros; time at which all inputs of a ready op are produced.
        last: int64 [D], -1; the op that a device ran last.

        Returns:
            Number of times that a device waited for a favorite child instead of taking an op that it could have started.
        """
        _ = stamp
        num_ops, num_devices = time_s.shape
        no, yes, none = np.bool_(0), np.bool_(1), np.int64(-1)
        scheduled, waits = 0, 0
        while scheduled < num_ops:
            for i in range(num_fresh):
                op = fresh[i]
                group = op_group[op]
                for k in range(input_ptr[op], input_ptr[op + 1]):
                    if producer[inputs[k]] >= 0:
                        inputs_s[op] = max(inputs_s[op], finish[producer[inputs[k]]])
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
            best, best_priority, best_device, best_op, waited = np.inf, 0.0, none, none, False
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
                        # An awake device takes its favorite, or the op that has been urgent longest.
                        child, awake = none, False
                        if last[device] >= 0:
                            child = np.int64(favorite[last[device]])
                        if child >= 0 and child != op and not done[child] and offered[child] > 0 and inputs_s[child] <= begin:
                            awake = _awaits(child, device, op_group[child], devices, mask, room, footprint, present, free)
                        if awake:
                            begin = max(free[device], present[child, device])
                            op = child
                            for heap in range(2):
                                count = now[device] if heap == 0 else later[device]
                                for i in range(count):
                                    other = now_op[device, i] if heap == 0 else later_op[device, i]
                                    owner = op_group[other]
                                    if done[other] or other == child or (devices[owner] >= 0 and devices[owner] != device):
                                        continue
                                    if devices[owner] < 0 and room[device] < footprint[owner]:
                                        continue
                                    urgent = _latest_start(other, owner, devices, mask, room, footprint, present, free)
                                    if urgent < begin or (urgent == begin and (op == child or priority[other] > priority[op])):
                                        begin, op = urgent, other
                        if begin < best or (begin == best and priority[op] > best_priority):
                            best, best_priority, best_device, best_op, waited = begin, priority[op], device, op, awake
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
            waits += waited
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
            last[device] = op
            done[op] = True
            scheduled += 1
            for k in range(output_ptr[op], output_ptr[op + 1]):
                for j in range(consumer_ptr[outputs[k]], consumer_ptr[outputs[k] + 1]):
                    consumer = consumers[j]
                    missing[consumer] -= 1
                    if missing[consumer] == 0:
                        fresh[num_fresh] = consumer
                        num_fresh += 1
        return waits

    return earliest_task_first


earliest_task_first = _compile(stamp_of(listkernels))
