"""The compiled twin of `rlplace.simulator.reference`: the same step, bit for bit, some hundred times quicker.

`rlplace.simulator.records` says what the arrays hold, `lowering` builds them, `queues` holds parts of the code, and
`rlplace.simulator.api` is the public interface.

Where this differs in form, not in result, from the reference:
    * A ready task is known by its *rank* (`reference.ranks`). With an explicit order, ranks number the tasks of device 0,
      then of device 1, and so on, each in the order given, and a device starts nothing but its next rank.
    * Where a value's readers sit is looked up when the value is made, not before; its copies then take the next free slots, in
      order of device. Slots are therefore in the order in which they join the queues.
    * The key of an event is its place among those that end with it: a task's number, or K + 1 plus the number of the value
      that arrives; the lower half holds the slot. Key K is the first event, when the step begins.
    * Every channel has a queue of slots, the running one at its head. "All its channels are free and no earlier waiting
      transfer wants any of them" is the same as "it heads the queue of each of its channels"; `blocked` counts the others.
    * A null time or a missing link shows when the task or transfer would start, and ends the run.

Sums run left to right in float64; no fast-math, so the compiler may neither reorder nor contract them.
"""

# mypy: allow-untyped-defs, disable-error-code="assignment"

from __future__ import annotations

import sys

import numpy as np

from rlplace.compiled import entry, inner, stamp_of
from rlplace.simulator import loop, queues
from rlplace.simulator import records as r
from rlplace.simulator.loop import BAD_DEVICE, CANNOT_RUN, DONE, STUCK, run
from rlplace.simulator.queues import DUE, add_ready, levels, member_waits, part

__all__ = ["BAD_DEVICE", "CANNOT_RUN", "DONE", "STUCK", "simulate_plans"]

STAMP = stamp_of(r, queues, loop, sys.modules[__name__])
"""Hash of all files that `simulate_plans` is compiled from."""


@inner
def reset(g, w, device_of_group):
    """Empties all queues and fills the devices with what is resident; returns DONE or BAD_DEVICE."""
    device, channel, ready, sizes = w.device, w.channel, w.ready, g.bytes
    num_devices, num_groups = len(device), len(device_of_group)
    due, waits, missing = part(w, r.DUE_DEVICES), part(w, r.WAITS), part(g, r.MISSING)
    absent, member_ptr = part(w, r.ABSENT), part(g, r.MEMBER_PTR)
    for d in range(num_devices):
        device[d].memory = sizes[num_groups + d]
        device[d].busy_s = 0.0
        device[d].ready = 0
        device[d].state = DUE
        device[d].position = r.NONE
        due[d] = d
    for group in range(num_groups):
        d = device_of_group[group]
        if d >= num_devices:
            return BAD_DEVICE
        device[d].memory += sizes[group]
    for d in range(num_devices):
        device[d].peak = device[d].memory
        for i in range(ready.shape[1]):
            ready[d, i] = 0
    for c in range(len(channel)):
        channel[c].head = r.NONE
    for t in range(len(waits)):
        waits[t] = missing[t]
    for c in range(len(absent)):
        absent[c] = member_ptr[c + 1] - member_ptr[c]
    w.layout[r.TRANSFERS] = 0
    return DONE


@inner
def begin(g, w, ranks, device_of_group):
    """Tasks without inputs become ready, or their collective waits for one task less.

    Returns:
        Lengths of DUE_DEVICES, of the slots in use and of STARTABLE.
    """
    task, device, ready, due, first = g.task, w.device, w.ready, part(w, r.DUE_DEVICES), part(g, r.FIRST)
    collective_of = part(g, r.COLLECTIVE_OF)
    waiting, used, starting = np.uint32(len(device)), np.uint32(0), np.uint32(0)
    middle, low = levels(len(ranks[0]))
    for i in range(len(first)):
        t = first[i]
        if len(collective_of) > 0 and collective_of[t] != r.NONE:
            used, starting = member_waits(g, w, np.int64(collective_of[t]), used, starting)
        else:
            waiting = add_ready(ready, device, due, waiting, middle, low, ranks[0, t], device_of_group[task[t].group])
    return waiting, used, starting


@inner
def report(g, w, peak, busy_s):
    """Copies peaks and busy seconds; returns the memory overflow relative to the limits, summed over devices."""
    device, sizes, overflow = w.device, g.bytes, 0.0
    num_devices = len(device)
    for d in range(num_devices):
        limit = sizes[len(sizes) - num_devices + d]
        peak[d], busy_s[d] = device[d].peak, device[d].busy_s
        if limit >= 0 and device[d].peak > limit:
            overflow += (device[d].peak - limit) / limit
    return overflow


def _compile(stamp):
    """Compiles the function that Python calls, with the stamp as an enclosed value."""

    @entry(nogil=True)
    def simulate_plans(graph, work, ranks, position, device_of_group, results):
        """Simulates one plan per row of `device_of_group`; `work` holds what happened in the last.

        Args:
            graph: A `Graph` as a plain tuple (numba unpacks those quicker than named ones).
            work: A `Work` as a plain tuple.
            ranks: uint32 [2, K], rank of every task and task of every rank; see the module docstring.
            position: uint32 [D], the first rank of every device when the ranks are an explicit order (which then belongs to the
                only row), else [0].
            device_of_group: uint32 [rows, G].
            results: Arrays to fill. Outcome, int8 [rows]: DONE, CANNOT_RUN, STUCK or BAD_DEVICE; step time, float64 [rows], NaN
                when the step cannot complete; peak memory, int64 [rows, D] bytes, resident and reserved alone when it cannot;
                busy seconds, float64 [rows, D], zeros when it cannot.

        Returns:
            Step time (inf when it cannot complete) and summed relative memory overflow of the last row.
        """
        _ = stamp
        g, w = r.Graph(*graph), r.Work(*work)
        outcome, step_s, peak, busy_s = results
        step, overflow = np.inf, 0.0
        for row in range(len(device_of_group)):
            devices = device_of_group[row]
            step, result = np.inf, reset(g, w, devices)
            if result == DONE:
                for d in range(len(position)):
                    w.device[d].position = position[d]
                result, step = run(g, w, ranks, devices, len(position) > 0, begin(g, w, ranks, devices))
                if result != DONE:
                    reset(g, w, devices)
                    step = np.inf
            outcome[row] = result
            step_s[row] = step if result == DONE else np.nan
            overflow = report(g, w, peak[row], busy_s[row])
        return step, overflow

    return simulate_plans


simulate_plans = _compile(STAMP)
