"""Compiled dynamic programmes of the PipeDream planner over states (`rlplace.planners.pipedream.stages`)."""

# Compiled functions take their types from their arguments.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import numpy as np

from rlplace.compiled import entry


@entry
def straight(inside, time_s, crossing, resident, stash, inverse, limit, flight, best, origin):
    """Fills `best` and `origin` [W + 1, S]: the first workers have the layers of a state, one stage each.

    ``best[k, t] = min over s inside t of max(best[k - 1, s], time of t without s on worker k, crossing of s / bandwidth)``.
    A worker may stay without layers. `inverse` [W] is of the link to the worker before.
    """
    workers, states = time_s.shape
    best[:] = np.inf
    best[0, 0] = 0.0
    for k in range(workers):
        for t in range(states):
            for s in range(t + 1):
                before = best[k, s]
                if before >= best[k + 1, t] or not inside[s, t]:
                    continue
                if s < t:
                    if resident[t] - resident[s] + flight[k] * (stash[t] - stash[s]) > limit[k]:
                        continue
                    before = max(before, time_s[k, t] - time_s[k, s])
                    if s > 0:
                        before = max(before, crossing[s] * inverse[k])
                if before < best[k + 1, t]:
                    best[k + 1, t] = before
                    origin[k + 1, t] = s


@entry
def replicated_kernel(inside, base, weight, kept, crossing, inverse, limit, every_start, best, origin, copies):
    """Fills `best`, `origin`, `copies` [S, S, M + 1]: layers between two states on at most so many machines.

    ``best[i, j, m] = min over k between i and j and r < m of max(best[i, k, m - r], stage(k, j, r), crossing of k / (B r))``,
    or one stage of m copies; ``stage(k, j, r) = (base + 4 (r - 1) weight / (B r)) / r``. `base` [S, S] is the time of one copy,
    `inverse` 1 / B. A stage must hold `kept` bytes [S] (weights and activations) for each micro-batch that the machines from
    it on have in flight, shared by its copies. `origin` is -1 for one stage; `copies` 0: a machine less does as well.
    """
    states, machines = len(weight), best.shape[2] - 1
    best[:] = np.inf
    for m in range(1, machines + 1):
        for i in range(states if every_start else 1):
            for j in range(i + 1, states):
                if not inside[i, j]:
                    continue
                found, where, count = best[i, j, m - 1], -1, 0
                for r in range(1, m + 1):
                    before = machines - (m - r)
                    depth = (before + r - 1) // r
                    for k in range(i, j) if r < m else range(i, i + 1):
                        if not inside[i, k] or not inside[k, j] or (r < m and k == i):
                            continue
                        if depth * (kept[j] - kept[k]) > limit:
                            continue
                        seconds = (base[k, j] + 4.0 * (r - 1) * (weight[j] - weight[k]) * inverse / r) / r
                        if r < m:
                            seconds = max(max(seconds, best[i, k, m - r]), crossing[k] * inverse / r)
                        if seconds < found:
                            found, where, count = seconds, (k if r < m else -1), r
                best[i, j, m], origin[i, j, m], copies[i, j, m] = found, where, count
