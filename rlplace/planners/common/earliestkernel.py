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
    def earliest_task_first(priority, free, missing, done, offered, fresh, num_fresh, later, now, present, a, s):
        """Fills the schedule `s`; see `listkernels`.

        priority: float64 [N]. free: float64 [D], zeros.
        missing: int64 [N], inputs that ops must still make. done: bool [N]. offered: int64 [N], devices that may take the op.
        fresh: int64 [N], the first `num_fresh` are ops without such inputs.
        later, now: Queues of ready ops, of those whose inputs arrive later (by arrival) and that could start now (by priority).
        present: float64 [N, D], inf; time at which the inputs of a ready op can be on a device.
        """
        _ = stamp
        num_ops, num_devices = a.time_s.shape
        no, yes, none = np.bool_(0), np.bool_(1), np.int64(-1)
        scheduled = 0
        while scheduled < num_ops:
            for i in range(num_fresh):
                op = fresh[i]
                group = a.op_group[op]
                if s.devices[group] < 0:
                    fits, roomiest = False, -1
                    for device in range(num_devices):
                        if a.time_s[op, device] < np.inf:
                            fits = fits or (s.mask[device] and s.room[device] >= a.footprint[group])
                            if roomiest < 0 or s.room[device] > s.room[roomiest]:
                                roomiest = device
                    if not fits:  # there is always a device with a time
                        s.devices[group] = roomiest
                        s.room[roomiest] -= a.footprint[group]
                for device in range(num_devices):
                    if s.devices[group] >= 0:
                        if device != s.devices[group]:
                            continue
                    elif not s.mask[device] or a.time_s[op, device] == np.inf or s.room[device] < a.footprint[group]:
                        continue
                    ready = _inputs_present(op, device, no, yes, a, s)
                    present[op, device] = ready
                    _push(device, later, ready, op)
                    offered[op] += 1
            num_fresh = 0
            best, best_priority, best_device, best_op = np.inf, 0.0, none, none
            for device in range(num_devices):
                while True:
                    while later.size[device] > 0 and later.keys[device, 0] <= free[device]:
                        op = later.items[device, 0]
                        _pop(device, later)
                        _push(device, now, -priority[op], op)
                    if now.size[device] > 0:
                        op, begin = now.items[device, 0], free[device]
                    elif later.size[device] > 0:
                        op, begin = later.items[device, 0], later.keys[device, 0]
                    else:
                        break
                    group = a.op_group[op]
                    stale = done[op] or (s.devices[group] >= 0 and s.devices[group] != device)
                    stale = stale or (s.devices[group] < 0 and s.room[device] < a.footprint[group])
                    if not stale:
                        if begin < best or (begin == best and priority[op] > best_priority):
                            best, best_priority, best_device, best_op = begin, priority[op], device, op
                        break
                    if now.size[device] > 0:
                        _pop(device, now)
                    else:
                        _pop(device, later)
                    offered[op] -= 1
                    if offered[op] == 0 and not done[op]:
                        # No device is left for it: its group was settled elsewhere, or there is no room anywhere.
                        fresh[num_fresh] = op
                        num_fresh += 1
            if num_fresh > 0:
                continue
            device, op = best_device, best_op
            group = a.op_group[op]
            if s.devices[group] < 0:
                s.devices[group] = device
                s.room[device] -= a.footprint[group]
            ready = _inputs_present(op, device, yes, yes, a, s)
            s.start[op] = max(best, ready)
            s.finish[op] = s.start[op] + a.time_s[op, device]
            free[device] = s.finish[op]
            done[op] = True
            scheduled += 1
            for k in range(a.output_ptr[op], a.output_ptr[op + 1]):
                for j in range(a.consumer_ptr[a.outputs[k]], a.consumer_ptr[a.outputs[k] + 1]):
                    consumer = a.consumers[j]
                    missing[consumer] -= 1
                    if missing[consumer] == 0:
                        fresh[num_fresh] = consumer
                        num_fresh += 1

    return earliest_task_first


earliest_task_first = _compile(stamp_of(listkernels))
