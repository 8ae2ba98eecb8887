"""Random changes of an assignment, shared by the search planners.

Kinds, with their share of the draws:
    neighbor 32 %  one group joins the device of a group it exchanges tensors with
    single   18 %  one group goes to a random device
    swap     12 %  two groups on different devices change places
    segment  28 %  consecutive groups of the depth-first order go to one device, mostly that of the group before or after them
    cluster  10 %  a group and some of its neighbors on the same device move together
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlplace.planners.common.evaluate import Assignment
from rlplace.planners.common.groupgraph import group_graph
from rlplace.planners.common.movekernels import CLUSTER, Tables, draw
from rlplace.problem import Problem


class MoveMaker:
    """Draws random moves for one problem; a move is a list of (group, device).

    Attributes:
        tables: What moves are drawn from.
        state: uint64 [1], of the random numbers.
        groups: int32 [max(G, CLUSTER)], the groups of the last move; longer than it.
        targets: int32, likewise, their devices.
    """

    def __init__(self, problem: Problem, seed: int) -> None:
        graph = group_graph(problem)
        may = problem.group_allowed
        rows, devices = np.nonzero(may)
        self.tables = Tables(
            may=may,
            allowed_ptr=np.searchsorted(rows, np.arange(problem.num_groups + 1)).astype(np.int64),
            allowed=devices.astype(np.int32),
            movable=np.flatnonzero(may.sum(axis=1) > 1).astype(np.int32),
            neighbor_ptr=graph.neighbor_ptr,
            neighbor=graph.neighbor,
            order=graph.depth_first_order,
            position=np.argsort(graph.depth_first_order),
        )
        self.state = np.array([seed & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64)
        self.groups: NDArray[np.int32] = np.zeros(max(problem.num_groups, CLUSTER), dtype=np.int32)
        self.targets = self.groups.copy()
        self._arguments = tuple(self.tables), self.state

    @property
    def movable(self) -> bool:
        """Whether any group may sit on more than one device."""
        return len(self.tables.movable) > 0

    def draw(self, devices: Assignment) -> list[tuple[int, int]]:
        """A move that changes `devices` int32 [G]; empty when the draw came to nothing."""
        count = draw(*self._arguments, devices, self.groups, self.targets)
        return list(zip(self.groups[:count].tolist(), self.targets[:count].tolist(), strict=True))
