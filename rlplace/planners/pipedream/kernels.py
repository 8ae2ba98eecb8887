"""Compiled dynamic programme of the PipeDream planner over states (`rlplace.planners.pipedream.stages`)."""

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
