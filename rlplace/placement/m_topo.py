"""m-TOPO: devices filled in topological order up to an equal share of memory.

Problem: fit a model into memory, nothing else. A device's cap is the total footprint divided by the number of devices plus the
largest group; when it is reached, the next device goes on.

Paper: Jeon et al., "Baechi: fast device placement of machine learning graphs", SoCC 2020, algorithm m-TOPO.

Departures: footprints (resident bytes plus saved activations) stand for Baechi's replay of allocations; with unlike memory
the shares follow the limits; groups may end on another device when they may not sit on theirs.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rlplace.placement.common.evaluate import Assignment
from rlplace.placement.common.floor import device_subsets
from rlplace.placement.common.groupgraph import group_graph
from rlplace.problem import Problem


def candidates(problem: Problem, seed: int) -> Iterator[Assignment]:
    """Yields one assignment per number of devices."""
    del seed
    graph = group_graph(problem)
    size = graph.footprint_bytes.astype(np.float64)
    for subset in reversed(device_subsets(problem)):
        limits = problem.memory_limit_bytes[subset]
        share = (
            limits / limits.sum() if np.isfinite(limits).all() and limits.sum() > 0 else np.full(len(subset), 1 / len(subset))
        )
        cap = size.sum() * share + size.max(initial=0.0)
        devices = np.empty(problem.num_groups, dtype=np.int32)
        at, used = 0, 0.0
        for group in graph.order:
            if used + size[group] > cap[at] and at + 1 < len(subset):
                at, used = at + 1, 0.0
            used += size[group]
            devices[group] = subset[at]
        yield devices
