"""Groups assigned to devices in turn, in topological order: a plan that balances counts and ignores traffic."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rlplace.placement.common.evaluate import Assignment
from rlplace.placement.common.groupgraph import group_graph
from rlplace.problem import Problem


def candidates(problem: Problem, seed: int) -> Iterator[Assignment]:
    """Yields the one assignment."""
    del seed
    devices = np.empty(problem.num_groups, dtype=np.int32)
    devices[group_graph(problem).order] = np.arange(problem.num_groups) % problem.num_devices
    yield devices
