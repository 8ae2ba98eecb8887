"""What the timeline of a plan says about where it could be better, compiled.

All tasks of the step are looked at, those of every micro-batch. Axes as in `rlplace.envs.guide.facts`.
"""

# Compiled functions take their types from their arguments.
# mypy: disable-error-code="no-untyped-def, assignment"
from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from rlplace.envs.guide import facts
from rlplace.envs.guide.facts import Facts, stamp_of

KERNEL = {"cache": True, "error_model": "numpy", "no_cfunc_wrapper": True}
BINS = 64
_QUEUE = 8  # tasks that a waiting task is looked for behind

# Entries of `View.total`.
STEP, BUSIEST, WORK, CHANNEL, CHAIN_WORK, CHAIN_WAIT, CHAIN_SENT, OVERFLOW = range(8)


class View(NamedTuple):
    """A plan, looked at; buffers that `analyse` fills. Seconds unless said otherwise."""

    load: Any  # float64 [D], work on each device
    peak: Any  # float64 [D] bytes
    pinned: Any  # float64 [D] provable bytes
    channel: Any  # float64 [C], how long each channel is held
    idle: Any  # float64 [G, D], share of the time of a group's tasks in which a device idles
    tightness: Any  # float64 [G], 1 where a delay would lengthen the step, falling with slack
    clash: Any  # float64 [G, D], share of the time of a group's tasks in which a device runs work without slack
    crowd: Any  # float64 [G], devices that run work without slack during the group's tasks, its own left out
    strict_clash: Any  # float64 [G, D], like `clash`, counting less slack
    strict_crowd: Any  # float64 [G], like `crowd`, counting less slack
    urgent: Any  # float64 [G], time of the group's tasks that have no slack
    queue: Any  # float64 [G], how long tasks without slack wait for the device while the group runs
    slack: Any  # float64 [G], least slack of the group's tasks
    wait: Any  # float64 [G], how long tasks waited for their device
    chain: Any  # float64 [G], time of the group's tasks on the critical chain
    saved: Any  # float64 [G, D], delays on the critical chain that the group would take away on the device
    blocked: Any  # float64 [G], waits for devices on the critical chain, of the group or behind it
    margin: Any  # float64 [M], least time between the end of a producer and the latest start of its consumer
    gap: Any  # float64 [M], least time between the end of a producer and the start of its consumer
    sent: Any  # float64 [M], transfer time on the critical chain
    hurried: Any  # float64 [M], longest transfer without slack
    shared: Any  # float64 [M, D], share of the bytes that other readers bring to a device anyway
    part: Any  # float64 [M], share of the bytes when those that are sent for several readers are divided among them
    total: Any  # float64 [8], see STEP to OVERFLOW
    arrival: Any  # float64 [V * D], buffer, -1 everywhere between calls
    late: Any  # float64 [K], buffer
    before: Any  # int64 [K], buffer
    bins: Any  # float64 [D, BINS], buffer
    tight_bins: Any  # float64 [D, BINS], buffer
    strict_bins: Any  # float64 [D, BINS], buffer


def make_view(facts: Facts, num_channels: int) -> View:
    """Buffers for an instance."""
    groups, devices = facts.group_s.shape
    tasks, values, edges = len(facts.task_group), len(facts.consumer_ptr) - 1, len(facts.edge_bytes)
    return View(
        load=np.zeros(devices), peak=np.zeros(devices), pinned=np.zeros(devices), channel=np.zeros(max(num_channels, 1)),
        idle=np.zeros((groups, devices)), tightness=np.zeros(groups), clash=np.zeros((groups, devices)), crowd=np.zeros(groups), strict_clash=np.zeros((groups, devices)),
        strict_crowd=np.zeros(groups), urgent=np.zeros(groups), queue=np.zeros(groups),        slack=np.zeros(groups), wait=np.zeros(groups), chain=np.zeros(groups),
        saved=np.zeros((groups, devices)), blocked=np.zeros(groups), margin=np.zeros(edges), gap=np.zeros(edges), sent=np.zeros(edges), hurried=np.zeros(edges), shared=np.zeros((edges, devices)),
        part=np.ones(edges), total=np.zeros(8),
        arrival=np.full(values * devices, -1.0), late=np.zeros(tasks), before=np.zeros(tasks, dtype=np.int64),
        bins=np.zeros((devices, BINS)), tight_bins=np.zeros((devices, BINS)), strict_bins=np.zeros((devices, BINS)),
    )  # fmt: skip


INNER = {"error_model": "numpy", "no_cfunc_wrapper": True, "no_cpython_wrapper": True}


@njit(**INNER)
def _totals(f, v, plan, transfer, peak, step, overflow):
    devices = len(v.load)
    v.load[:] = 0.0
    v.pinned[:] = 0.0
    v.channel[:] = 0.0
    v.total[:] = 0.0
    for g in range(len(plan)):
        v.load[plan[g]] += f.group_s[g, plan[g]]
        v.pinned[plan[g]] += f.pinned[g]
    for d in range(devices):
        v.peak[d] = peak[d]
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
    v.total[STEP], v.total[OVERFLOW] = step, overflow


@njit(**INNER)
def _idleness(f, v, plan, start, end, step):
    devices = len(v.load)
    width = max(step, 1e-30) / BINS
    v.bins[:] = 1.0
    v.tight_bins[:] = 0.0
    v.strict_bins[:] = 0.0
    v.idle[:] = 0.0
    v.clash[:] = 0.0
    v.crowd[:] = 0.0
    v.strict_clash[:] = 0.0
    v.strict_crowd[:] = 0.0
    v.urgent[:] = 0.0
    for t in range(len(start)):
        d = plan[f.task_group[t]]
        tight, strict = _tightness(v.late[t] - end[t], step, 20.0), _tightness(v.late[t] - end[t], step, 200.0)
        v.urgent[f.task_group[t]] += (end[t] - start[t]) * strict
        low, high = min(int(start[t] / width), BINS - 1), min(int(end[t] / width), BINS - 1)
        for b in range(low, high + 1):
            share = max(min(end[t], (b + 1) * width) - max(start[t], b * width), 0.0) / width
            v.bins[d, b] -= share
            v.tight_bins[d, b] += share * tight
            v.strict_bins[d, b] += share * strict
    for t in range(len(start)):
        g = f.task_group[t]
        low, high = min(int(start[t] / width), BINS - 1), min(int(end[t] / width), BINS - 1)
        share = (end[t] - start[t]) / (high - low + 1)
        for d in range(devices):
            for b in range(low, high + 1):
                v.idle[g, d] += share * max(v.bins[d, b], 0.0)
                v.clash[g, d] += share * v.tight_bins[d, b]
                v.strict_clash[g, d] += share * v.strict_bins[d, b]
    for g in range(len(plan)):
        own = f.group_s[g, plan[g]]
        for d in range(devices):
            v.idle[g, d] = v.idle[g, d] / own if own > 0 else 0.0
            v.clash[g, d] = v.clash[g, d] / own if own > 0 else 0.0
            v.strict_clash[g, d] = v.strict_clash[g, d] / own if own > 0 else 0.0
            if d != plan[g]:
                v.crowd[g] += v.clash[g, d]
                v.strict_crowd[g] += v.strict_clash[g, d]


@njit(**INNER)
def _tightness(slack, step, sharpness):
    """1 without slack, falling with it."""
    return 1.0 / (1.0 + sharpness * max(slack, 0.0) / max(step, 1e-30))


@njit(**INNER)
def _slack(f, v, plan, start, end, step, by_start):
    devices = len(v.load)
    following = np.full(devices, step)
    v.tightness[:] = 0.0
    v.wait[:] = 0.0
    v.queue[:] = 0.0
    v.hurried[:] = 0.0
    v.gap[:] = np.inf
    v.margin[:] = np.inf
    v.slack[:] = np.inf
    for i in range(len(start) - 1, -1, -1):
        t = by_start[i]
        g = f.task_group[t]
        d = plan[g]
        late = min(step, following[d])
        for o in range(f.output_ptr[t], f.output_ptr[t + 1]):
            value = f.outputs[o]
            for c in range(f.consumer_ptr[value], f.consumer_ptr[value + 1]):
                reader = f.consumers[c]
                there = plan[f.task_group[reader]]
                lag = 0.0
                if there != d and v.arrival[value * devices + there] >= 0.0:
                    lag = max(v.arrival[value * devices + there] - end[t], 0.0)
                late = min(late, v.late[reader] - (end[reader] - start[reader]) - lag)
                edge = f.edge_of[c]
                if edge >= 0:
                    v.gap[edge] = min(v.gap[edge], start[reader] - end[t])
                    latest = v.late[reader] - (end[reader] - start[reader])
                    v.margin[edge] = min(v.margin[edge], latest - end[t])
                    v.hurried[edge] = max(v.hurried[edge], lag * _tightness(latest - end[t] - lag, step, 200.0))
        v.late[t] = late
        following[d] = min(following[d], late - (end[t] - start[t]))
        v.tightness[g] = max(v.tightness[g], _tightness(late - end[t], step, 20.0))
        v.slack[g] = min(v.slack[g], max(late - end[t], 0.0))
        ready = 0.0
        for k in range(f.input_ptr[t], f.input_ptr[t + 1]):
            ready = max(ready, _ready(f, v, plan, end, f.inputs[k], d))
        v.wait[g] += max(start[t] - ready, 0.0)
        strict, previous = _tightness(late - end[t], step, 200.0), v.before[t]
        for _ in range(_QUEUE):
            if previous < 0 or end[previous] <= ready:
                break
            if f.task_group[previous] != g:
                v.queue[f.task_group[previous]] += strict * (min(end[previous], start[t]) - max(start[previous], ready))
            previous = v.before[previous]
    for value in range(len(f.owner)):
        if f.owner[value] >= 0:  # a parameter is there from the beginning
            for c in range(f.consumer_ptr[value], f.consumer_ptr[value + 1]):
                if f.edge_of[c] >= 0:
                    edge, reader = f.edge_of[c], f.consumers[c]
                    v.gap[edge] = min(v.gap[edge], start[reader])
                    v.margin[edge] = min(v.margin[edge], v.late[reader] - (end[reader] - start[reader]))


@njit(**INNER)
def _ready(f, v, plan, end, value, device):
    """When a value is on a device."""
    arrived = v.arrival[value * len(v.load) + device]
    if arrived >= 0.0:
        return arrived
    made = 0.0
    for p in range(f.producer_ptr[value], f.producer_ptr[value + 1]):
        made = max(made, end[f.producers[p]])
    return made


@njit(**INNER)
def _sharing(f, v, plan):
    """What readers of the same tensors on the same device share: a value is sent there once."""
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


@njit(**INNER)
def _chain(f, v, plan, start, end, final, limit):
    """Walks the chain of events that ends the step back to its beginning."""
    devices = len(v.load)
    v.chain[:] = 0.0
    v.saved[:] = 0.0
    v.blocked[:] = 0.0
    v.sent[:] = 0.0
    idlest = np.argsort(v.load)
    t = final
    for _ in range(2 * limit):
        g = f.task_group[t]
        d = plan[g]
        v.chain[g] += end[t] - start[t]
        v.total[CHAIN_WORK] += end[t] - start[t]
        ready, cause, through = 0.0, -1, -1
        for k in range(f.input_ptr[t], f.input_ptr[t + 1]):
            value = f.inputs[k]
            at = _ready(f, v, plan, end, value, d)
            if at > ready or through < 0:
                maker, made = -1, -1.0
                for p in range(f.producer_ptr[value], f.producer_ptr[value + 1]):
                    if end[f.producers[p]] > made:
                        maker, made = f.producers[p], end[f.producers[p]]
                ready, cause, through = at, maker, value
        previous = v.before[t]
        if previous >= 0 and end[previous] >= start[t] and start[t] > ready:
            v.total[CHAIN_WAIT] += start[t] - ready
            other = f.task_group[previous]
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
        elif through >= 0 and (cause >= 0 or f.owner[through] >= 0):
            # A parameter of another device is sent when the step begins; nothing came before it.
            source = f.task_group[cause] if cause >= 0 else f.owner[through]
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


def _compile(stamp):
    @njit(**KERNEL)
    def analyse(facts, view, plan, start, end, transfer, peak, step, overflow):
        """Fills a view.

        Args:
            facts, view: `Facts` and `View` as plain tuples.
            plan: int32 [G].
            start, end: float64 [K], of every task.
            transfer: Records of `rlplace.simulator.records.TRANSFER`, those of this step.
            peak: int64 [D] bytes.
            step: Step time.
            overflow: Relative memory overflow.
        """
        _ = stamp
        f, v = Facts(*facts), View(*view)
        devices, tasks = len(v.load), len(start)
        _totals(f, v, plan, transfer, peak, step, overflow)
        by_start = np.argsort(start)
        last = v.before  # of the device, by task; the task that the device ran before
        latest = np.full(devices, -1, dtype=np.int64)
        final = 0
        for i in range(tasks):
            t = by_start[i]
            d = plan[f.task_group[t]]
            last[t] = latest[d]
            latest[d] = t
            if end[t] > end[final]:
                final = t
        _slack(f, v, plan, start, end, step, by_start)
        _idleness(f, v, plan, start, end, step)
        _chain(f, v, plan, start, end, final, tasks)
        _sharing(f, v, plan)
        for i in range(len(transfer)):
            v.arrival[transfer[i].value * devices + transfer[i].destination] = -1.0

    return analyse


analyse = _compile(stamp_of(facts))
