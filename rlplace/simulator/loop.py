"""The loop of the compiled simulator: rule 3 of the executor, over the records of `rlplace.simulator.records`."""

# mypy: allow-untyped-defs, disable-error-code="assignment"

from __future__ import annotations

import numpy as np

from rlplace.compiled import inner
from rlplace.simulator import records as r
from rlplace.simulator.queues import (
    DUE,
    IDLE,
    RUNNING,
    add_ready,
    first_ready,
    is_ready,
    join_queues,
    leave_queues,
    levels,
    member_waits,
    part,
    pop_event,
    push_event,
    remove_ready,
)

DONE, CANNOT_RUN, STUCK, BAD_DEVICE = range(4)
"""How a run ends; CANNOT_RUN: a null time or missing link; BAD_DEVICE: `device_of_group` is out of range."""

_OWNED = 1 << 30  # uses of what a group owns: its bytes there are never freed
_LOWER_HALF = 0xFFFFFFFF


@inner
def run(g, w, ranks, device_of_group, ordered, counts):
    """Runs a step from its beginning until no event is left.

    One long function over local names: numba counts references to every array of a tuple that is passed on, and to arrays
    that are passed to functions with branches. Indices are kept unsigned, or numba looks at each whether it is negative.

    `counts` are what `begin` returned: lengths of DUE_DEVICES, of the slots in use and of STARTABLE.

    Returns:
        One of the outcomes above, and the time at which the run ends.
    """
    time_s, task, readers, pair, table_s, ahead = g.time_s, g.task, g.readers, g.pair, g.table_s, g.layout
    value, slots, channel, device, event, ready = w.value, w.slot, w.channel, w.device, w.event, w.ready
    times, transfer = w.time_s, w.transfer
    column, inputs, outputs, owner = part(g, r.COLUMN), part(g, r.INPUTS), part(g, r.OUTPUTS), part(g, r.OWNER)
    channels, collective_of = part(g, r.CHANNELS), part(g, r.COLLECTIVE_OF)
    member_ptr, members = part(g, r.MEMBER_PTR), part(g, r.MEMBERS)
    waits, following, startable, due = part(w, r.WAITS), part(w, r.FOLLOWING), part(w, r.STARTABLE), part(w, r.DUE_DEVICES)
    num_devices, num_tasks, width = len(device), np.int64(len(waits)), ahead[r.WIDTH]
    middle, low = levels(num_tasks)
    recording, collectives = times.shape[1] > 0, len(collective_of) > 0

    now, key, done, events, transfers = 0.0, num_tasks << 32, 0, 0, 0
    waiting, used, starting = counts
    while True:
        while True:  # everything that ends now
            number = key >> 32
            if number <= num_tasks:
                first, last, d = number, number + 1, np.uint32(0)
                collective = np.int64(r.NONE)
                if number < num_tasks:
                    d = device_of_group[task[number].group]
                    if collectives and collective_of[number] != r.NONE:
                        collective = np.int64(collective_of[number])
                        first, last = np.int64(member_ptr[collective]), np.int64(member_ptr[collective + 1])
                        starting = leave_queues(
                            slots, channel, channels, following, width, startable, starting, np.uint32(key & _LOWER_HALF)
                        )
                    else:
                        device[d].state = DUE
                        due[waiting] = d
                        waiting = np.uint32(waiting + 1)
                for t in range(first, last):
                    if collective != r.NONE:
                        t = np.int64(members[t])
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
                                    s = np.uint32(s + 1)
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
                        # The value is here: readers here miss one input less, other devices that host readers get a slot.
                        if collectives:  # they join their queues before the value does
                            for edge in range(value[v].readers, value[v + 1].readers):
                                reader = readers[edge].task
                                if device_of_group[readers[edge].group] == d:
                                    missing = waits[reader] - 1
                                    waits[reader] = missing
                                    if missing == 0:
                                        if collective_of[reader] != r.NONE:
                                            used, starting = member_waits(g, w, np.int64(collective_of[reader]), used, starting)
                                        else:
                                            rank = ranks[0, reader]
                                            waiting = add_ready(ready, device, due, waiting, middle, low, rank, d)
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
                                        rank = ranks[0, reader]
                                        waiting = add_ready(ready, device, due, waiting, middle, low, rank, d)
                                continue
                            s = end  # slots of a value are in order of device
                            while s > begin and slots[np.uint32(s - 1)].device > there:
                                s = np.uint32(s - 1)
                            if s > begin and slots[np.uint32(s - 1)].device == there:
                                slots[np.uint32(s - 1)].uses += 1
                                continue
                            other = end
                            while other > s:
                                before = np.uint32(other - 1)
                                slots[other].device, slots[other].uses = slots[before].device, slots[before].uses
                                other = before
                            slots[s].device, slots[s].uses = there, 1
                            end = np.uint32(end + 1)
                        used = end
                        value[v].source, value[v].slots, value[v].uses = d, begin, uses + (end - begin)
                        for s in range(begin, end):
                            s = np.uint32(s)
                            p = d * num_devices + slots[s].device
                            if pair[p].bandwidth == 0.0:
                                return CANNOT_RUN, now
                            slots[s].value = v
                            starting = join_queues(
                                slots, channel, channels, following, width, startable, starting, s,
                                np.int64(pair[p].channels), np.int64(pair[p].channels_end),
                            )  # fmt: skip
            else:  # a transfer ends: the value is present there, its channels go to the next in their queues
                s = np.uint32(key & _LOWER_HALF)
                v, d = slots[s].value, slots[s].device
                starting = leave_queues(slots, channel, channels, following, width, startable, starting, s)
                uses = value[v].uses - 1
                value[v].uses = uses
                if uses == 0:
                    device[value[v].source].memory -= value[v].bytes
                for edge in range(value[v].readers, value[v + 1].readers):
                    if device_of_group[readers[edge].group] == d:
                        reader = readers[edge].task
                        missing = waits[reader] - 1
                        waits[reader] = missing
                        if missing == 0:
                            if collectives and collective_of[reader] != r.NONE:
                                used, starting = member_waits(g, w, np.int64(collective_of[reader]), used, starting)
                            else:
                                waiting = add_ready(ready, device, due, waiting, middle, low, ranks[0, reader], d)
            for i in range(starting):
                s = np.int64(startable[i])
                v, d = slots[s].value, slots[s].device
                if d == r.NONE:
                    time = start_collective(g, w, device_of_group, v, now)
                    if time != time:
                        return CANNOT_RUN, now
                    key = np.int64(members[member_ptr[v]]) << 32 | s
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
            starting = np.uint32(0)
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
            else:
                rank = first_ready(ready, d, middle, low)
            remove_ready(ready, d, middle, low, rank)
            device[d].ready -= 1
            device[d].state = RUNNING
            t = np.int64(ranks[1, rank])
            time = time_s[t, column[d]]
            if time != time:
                return CANNOT_RUN, now
            memory = device[d].memory + task[t].alloc_bytes
            device[d].memory = memory
            device[d].peak = max(device[d].peak, memory)
            device[d].busy_s += time
            if recording:
                times[0, t], times[1, t] = now, now + time
            push_event(event, events, now + time, t << 32)
            events += 1
        waiting = np.uint32(0)
        if events == 0:
            w.layout[r.TRANSFERS] = transfers
            return (DONE if done == num_tasks else STUCK), now
        now = event[0].time_s
        key = pop_event(event, events)
        events -= 1


@inner
def start_collective(g, w, device_of_group, collective, now):
    """Starts the tasks of a collective together; returns the longest of their times, NaN if one cannot run."""
    task, time_s, device, times = g.task, g.time_s, w.device, w.time_s
    members, member_ptr, column = part(g, r.MEMBERS), part(g, r.MEMBER_PTR), part(g, r.COLUMN)
    longest = -np.inf
    for i in range(member_ptr[collective], member_ptr[collective + 1]):
        t = np.int64(members[i])
        d = device_of_group[task[t].group]
        time = time_s[t, column[d]]
        if time != time:
            return time
        longest = max(longest, time)
        memory = device[d].memory + task[t].alloc_bytes
        device[d].memory = memory
        device[d].peak = max(device[d].peak, memory)
    if times.shape[1] > 0:
        for i in range(member_ptr[collective], member_ptr[collective + 1]):
            times[0, members[i]], times[1, members[i]] = now, now + longest
    return longest
