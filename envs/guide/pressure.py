"""What else happens at the same time, and what is sent anyway: whether a move would clash, or gain nothing.

A move to a device that runs critical work at that time delays the step; shortening one of several critical chains does not
shorten it; a value that others read on a device is there for every reader.
"""

# Compiled functions take their types from their arguments.
# mypy: disable-error-code="no-untyped-def, assignment"
from __future__ import annotations

import numpy as np
from numba import njit

from rlplace.envs.guide.facts import INNER

BINS = 64
"""Parts that the step is divided into."""

TIGHT, STRICT = 20.0, 200.0
"""How fast work with slack stops counting as critical: half at 5 % and at 0.5 % of the step."""


@njit(**INNER)
def tightness(slack, step, sharpness):
    """1 without slack, falling with it, the faster the greater the sharpness."""
    return 1.0 / (1.0 + sharpness * max(slack, 0.0) / max(step, 1e-30))


@njit(**INNER)
def fill_windows(f, v, plan, start, end, step):
    """Fills what of a `View` asks who runs during the tasks of a group: idle to strict_crowd, and urgent."""
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
        tight, strict = tightness(v.late[t] - end[t], step, TIGHT), tightness(v.late[t] - end[t], step, STRICT)
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
def fill_sharing(f, v, plan):
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
