"""Analysis of a plan's timeline for where the plan could be better, compiled: slack, waits, the critical chain.

A move to a device that runs critical work at that time delays the step; shortening one of several critical chains does not
shorten it; a value that others read on a device is there for every reader. All ops of the step count. Axes as in
`rlplace.envs.guide.records`.
"""

# Compiled functions take their types from their arguments.
# mypy: disable-error-code="no-untyped-def, assignment"
from __future__ import annotations

import numpy as np

from rlplace.compiled import entry, inner, stamp_of
from rlplace.envs.guide import records
from rlplace.envs.guide.records import (
    BINS,
    BUSIEST,
    CHAIN_SENT,
    CHAIN_WAIT,
    CHAIN_WORK,
    CHANNEL,
    OVERFLOW,
    STEP,
    STRICT,
    TIGHT,
    WORK,
    AnalysisTables,
    SimulatedStep,
    View,
)  # fmt: skip

_QUEUE = 8  # tasks that a waiting task is looked for behind


SHARPNESS = (20.0, 200.0)
"""Inverse of the slack, relative to the step, at which work counts half as critical: 5 % and 0.5 %."""


@inner
def tightness(slack, step, way):
    """Returns 1 without slack, falling with it; `way` is TIGHT or STRICT."""
    return 1.0 / (1.0 + SHARPNESS[way] * max(slack, 0.0) / max(step, 1e-30))


@inner
def _totals(f, v, plan, s):
    devices, transfer = len(v.load), s.transfer
    v.load[:] = 0.0
    v.pinned[:] = 0.0
    v.channel[:] = 0.0
    v.total[:] = 0.0
    for g in range(len(plan)):
        v.load[plan[g]] += f.time_s[g, plan[g]]
        v.pinned[plan[g]] += f.pinned_bytes[g]
    for d in range(devices):
        v.peak[d] = s.peak_bytes[d]
        v.total[WORK] += v.load[d]
        v.total[BUSIEST] = max(v.total[BUSIEST], v.load[d])
    for i in range(len(transfer)):
        t = transfer[i]
        v.arrival[t.value * devices + t.destination] = t.end_s
        pair = t.source * devices + t.destination
        for c in range(f.channel_ptr[pair], f.channel_ptr[pair + 1]):
            v.channel[f.channels[c]] += t.end_s - t.start_s
    for c in range(len(v.channel)):
        v.total[CHANNEL] = max(v.total[CHANNEL], v.channel[c])
    v.total[STEP], v.total[OVERFLOW] = s.step_s, s.overflow


@inner
def _slack(f, v, plan, s, by_start):
    # Fields of a tuple cost reference counts wherever they are read, so those that loops read are taken out once.
    devices, start, end, step = len(v.load), s.start_s, s.end_s, s.step_s
    task_group, output_ptr, outputs = f.op_group, f.output_ptr, f.outputs
    consumer_ptr, consumers = f.consumer_ptr, f.consumers
    edge_of, input_ptr, inputs, producer_ptr, producers = f.edge_of, f.input_ptr, f.inputs, f.producer_ptr, f.producers
    arrival, latest_end, before, owner = v.arrival, v.late, v.before, f.tensor_owner
    tight, wait, queue, hurried, gap, margin, least = v.tightness, v.wait, v.queue, v.hurried, v.gap, v.margin, v.slack
    following = np.full(devices, step)
    tight[:] = 0.0
    wait[:] = 0.0
    queue[:] = 0.0
    hurried[:] = 0.0
    gap[:] = np.inf
    margin[:] = np.inf
    least[:] = np.inf
    for i in range(len(start) - 1, -1, -1):
        t = by_start[i]
        g = task_group[t]
        d = plan[g]
        began, ended = start[t], end[t]
        late = min(step, following[d])
        for o in range(output_ptr[t], output_ptr[t + 1]):
            value = outputs[o]
            for c in range(consumer_ptr[value], consumer_ptr[value + 1]):
                reader = consumers[c]
                there = plan[task_group[reader]]
                lag = 0.0
                if there != d and arrival[value * devices + there] >= 0.0:
                    lag = max(arrival[value * devices + there] - ended, 0.0)
                latest = latest_end[reader] - (end[reader] - start[reader])
                late = min(late, latest - lag)
                edge = edge_of[c]
                if edge >= 0:
                    gap[edge] = min(gap[edge], start[reader] - ended)
                    margin[edge] = min(margin[edge], latest - ended)
                    if lag > 0.0:
                        hurried[edge] = max(hurried[edge], lag * tightness(latest - ended - lag, step, STRICT))
        latest_end[t] = late
        following[d] = min(following[d], late - (ended - began))
        tight[g] = max(tight[g], tightness(late - ended, step, TIGHT))
        least[g] = min(least[g], max(late - ended, 0.0))
        ready = 0.0
        for k in range(input_ptr[t], input_ptr[t + 1]):
            value = inputs[k]
            arrived = arrival[value * devices + d]
            if arrived >= 0.0:
                ready = max(ready, arrived)
            else:
                for p in range(producer_ptr[value], producer_ptr[value + 1]):
                    ready = max(ready, end[producers[p]])
        wait[g] += max(began - ready, 0.0)
        previous = before[t]
        if previous >= 0 and end[previous] > ready:
            strict = tightness(late - ended, step, STRICT)
            for _ in range(_QUEUE):
                if previous < 0 or end[previous] <= ready:
                    break
                if task_group[previous] != g:
                    queue[task_group[previous]] += strict * (min(end[previous], began) - max(start[previous], ready))
                previous = before[previous]
    for value in range(len(owner)):
        if owner[value] >= 0:  # a parameter is there from the beginning
            for c in range(consumer_ptr[value], consumer_ptr[value + 1]):
                if edge_of[c] >= 0:
                    edge, reader = edge_of[c], consumers[c]
                    gap[edge] = min(gap[edge], start[reader])
                    margin[edge] = min(margin[edge], latest_end[reader] - (end[reader] - start[reader]))


@inner
def _ready(f, v, end, value, device):
    """Returns the time at which a value is on a device."""
    arrived = v.arrival[value * len(v.load) + device]
    if arrived >= 0.0:
        return arrived
    ready = 0.0
    for p in range(f.producer_ptr[value], f.producer_ptr[value + 1]):
        ready = max(ready, end[f.producers[p]])
    return ready


@inner
def _chain(f, v, plan, s, final):
    """Walks the chain of events that ends the step back to its beginning."""
    devices, start, end = len(v.load), s.start_s, s.end_s
    v.chain[:] = 0.0
    v.saved[:] = 0.0
    v.blocked[:] = 0.0
    v.sent[:] = 0.0
    idlest = np.argsort(v.load)
    t = final
    for _ in range(2 * len(start)):
        g = f.op_group[t]
        d = plan[g]
        v.chain[g] += end[t] - start[t]
        v.total[CHAIN_WORK] += end[t] - start[t]
        ready, cause, through = 0.0, -1, -1
        for k in range(f.input_ptr[t], f.input_ptr[t + 1]):
            value = f.inputs[k]
            at = _ready(f, v, end, value, d)
            if at > ready or through < 0:
                maker, latest = -1, -1.0
                for p in range(f.producer_ptr[value], f.producer_ptr[value + 1]):
                    if end[f.producers[p]] > latest:
                        maker, latest = f.producers[p], end[f.producers[p]]
                ready, cause, through = at, maker, value
        previous = v.before[t]
        if previous >= 0 and end[previous] >= start[t] and start[t] > ready:
            v.total[CHAIN_WAIT] += start[t] - ready
            other = f.op_group[previous]
            if other != g:
                v.blocked[g] += start[t] - ready
                v.blocked[other] += start[t] - ready
                tried = 0
                for i in range(devices):
                    if idlest[i] != d and tried < 2:
                        tried += 1
                        v.saved[g, idlest[i]] += start[t] - ready
                        v.saved[other, idlest[i]] += start[t] - ready
            t = previous
        elif through >= 0 and (cause >= 0 or f.tensor_owner[through] >= 0):
            # A parameter of another device is sent when the step begins; nothing came before it.
            source = f.op_group[cause] if cause >= 0 else f.tensor_owner[through]
            if plan[source] != d:
                delay = max(ready - (end[cause] if cause >= 0 else 0.0), 0.0)
                v.total[CHAIN_SENT] += delay
                v.saved[source, d] += delay
                v.saved[g, plan[source]] += delay
                for c in range(f.consumer_ptr[through], f.consumer_ptr[through + 1]):
                    if f.consumers[c] == t and f.edge_of[c] >= 0:
                        v.sent[f.edge_of[c]] += delay
            if cause < 0:
                return
            t = cause
        else:
            return


@inner
def _fill_windows(f, v, plan, s):
    """Fills the fields of a `View` about work during the tasks of a group: idle, clash and crowd; and urgent."""
    devices, start, end, step = len(v.load), s.start_s, s.end_s, s.step_s
    width = max(step, 1e-30) / BINS
    v.free_bins[:] = 1.0
    v.critical_bins[:] = 0.0
    v.idle[:] = 0.0
    v.clash[:] = 0.0
    v.crowd[:] = 0.0
    v.urgent[:] = 0.0
    for t in range(len(start)):
        d = plan[f.op_group[t]]
        slack = v.late[t] - end[t]
        critical = (tightness(slack, step, TIGHT), tightness(slack, step, STRICT))
        v.urgent[f.op_group[t]] += (end[t] - start[t]) * critical[STRICT]
        low, high = min(int(start[t] / width), BINS - 1), min(int(end[t] / width), BINS - 1)
        for b in range(low, high + 1):
            share = max(min(end[t], (b + 1) * width) - max(start[t], b * width), 0.0) / width
            v.free_bins[d, b] -= share
            for way in range(2):
                v.critical_bins[way, d, b] += share * critical[way]
    for t in range(len(start)):
        g = f.op_group[t]
        low, high = min(int(start[t] / width), BINS - 1), min(int(end[t] / width), BINS - 1)
        share = (end[t] - start[t]) / (high - low + 1)
        for d in range(devices):
            for b in range(low, high + 1):
                v.idle[g, d] += share * max(v.free_bins[d, b], 0.0)
                for way in range(2):
                    v.clash[way, g, d] += share * v.critical_bins[way, d, b]
    for g in range(len(plan)):
        own = f.time_s[g, plan[g]]
        for d in range(devices):
            v.idle[g, d] = v.idle[g, d] / own if own > 0 else 0.0
            for way in range(2):
                v.clash[way, g, d] = v.clash[way, g, d] / own if own > 0 else 0.0
                if d != plan[g]:
                    v.crowd[way, g] += v.clash[way, g, d]


@inner
def _fill_sharing(f, v, plan):
    """Fills the shares of readers of the same tensors on one device, where a value is sent once."""
    devices = len(v.load)
    v.shared[:] = 0.0
    v.part[:] = 1.0
    readers = np.zeros(devices)
    for t in range(len(f.reader_ptr) - 1):
        readers[:] = 0.0
        for i in range(f.reader_ptr[t], f.reader_ptr[t + 1]):
            readers[plan[f.reader_group[i]]] += 1.0
        for i in range(f.reader_ptr[t], f.reader_ptr[t + 1]):
            edge, here, share = f.reader_edge[i], plan[f.reader_group[i]], f.reader_share[i]
            v.part[edge] -= share * (1.0 - 1.0 / readers[here])
            for d in range(devices):
                if readers[d] > (1.0 if d == here else 0.0):
                    v.shared[edge, d] += share


def _compile(stamp):
    @entry
    def analyse(facts, view, plan, step):
        """Fills a view.

        Args:
            facts, view, step: `AnalysisTables`, `View` and `SimulatedStep` as plain tuples.
            plan: int32 [G], device of each group.
        """
        _ = stamp
        f, v, s = AnalysisTables(*facts), View(*view), SimulatedStep(*step)
        end, devices = s.end_s, len(v.load)
        _totals(f, v, plan, s)
        by_start = np.argsort(s.start_s)
        last = v.before  # of the device, by task; the task that the device ran before
        latest = np.full(devices, -1, dtype=np.int64)
        final = 0
        for i in range(len(end)):
            t = by_start[i]
            d = plan[f.op_group[t]]
            last[t] = latest[d]
            latest[d] = t
            if end[t] > end[final]:
                final = t
        _slack(f, v, plan, s, by_start)
        _fill_windows(f, v, plan, s)
        _chain(f, v, plan, s, final)
        _fill_sharing(f, v, plan)
        for i in range(len(s.transfer)):
            v.arrival[s.transfer[i].value * devices + s.transfer[i].destination] = -1.0

    return analyse


analyse = _compile(stamp_of(records))
