"""The best of a number of random feasible plans, a baseline that every planner should beat.

Half of the samples give every group a device of its own choice, half cut the topological order at random places, because
scattered groups drown in transfers. A random number of devices is used. Samples that do not fit are repaired only when no
other one fits.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rlplace.errors import InputError
from rlplace.placement.common.evaluate import Assignment
from rlplace.placement.common.groupgraph import group_graph
from rlplace.problem import Problem


def candidates(problem: Problem, seed: int, *, samples: int = 64) -> Iterator[Assignment]:
    """Random assignments, scattered and contiguous in turn."""
    if samples < 1:
        raise InputError(f"random: samples must be at least 1, found {samples}")
    rng = np.random.default_rng(seed)
    order = group_graph(problem).order
    for index in range(samples):
        used = rng.permutation(problem.num_devices)[: rng.integers(1, problem.num_devices + 1)]
        if index % 2 == 0:
            choice = rng.integers(0, len(used), problem.num_groups)
        else:
            cuts = np.sort(rng.integers(0, problem.num_groups + 1, len(used) - 1))
            choice = np.empty(problem.num_groups, dtype=np.int64)
            choice[order] = np.searchsorted(cuts, np.arange(problem.num_groups), side="right")
        devices: Assignment = used[choice].astype(np.int32)
        # A sample stays random where a group may not sit on its device.
        for group in np.flatnonzero(~problem.group_allowed[np.arange(problem.num_groups), devices]):
            devices[group] = rng.choice(np.flatnonzero(problem.group_allowed[group]))
        yield devices
