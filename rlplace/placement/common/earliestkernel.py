"""Compiled list scheduling of `m_etf`: earliest task first.

The pricing of transfers is that of `rlplace.placement.common.listkernels`.
"""

# Compiled functions take their types from their arguments.
# mypy: disable-error-code="no-untyped-def, assignment"
from __future__ import annotations

from heapq import heappop, heappush

import numpy as np

from rlplace.compiled import entry, stamp_of
from rlplace.placement.common import listkernels
from rlplace.placement.common.listkernels import _inputs_present


def _compile(stamp):
    @entry
    def earliest_task_first(priority, missing, a, s):
        """Fills the schedule `s`; see `listkernels`.

        priority: float64 [N]. missing: int64 [N], inputs that ops must still make; becomes 0.
        """
        _ = stamp
        num_ops, num_devices = a.time_s.shape
        no, yes, none = np.bool_(0), np.bool_(1), np.int64(-1)
        free, done = np.zeros(num_devices), np.zeros(num_ops, dtype=np.bool_)
        offered = np.zeros(num_ops, dtype=np.int64)  # devices that may take the op
        fresh = [np.int64(op) for op in a.order if missing[op] == 0]
        # Heaps of ready ops: of those whose inputs arrive later, by arrival, and of those that could start now, by priority.
        later = [[(0.0, none)][1:] for _ in range(num_devices)]
        now = [[(0.0, none)][1:] for _ in range(num_devices)]
        scheduled = 0
        while scheduled < num_ops:
            for op in fresh:
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
                    heappush(later[device], (_inputs_present(op, device, no, yes, a, s), op))
                    offered[op] += 1
            fresh.clear()
            best, best_priority, best_device, best_op = np.inf, 0.0, none, none
            for device in range(num_devices):
                while True:
                    while len(later[device]) > 0 and later[device][0][0] <= free[device]:
                        op = heappop(later[device])[1]
                        heappush(now[device], (-priority[op], op))
                    if len(now[device]) > 0:
                        op, begin = now[device][0][1], free[device]
                    elif len(later[device]) > 0:
                        begin, op = later[device][0]
                    else:
                        break
                    group = a.op_group[op]
                    stale = done[op] or (s.devices[group] >= 0 and s.devices[group] != device)
                    stale = stale or (s.devices[group] < 0 and s.room[device] < a.footprint[group])
                    if not stale:
                        if begin < best or (begin == best and priority[op] > best_priority):
                            best, best_priority, best_device, best_op = begin, priority[op], device, op
                        break
                    heappop(now[device] if len(now[device]) > 0 else later[device])
                    offered[op] -= 1
                    if offered[op] == 0 and not done[op]:
                        # No device is left for it: its group was settled elsewhere, or there is no room anywhere.
                        fresh.append(op)
            if len(fresh) > 0:
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
                        fresh.append(np.int64(consumer))

    return earliest_task_first


earliest_task_first = _compile(stamp_of(listkernels))
