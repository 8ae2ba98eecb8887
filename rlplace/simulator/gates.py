"""Gates in the compiled simulator: what `rlplace.simulator.stages` defines, for one assignment after another."""

# mypy: allow-untyped-defs

from __future__ import annotations

import numpy as np

from rlplace.compiled import inner
from rlplace.schedule import BACKWARD_GATES
from rlplace.simulator import records as r
from rlplace.simulator.queues import add_ready, join_queues, levels, part


@inner
def prepare_gates(g, w, stage):
    """Sorts the ops that wait by stage, and counts what each batch waits for.

    Returns:
        int64 [S], gates of each stage that are open from the start.
    """
    op_group, gated, closes, batches = part(g, r.OP_GROUP), part(g, r.GATED), part(g, r.CLOSES), g.layout[r.BATCHES]
    apart_ptr, apart, gate_ptr, gate_ops = part(g, r.APART_PTR), part(g, r.APART), part(w, r.GATE_PTR), part(w, r.GATE_OPS)
    opened, left, spare = part(w, r.OPENED), part(w, r.LEFT), part(w, r.SPARE)
    stages = len(opened)
    for s in range(stages):
        gate_ptr[s + 1] = 0
        opened[s] = 0
    for i in range(len(gated)):
        gate_ptr[stage[op_group[gated[i]]] + 1] += 1
    gate_ptr[0] = 0
    for s in range(stages):
        gate_ptr[s + 1] += gate_ptr[s]
    for i in range(len(gated)):
        s = stage[op_group[gated[i]]]
        gate_ops[gate_ptr[s]] = gated[i]
        gate_ptr[s] += 1
    for s in range(stages, 0, -1):
        gate_ptr[s] = gate_ptr[s - 1]
    gate_ptr[0] = 0

    closing = np.zeros(stages, dtype=np.int64)  # ops that close each stage
    for op in range(len(closes)):
        if closes[op] == r.OWN_STAGE:
            closing[stage[op_group[op]]] += 1
        elif closes[op] == r.APART_STAGES:
            s = next_stage(apart_ptr, apart, stage, op, -1)
            while s != r.NONE:
                closing[s] += 1
                s = next_stage(apart_ptr, apart, stage, op, s)
    for s in range(stages):
        spare[s] = closing[s] == 0
    for op in range(len(closes)):
        s = stage[op_group[op]]
        if closes[op] == r.SPARE_STAGE and spare[s] == 1:
            closing[s] += 1
    if g.layout[r.GATES] == BACKWARD_GATES:
        for s in range(stages):
            left[s] = closing[s] * batches
            closing[s] = closing[s] == 0
        return closing
    for s in range(stages):
        for m in range(batches):
            left[s * batches + m] = closing[s]
    return stages_to_sink_kernel(part(g, r.LINKS), stage, stages)


@inner
def next_stage(apart_ptr, apart, stage, op, after):
    """The lowest stage above `after` that an op of APART_STAGES closes, NONE after the last."""
    lowest = np.int64(r.NONE)
    for i in range(apart_ptr[op], apart_ptr[op + 1]):
        s = np.int64(stage[apart[i]])
        if s > after and s < lowest:
            lowest = s
    return lowest


@inner
def stages_to_sink_kernel(links, stage, stages):
    """int64 [S], stages on the longest path to a sink of the forward stage graph, both ends counted; a cycle counts as one."""
    reach = np.zeros((stages, stages), dtype=np.bool_)
    for s in range(stages):
        reach[s, s] = True
    for i in range(0, len(links), 2):
        reach[stage[links[i]], stage[links[i + 1]]] = True
    for middle in range(stages):
        for s in range(stages):
            if reach[s, middle]:
                for t in range(stages):
                    reach[s, t] |= reach[middle, t]
    count = np.zeros(stages, dtype=np.int64)
    for s in range(stages):
        for t in range(stages):
            count[s] += reach[s, t]
    longest = np.zeros(stages, dtype=np.int64)
    for size in range(1, stages + 1):  # what a stage reaches reaches less
        for s in range(stages):
            if count[s] != size:
                continue
            beyond = np.int64(0)
            for t in range(stages):
                if reach[s, t] and not reach[t, s]:
                    beyond = max(beyond, longest[t])
            longest[s] = 1 + beyond
    return longest


@inner
def admit(g, w, ranks, device_of_group, tasks, counts):
    """Tasks that wait for one thing less, in their order: what misses nothing any more is ready, or a collective's.

    Returns:
        `counts` as they are then: lengths of DUE_DEVICES, of the slots in use and of STARTABLE.
    """
    task, device, ready, waits, due = g.task, w.device, w.ready, part(w, r.WAITS), part(w, r.DUE_DEVICES)
    collective_of = part(g, r.COLLECTIVE_OF)
    collectives, (waiting, used, found) = len(collective_of) > 0, counts
    middle, low = levels(len(waits))
    for i in range(len(tasks)):
        t = tasks[i]
        if waits[t] > 0:
            waits[t] -= 1
        if waits[t] == 0:
            if collectives and collective_of[t] != r.NONE:
                used, found = member_waits(g, w, np.int64(collective_of[t]), used, found)
            else:
                d = device_of_group[task[t].group]
                waiting = add_ready(ready, device, due, waiting, middle, low, ranks[0, t], d)
    return waiting, used, found


@inner
def member_waits(g, w, collective, used, found):
    """One task less keeps a collective waiting; the last one lets it join the queues of its channels."""
    absent, held, slots = part(w, r.ABSENT), part(g, r.HELD), w.slot
    absent[collective] -= 1
    if absent[collective] > 0:
        return used, found
    slots[used].value, slots[used].device = collective, r.NONE
    begin, end = np.int64(held[collective]), np.int64(held[collective + 1])
    found = join_queues(
        slots, w.channel, part(g, r.CHANNELS), part(w, r.FOLLOWING), g.layout[r.WIDTH], part(w, r.STARTABLE),
        found, used, begin, end,
    )  # fmt: skip
    return np.uint32(used + 1), found


@inner
def open_gates(g, w, ranks, device_of_group, stage, count, counts):
    """The next gates of a stage open; see `admit`."""
    opened, gate_ptr, gate_ops = part(w, r.OPENED), part(w, r.GATE_PTR), part(w, r.GATE_OPS)
    early_task, batches = part(g, r.EARLY_TASK), g.layout[r.BATCHES]
    whole = g.layout[r.GATES] == BACKWARD_GATES
    begin = np.int64(gate_ptr[stage])
    tasks = np.empty(np.int64(gate_ptr[stage + 1]) - begin, dtype=np.uint32)
    for _ in range(count):
        if opened[stage] >= (1 if whole else batches):
            break
        first = np.int64(0 if whole else opened[stage])
        for m in range(first, batches if whole else first + 1):
            for i in range(len(tasks)):
                op = gate_ops[begin + i]
                tasks[i] = (op if m == batches - 1 else early_task[op]) + m * g.layout[r.EARLY_TASKS]
            counts = admit(g, w, ranks, device_of_group, tasks, counts)
        opened[stage] += 1
    return counts


@inner
def close_apart(g, w, ranks, device_of_group, stage_of_group, t, counts):
    """The batches of all stages that a task of an op of APART_STAGES is part of wait for one task less; see `admit`."""
    apart_ptr, apart, left, op = part(g, r.APART_PTR), part(g, r.APART), part(w, r.LEFT), g.task[t].op
    s = next_stage(apart_ptr, apart, stage_of_group, op, -1)
    while s != r.NONE:
        batch = s * g.layout[r.BATCHES] + part(g, r.MICROBATCH)[t]
        left[batch] -= 1
        if left[batch] == 0:
            counts = open_gates(g, w, ranks, device_of_group, s, np.int64(1), counts)
        s = next_stage(apart_ptr, apart, stage_of_group, op, s)
    return counts
