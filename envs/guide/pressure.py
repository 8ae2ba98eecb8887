"""Work at the same time and transfers that happen anyway: whether a move would clash, or gain nothing.

A move to a device that runs critical work at that time delays the step; shortening one of several critical chains does not
shorten it; a value that others read on a device is there for every reader.
"""

# Compiled functions take their types from their arguments.
# mypy: disable-error-code="no-untyped-def, assignment"
from __future__ import annotations

import numpy as np

from rlplace.compiled import inner

BINS = 64
"""Parts that the step is divided into."""

TIGHT, STRICT = range(2)
"""Two ways to call work critical, first axis of what is counted by them; see `SHARPNESS`."""

SHARPNESS = (20.0, 200.0)
"""Inverse of the slack, relative to the step, at which work counts half as critical: 5 % and 0.5 %."""


@inner
def tightness(slack, step, way):
    """1 without slack, falling with it; `way` is TIGHT or STRICT."""
    return 1.0 / (1.0 + SHARPNESS[way] * max(slack, 0.0) / max(step, 1e-30))


@inner
def fill_windows(f, v, plan, start, end, step):
    """Fills the fields of a `View` about work during the tasks of a group: idle, clash and crowd; and urgent."""
    devices = len(v.load)
    width = max(step, 1e-30) / BINS
    v.free_bins[:] = 1.0
    v.critical_bins[:] = 0.0
    v.idle[:] = 0.0
    v.clash[:] = 0.0
    v.crowd[:] = 0.0
    v.urgent[:] = 0.0
    for t in range(len(start)):
        d = plan[f.task_group[t]]
        slack = v.late[t] - end[t]
        critical = (tightness(slack, step, TIGHT), tightness(slack, step, STRICT))
        v.urgent[f.task_group[t]] += (end[t] - start[t]) * critical[STRICT]
        low, high = min(int(start[t] / width), BINS - 1), min(int(end[t] / width), BINS - 1)
        for b in range(low, high + 1):
            share = max(min(end[t], (b + 1) * width) - max(start[t], b * width), 0.0) / width
            v.free_bins[d, b] -= share
            for way in range(2):
                v.critical_bins[way, d, b] += share * critical[way]
    for t in range(len(start)):
        g = f.task_group[t]
        low, high = min(int(start[t] / width), BINS - 1), min(int(end[t] / width), BINS - 1)
        share = (end[t] - start[t]) / (high - low + 1)
        for d in range(devices):
            for b in range(low, high + 1):
                v.idle[g, d] += share * max(v.free_bins[d, b], 0.0)
                for way in range(2):
                    v.clash[way, g, d] += share * v.critical_bins[way, d, b]
    for g in range(len(plan)):
        own = f.group_s[g, plan[g]]
        for d in range(devices):
            v.idle[g, d] = v.idle[g, d] / own if own > 0 else 0.0
            for way in range(2):
                v.clash[way, g, d] = v.clash[way, g, d] / own if own > 0 else 0.0
                if d != plan[g]:
                    v.crowd[way, g] += v.clash[way, g, d]


@inner
def fill_sharing(f, v, plan):
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
