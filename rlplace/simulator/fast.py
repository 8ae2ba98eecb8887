"""The compiled twin of `rlplace.simulator.reference`: the same step, bit for bit, some hundred times quicker.

`rlplace.simulator.records` says what the arrays hold, `lowering` builds them, `queues` and `gates` hold parts of the code, and
`rlplace.simulator.api` is what people call.

Where this differs in form, not in result, from the reference:
    * A ready task is known by its *rank* (`reference.task_ranks`). With an explicit order, ranks number the tasks of device 0,
      then of device 1, and so on, each in the order given, and a device starts nothing but its next rank.
    * Where a value's readers sit is looked up when the value is made, not before; its copies then take the next free slots, in
      order of device. Slots are therefore in the order in which they join the queues.
    * The key of an event is its place among those that end with it: a task's number, or K + 1 plus the number of the value
      that arrives; the lower half holds the slot. Key K is the first event, when the step begins.
    * Every channel has a queue of slots, the running one at its head. "All its channels are free and no earlier waiting
      transfer wants any of them" is the same as "it heads the queue of each of its channels"; `blocked` counts the others.
    * Under 1f1b the ranks of a pass are a range, and a device looks for its next task there first.
    * A null time or a missing link shows when the task or transfer would start, and ends the run.

Sums run left to right in float64; no fast-math, so the compiler may neither reorder nor contract them.
"""

# mypy: allow-untyped-defs, disable-error-code="assignment"

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
from numba import njit

from rlplace.simulator import gates, queues
from rlplace.simulator import records as r
from rlplace.simulator.gates import next_stage, prepare_gates
from rlplace.simulator.queues import (
    INNER,
    add_ready,
    first_ready,
    is_ready,
    join_queues,
    leave_queues,
    levels,
    next_ready,
    part,
    pop_event,
    push_event,
    remove_ready,
)

DONE, CANNOT_RUN, STUCK, BAD_DEVICE = range(4)
"""Outcome of a simulation; CANNOT_RUN: a null time or missing link; BAD_DEVICE: `device_of_group` is out of range."""

IDLE, RUNNING, DUE = range(3)
"""State of a device; DUE: idle, and in the list of those that may have something to start."""

# numba's cache only looks at the file of the function that is called from outside, and at its bytecode and constants.
_SOURCES = (Path(str(module.__file__)) for module in (r, queues, gates))
_STAMP = zlib.crc32(b"".join(source.read_bytes() for source in _SOURCES))
_ENTRY = {"cache": True, "nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}

_OWNED = 1 << 30  # uses of what a group owns: its bytes there are never freed


@njit(**INNER)
def _reset(g, w, device_of_group):
    """Empties all queues and fills the devices with what is resident; returns an outcome."""
    device, channel, value, clock, ready = w.device, w.channel, w.value, w.clock, w.ready
    sizes, batches, num_devices, num_groups = g.bytes, g.numbers[r.BATCHES], len(device), len(device_of_group)
    for d in range(num_devices):
        device[d].memory = sizes[num_groups + d]
        device[d].busy_s = 0.0
        device[d].ready = 0
        device[d].state = DUE
        device[d].position, device[d].pass_begin = 0, 0
    for group in range(num_groups):
        d = device_of_group[group]
        if d >= num_devices:
            return BAD_DEVICE
        device[d].memory += sizes[group]
    due, waits, missing = part(w, r.DUE_DEVICES), part(w, r.WAITS), part(g, r.MISSING)
    for d in range(num_devices):
        device[d].peak = device[d].memory
        due[d] = d
        for i in range(ready.shape[1]):
            ready[d, i] = 0
    for c in range(len(channel)):
        channel[c].head = r.NONE
    for t in range(len(waits)):
        waits[t] = missing[t]
    gathered = part(g, r.GATHERED)
    for i in range(len(gathered)):
        value[gathered[i]].unmade = batches
        value[gathered[i]].source = r.NONE
    absent, member_ptr = part(w, r.ABSENT), part(g, r.MEMBER_PTR)
    for c in range(len(absent)):
        absent[c] = member_ptr[c + 1] - member_ptr[c]
    w.now_s[0] = 0.0
    for i in range(len(clock)):
        clock[i] = 0
    clock[r.KEY] = np.int64(len(waits)) << 32
    clock[r.WAITING] = num_devices
    return DONE


@njit(**INNER)
def _join_collective(g, w, collective, slot, found):
    """A collective that misses nothing any more joins the queues of its channels; returns how many slots can start now."""
    held, slots = part(g, r.HELD), w.slot
    slots[slot].value, slots[slot].device = collective, r.NONE
    begin, end = np.int64(held[collective]), np.int64(held[collective + 1])
    return join_queues(
        slots, w.channel, part(g, r.CHANNELS), part(w, r.FOLLOWING), g.numbers[r.WIDTH],
        part(w, r.STARTABLE), found, np.int64(slot), begin, end,
    )  # fmt: skip


@njit(**INNER)
def _admit_slowly(g, w, rank_of_task, t, d):
    """A task misses nothing any more: it is ready, or one task less keeps its collective waiting. Changes the clock."""
    collective_of, absent, clock, device = part(g, r.COLLECTIVE_OF), part(w, r.ABSENT), w.clock, w.device
    if len(collective_of) > 0 and collective_of[t] != r.NONE:
        collective = collective_of[t]
        absent[collective] -= 1
        if absent[collective] == 0:
            clock[r.FOUND] = _join_collective(g, w, collective, clock[r.SLOTS], clock[r.FOUND])
            clock[r.SLOTS] += 1
        return
    middle, low = levels(len(rank_of_task))
    add_ready(w.ready, d, middle, low, rank_of_task[t])
    device[d].ready += 1
    if device[d].state == IDLE:
        device[d].state = DUE
        part(w, r.DUE_DEVICES)[clock[r.WAITING]] = d
        clock[r.WAITING] += 1


@njit(**INNER)
def _open_gates(g, w, rank_of_task, device_of_group, stage, count):
    """The next gates of a stage open; their tasks wait for their inputs alone. Changes the clock."""
    opened, gate_ptr, gate_ops, waits = part(w, r.OPENED), part(w, r.GATE_PTR), part(w, r.GATE_OPS), part(w, r.WAITS)
    early_task, task, batches = part(g, r.EARLY_TASK), g.task, g.numbers[r.BATCHES]
    gpipe = g.numbers[r.SCHEDULE] == r.GPIPE
    for _ in range(count):
        if opened[stage] >= (1 if gpipe else batches):
            return
        first = np.int64(0 if gpipe else opened[stage])
        for m in range(first, batches if gpipe else first + 1):
            for i in range(gate_ptr[stage], gate_ptr[stage + 1]):
                op = gate_ops[i]
                t = np.int64(op if m == batches - 1 else early_task[op]) + m * g.numbers[r.EARLY_TASKS]
                waits[t] -= 1
                if waits[t] == 0:
                    _admit_slowly(g, w, rank_of_task, t, device_of_group[task[t].group])
        opened[stage] += 1


@njit(**INNER)
def _close_batches(g, w, rank_of_task, device_of_group, stage, t):
    """A task has ended: the batches that it is part of wait for one task less. Changes the clock."""
    op, m = g.task[t].op, part(g, r.MICROBATCH)[t]
    kind, own = part(g, r.CLOSES)[op], np.int64(stage[part(g, r.OP_GROUP)[op]])
    if kind == r.NO_STAGE or (kind == r.SPARE_STAGE and part(w, r.SPARE)[own] == 0):
        return
    left, gpipe, batches = part(w, r.LEFT), g.numbers[r.SCHEDULE] == r.GPIPE, g.numbers[r.BATCHES]
    apart_ptr, apart = part(g, r.APART_PTR), part(g, r.APART)
    s = next_stage(apart_ptr, apart, stage, op, -1) if kind == r.APART_STAGES else own
    while s != r.NONE:
        batch = s if gpipe else s * batches + m
        left[batch] -= 1
        if left[batch] == 0:
            _open_gates(g, w, rank_of_task, device_of_group, s, np.int64(1))
        s = next_stage(apart_ptr, apart, stage, op, s) if kind == r.APART_STAGES else np.int64(r.NONE)


@njit(**INNER)
def _begin(g, w, rank_of_task, device_of_group, stage):
    """Admits the tasks that miss nothing, and opens the first gates."""
    first, task = part(g, r.FIRST), g.task
    for i in range(len(first)):
        t = np.int64(first[i])
        _admit_slowly(g, w, rank_of_task, t, device_of_group[task[t].group])
    if g.numbers[r.SCHEDULE] != r.LIST:
        open_first = prepare_gates(g, w, stage)
        for s in range(len(open_first)):
            _open_gates(g, w, rank_of_task, device_of_group, np.int64(s), open_first[s])


@njit(**INNER)
def _start_collective(g, w, device_of_group, collective, now):
    """The tasks of a collective start together; returns the longest of their times, NaN if one cannot run."""
    task, time_s, device, start_s, end_s = g.task, g.time_s, w.device, w.start_s, w.end_s
    members, member_ptr, column = part(g, r.MEMBERS), part(g, r.MEMBER_PTR), part(g, r.COLUMN)
    gathered_ptr, gathered_of = part(g, r.GATHERED_PTR), part(g, r.GATHERED_OF)
    longest = -np.inf
    for i in range(member_ptr[collective], member_ptr[collective + 1]):
        t = members[i]
        d = device_of_group[task[t].group]
        time = time_s[task[t].op, column[d]]
        if time != time:
            return time
        longest = max(longest, time)
        device[d].memory += task[t].alloc_bytes
        if len(gathered_ptr) > 0:
            device[d].memory += _first_bytes(w.value, gathered_ptr, gathered_of, t, d)
        device[d].peak = max(device[d].peak, device[d].memory)
    if len(start_s) > 0:
        for i in range(member_ptr[collective], member_ptr[collective + 1]):
            start_s[members[i]], end_s[members[i]] = now, now + longest
    return longest


@njit(**INNER)
def _first_bytes(value, gathered_ptr, gathered_of, t, d):
    """Bytes of the values of several producers of which this task is the first to start."""
    total = 0
    for i in range(gathered_ptr[t], gathered_ptr[t + 1]):
        v = gathered_of[i]
        if value[v].source == r.NONE:
            value[v].source = d
            total += value[v].bytes
    return total


@njit(**INNER)
def _satisfy_here(g, w, rank_of_task, device_of_group, v, d):
    """The readers of a value on a device miss one input less, where collectives may be among them. Changes the clock."""
    readers, value, waits = g.readers, w.value, part(w, r.WAITS)
    for edge in range(value[v].readers, value[v + 1].readers):
        if device_of_group[readers[edge].group] == d:
            t = np.int64(readers[edge].task)
            waits[t] -= 1
            if waits[t] == 0:
                _admit_slowly(g, w, rank_of_task, t, d)


@njit(**INNER)
def _first_of_pass(g, w, d, middle, low):
    """The ready task of a device to start under 1f1b, by rank; remembers which ranks belong to its pass.

    Ranks run through backward and update by micro-batch, then through forward by micro-batch, so those of a pass are a range.
    """
    device, batches, forwards = w.device, g.numbers[r.BATCHES], g.numbers[r.FORWARD_OPS]
    if device[d].pass_begin < device[d].position:
        rank = next_ready(w.ready, d, middle, low, np.int64(device[d].pass_begin))
        if rank >= 0 and rank < device[d].position:
            return rank
    rank = first_ready(w.ready, d, middle, low)
    tasks, backwards = np.int64(len(g.task) - 2), g.numbers[r.EARLY_TASKS] - forwards
    first_forward = tasks - batches * forwards
    if rank >= first_forward:
        begin = first_forward + (rank - first_forward) // forwards * forwards
        end = begin + forwards
    else:
        m = min(rank // backwards, batches - 1) if backwards > 0 else batches - 1
        begin = m * backwards
        end = first_forward if m == batches - 1 else begin + backwards
    device[d].pass_begin, device[d].position = begin, end
    return rank


@njit(**INNER)
def _run(g, w, rank_of_task, task_of_rank, device_of_group, stage, ordered):
    """Rule 3 from where the clock stands; returns (outcome, step time).

    One long function over local names: a tuple of arrays passed on to helpers counts references at every call.
    """
    time_s, task, readers, pair, table_s = g.time_s, g.task, g.readers, g.pair, g.table_s
    value, slots, channel, device, event, ready = w.value, w.slot, w.channel, w.device, w.event, w.ready
    clock, start_s, end_s, transfer = w.clock, w.start_s, w.end_s, w.transfer
    column, inputs, outputs, owner = part(g, r.COLUMN), part(g, r.INPUTS), part(g, r.OUTPUTS), part(g, r.OWNER)
    channels, gathered_ptr, gathered_of = part(g, r.CHANNELS), part(g, r.GATHERED_PTR), part(g, r.GATHERED_OF)
    collective_of, member_ptr, members = part(g, r.COLLECTIVE_OF), part(g, r.MEMBER_PTR), part(g, r.MEMBERS)
    waits, following, startable, due = part(w, r.WAITS), part(w, r.FOLLOWING), part(w, r.STARTABLE), part(w, r.DUE_DEVICES)
    num_devices, num_tasks, width = len(device), np.int64(len(waits)), g.numbers[r.WIDTH]
    middle, low = levels(num_tasks)
    recording, collectives = len(start_s) > 0, len(collective_of) > 0
    gathering, gated = len(gathered_ptr) > 0, g.numbers[r.SCHEDULE] != r.LIST
    whole_passes = g.numbers[r.SCHEDULE] == r.ONE_F_ONE_B

    now, key, done, events = w.now_s[0], clock[r.KEY], clock[r.ENDED], clock[r.EVENTS]
    used, transfers, waiting, found = clock[r.SLOTS], clock[r.TRANSFERS], clock[r.WAITING], clock[r.FOUND]
    while True:
        while True:  # everything that ends now
            number = key >> 32
            if number <= num_tasks:
                collective, count, d = np.int64(r.NONE), np.int64(1), np.uint32(0)
                if number < num_tasks:
                    d = device_of_group[task[number].group]
                    if collectives and collective_of[number] != r.NONE:
                        collective = np.int64(collective_of[number])
                        count = np.int64(member_ptr[collective + 1]) - np.int64(member_ptr[collective])
                        found = leave_queues(slots, channel, channels, following, width, startable, found, key & 0xFFFFFFFF)
                    else:
                        device[d].state = DUE
                        due[waiting] = d
                        waiting += 1
                for member in range(count):
                    t = number
                    if collective != r.NONE:
                        t = np.int64(members[member_ptr[collective] + member])
                        d = device_of_group[task[t].group]
                    if t < num_tasks:  # a task ends: free temporaries, unread outputs, inputs whose last use this was
                        done += 1
                        freed = task[t].free_bytes
                        for i in range(task[t].inputs, task[t + 1].inputs):
                            v = inputs[i]
                            if value[v].source == d:
                                uses = value[v].uses - 1
                                value[v].uses = uses
                                if uses == 0:
                                    freed += value[v].bytes
                            else:
                                s = value[v].slots
                                while slots[s].device != d:
                                    s += 1
                                uses = slots[s].uses - 1
                                slots[s].uses = uses
                                if uses == 0:
                                    freed += value[v].bytes
                        device[d].memory -= freed
                    for i in range(task[t].outputs, task[t + 1].outputs):
                        v = outputs[i]
                        uses = 0
                        if t == num_tasks:
                            d = device_of_group[owner[i - task[t].outputs]]
                            uses = _OWNED
                        if gathering and value[v].unmade > 1:
                            value[v].unmade -= 1
                            continue
                        # The value is here: readers here miss one input less, other devices that host readers get a slot.
                        if collectives:  # they join their queues before the value does
                            clock[r.WAITING], clock[r.SLOTS], clock[r.FOUND] = waiting, used, found
                            _satisfy_here(g, w, rank_of_task, device_of_group, v, d)
                            waiting, used, found = clock[r.WAITING], clock[r.SLOTS], clock[r.FOUND]
                        begin = used
                        end = begin
                        for edge in range(value[v].readers, value[v + 1].readers):
                            there = device_of_group[readers[edge].group]
                            if there == d:
                                uses += 1
                                if not collectives:
                                    reader = readers[edge].task
                                    missing = waits[reader] - 1
                                    waits[reader] = missing
                                    if missing == 0:
                                        add_ready(ready, d, middle, low, rank_of_task[reader])
                                        device[d].ready += 1
                                        if device[d].state == IDLE:
                                            device[d].state = DUE
                                            due[waiting] = d
                                            waiting += 1
                                continue
                            s = end  # slots of a value are in order of device
                            while s > begin and slots[s - 1].device > there:
                                s -= 1
                            if s > begin and slots[s - 1].device == there:
                                slots[s - 1].uses += 1
                                continue
                            for other in range(end, s, -1):
                                slots[other].device, slots[other].uses = slots[other - 1].device, slots[other - 1].uses
                            slots[s].device, slots[s].uses = there, 1
                            end += 1
                        used = end
                        value[v].source, value[v].slots, value[v].uses = d, begin, uses + (end - begin)
                        for s in range(begin, end):
                            p = d * num_devices + slots[s].device
                            if pair[p].bandwidth == 0.0:
                                return CANNOT_RUN, now
                            slots[s].value = v
                            found = join_queues(
                                slots, channel, channels, following, width, startable, found, s,
                                np.int64(pair[p].channels), np.int64(pair[p].channels_end),
                            )  # fmt: skip
                    if gated and t < num_tasks:
                        clock[r.WAITING], clock[r.SLOTS], clock[r.FOUND] = waiting, used, found
                        _close_batches(g, w, rank_of_task, device_of_group, stage, t)
                        waiting, used, found = clock[r.WAITING], clock[r.SLOTS], clock[r.FOUND]
            else:  # a transfer ends: the value is present there, its channels go to the next in their queues
                s = key & 0xFFFFFFFF
                v, d = slots[s].value, slots[s].device
                found = leave_queues(slots, channel, channels, following, width, startable, found, s)
                uses = value[v].uses - 1
                value[v].uses = uses
                if uses == 0:
                    device[value[v].source].memory -= value[v].bytes
                if collectives:
                    clock[r.WAITING], clock[r.SLOTS], clock[r.FOUND] = waiting, used, found
                    _satisfy_here(g, w, rank_of_task, device_of_group, v, d)
                    waiting, used, found = clock[r.WAITING], clock[r.SLOTS], clock[r.FOUND]
                else:
                    for edge in range(value[v].readers, value[v + 1].readers):
                        if device_of_group[readers[edge].group] == d:
                            reader = readers[edge].task
                            missing = waits[reader] - 1
                            waits[reader] = missing
                            if missing == 0:
                                add_ready(ready, d, middle, low, rank_of_task[reader])
                                device[d].ready += 1
                                if device[d].state == IDLE:
                                    device[d].state = DUE
                                    due[waiting] = d
                                    waiting += 1
            for i in range(found):
                s = np.int64(startable[i])
                v, d = slots[s].value, slots[s].device
                if d == r.NONE:
                    time = _start_collective(g, w, device_of_group, v, now)
                    key = np.int64(members[member_ptr[v]]) << 32 | s
                    if time != time:
                        return CANNOT_RUN, now
                else:
                    p = value[v].source * num_devices + d
                    if value[v].table < 0:
                        time = pair[p].latency_s + value[v].bytes / pair[p].bandwidth
                    else:
                        time = table_s[value[v].table, value[v].source, d]
                    memory = device[d].memory + value[v].bytes
                    device[d].memory = memory
                    device[d].peak = max(device[d].peak, memory)
                    key = (num_tasks + 1 + np.int64(v)) << 32 | s
                    if recording:
                        transfer[transfers].start_s, transfer[transfers].end_s = now, now + time
                        transfer[transfers].value, transfer[transfers].source = v, value[v].source
                        transfer[transfers].destination = d
                        transfers += 1
                push_event(event, events, now + time, key)
                events += 1
            found = np.int64(0)
            if events == 0 or event[0].time_s != now:
                break
            key = pop_event(event, events)
            events -= 1
        for i in range(waiting):  # in any order: what starts on one device does not depend on the others
            d = due[i]
            device[d].state = IDLE
            if device[d].ready == 0:
                continue
            if ordered:
                rank = np.int64(device[d].position)
                if not is_ready(ready, d, low, rank):
                    continue
                device[d].position += 1
            elif whole_passes:
                rank = _first_of_pass(g, w, d, middle, low)
            else:
                rank = first_ready(ready, d, middle, low)
            remove_ready(ready, d, middle, low, rank)
            device[d].ready -= 1
            device[d].state = RUNNING
            t = np.int64(task_of_rank[rank])
            time = time_s[task[t].op, column[d]]
            if time != time:
                return CANNOT_RUN, now
            memory = device[d].memory + task[t].alloc_bytes
            if gathering:
                memory += _first_bytes(value, gathered_ptr, gathered_of, t, d)
            device[d].memory = memory
            device[d].peak = max(device[d].peak, memory)
            device[d].busy_s += time
            if recording:
                start_s[t], end_s[t] = now, now + time
            push_event(event, events, now + time, t << 32)
            events += 1
        waiting = np.int64(0)
        if events == 0:
            clock[r.TRANSFERS] = transfers
            return (DONE if done == num_tasks else STUCK), now
        now = event[0].time_s
        key = pop_event(event, events)
        events -= 1


@njit(**INNER)
def _report(g, w, peak, busy_s):
    """Copies peaks and busy seconds; returns the memory overflow relative to the limits, summed over devices."""
    device, sizes, overflow = w.device, g.bytes, 0.0
    num_devices = len(device)
    for d in range(num_devices):
        limit = sizes[len(sizes) - num_devices + d]
        peak[d], busy_s[d] = device[d].peak, device[d].busy_s
        if limit >= 0 and device[d].peak > limit:
            overflow += (device[d].peak - limit) / limit
    return overflow


def _entry(stamp):
    """The function that is called from outside, with what numba's cache must know of other files as a constant."""

    @njit(**_ENTRY)
    def simulate_plans(
        graph, work, rank_of_task, task_of_rank, position, device_of_group, stage_of_group, outcome, step_s, peak, busy_s
    ):
        """Simulates one plan per row of `device_of_group`; `work` holds what happened in the last row.

        Args:
            graph: A `Graph` as a plain tuple (numba unpacks those quicker than named ones).
            work: A `Work` as a plain tuple.
            rank_of_task: uint32 [K], see the module docstring.
            task_of_rank: uint32 [K], its inverse.
            position: uint32 [D], the first rank of every device when the ranks are an explicit order (which then belongs to the
                only row), else [0].
            device_of_group: uint32 [rows, G].
            stage_of_group: uint32 [G], or [0]: a group's stage is its device.
            outcome: int8 [rows], filled with DONE, CANNOT_RUN, STUCK or BAD_DEVICE.
            step_s: float64 [rows], filled; NaN when the step cannot complete.
            peak: int64 [rows, D], bytes, filled; resident and reserved bytes alone when the step cannot complete.
            busy_s: float64 [rows, D], filled; zeros when the step cannot complete.

        Returns:
            Of the last row: step time (inf when it cannot complete), summed relative memory overflow.
        """
        _ = stamp
        g, w = r.Graph(*graph), r.Work(*work)
        step, overflow = np.inf, 0.0
        for row in range(len(device_of_group)):
            devices = device_of_group[row]
            stage = stage_of_group if len(stage_of_group) > 0 else devices
            ordered = len(position) > 0
            result = _reset(g, w, devices)
            step = np.inf
            if result == DONE:
                for d in range(len(position)):
                    w.device[d].position = position[d]
                _begin(g, w, rank_of_task, devices, stage)
                result, step = _run(g, w, rank_of_task, task_of_rank, devices, stage, ordered)
                if result != DONE:
                    _reset(g, w, devices)
                    step = np.inf
            outcome[row] = result
            step_s[row] = step if result == DONE else np.nan
            overflow = _report(g, w, peak[row], busy_s[row])
        return step, overflow

    return simulate_plans


simulate_plans = _entry(_STAMP)


@njit(**_ENTRY)
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
