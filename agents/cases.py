"""A `Case`: a problem that the agent is trained, tuned or tested on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlplace.problem import Problem
from rlplace.simulator import default_priority

BRANCHY = 1.5
"""A graph whose work is at least this many times its critical path is branchy."""


@dataclass(frozen=True, eq=False)
class Case:
    """One instance.

    Attributes:
        name: Name, unique in its set.
        family: Model family, such as ``zoo:dlrm`` or ``synthetic:layered``.
        problem: The priced graph.
        branchy: Whether the graph offers parallel work, see `is_branchy`.
        unseen_cluster: The cluster has a size, a kind of device or a topology that training never draws, see
            `rlplace.agents.problems.graphs`.
    """

    name: str
    family: str
    problem: Problem
    branchy: bool = False
    unseen_cluster: bool = False


def is_branchy(problem: Problem) -> bool:
    """Returns whether the mean work is at least `BRANCHY` times its critical path without communication."""
    work = float(np.nanmean(problem.time_s, axis=1).sum())
    return work >= BRANCHY * float(default_priority(problem).max())
