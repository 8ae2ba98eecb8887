"""Stages: vertices that may not part, their order, and assignments that follow it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InfeasibleError
from rlplace.planners.common.groupgraph import group_graph
from rlplace.planners.compiler.nets import Level, forward_pairs
from rlplace.problem import Problem
from rlplace.problem.order import strong_components, topological_order


def staged_order(problem: Problem) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Vertices for stages: groups whose forward ops feed each other in a circle are one, as tied weights make them.

    Returns:
        int32 [G], vertex of every group, numbered so that forward ops read from vertices of lower number; and int32 [G], groups
        in order of their vertices.
    """
    groups, order = problem.num_groups, group_graph(problem).order
    a, b = forward_pairs(problem)
    part = strong_components(groups, a, b)
    first = {circle: i for i, circle in enumerate(dict.fromkeys(part[order].tolist()))}  # by first member
    number = np.array([first[circle] for circle in part.tolist()], dtype=np.int64)
    apart = number[a] != number[b]
    ranked, _ = topological_order(number[a][apart], number[b][apart], len(first))
    vertex = np.argsort(ranked).astype(np.int32)[number]
    return vertex, order[np.argsort(vertex[order], kind="stable")]


def in_order(level: Level, part: NDArray[np.int32], names: Sequence[str]) -> NDArray[np.int32]:
    """The stages nearest to `part` that respect null times and the order of stages.

    Args:
        level: The graph, vertices in topological order.
        part: int32 [G], stages wished for.
        names: Names of the devices, in order of the stages.

    Raises:
        InfeasibleError: A vertex must sit on an earlier stage than one that feeds it.
    """
    allowed = np.isfinite(level.time_s)
    count, stages = allowed.shape
    latest = np.full(count, stages - 1)
    for v in range(count - 1, -1, -1):
        after = level.after[level.after_ptr[v] : level.after_ptr[v + 1]]
        top = int(latest[after].min(initial=stages - 1))
        possible = np.flatnonzero(allowed[v, : top + 1])
        if len(possible) == 0:
            raise InfeasibleError(
                f"stages: what follows a group must run on {names[top]} or before it, where the group cannot run; order the "
                "devices differently, or leave stages out"
            )
        latest[v] = possible[-1]
    stage = part.copy()
    for v in range(count):
        before = level.before[level.before_ptr[v] : level.before_ptr[v + 1]]
        low = int(stage[before].max(initial=0))
        possible = low + np.flatnonzero(allowed[v, low : latest[v] + 1])
        stage[v] = possible[np.abs(possible - part[v]).argmin()]
    return stage
