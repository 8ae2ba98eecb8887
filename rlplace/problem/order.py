"""Walking directed graphs given as arrays of edges: successor lists and Kahn's algorithm."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def successor_lists(source: NDArray[Any], target: NDArray[Any], count: int) -> tuple[list[int], list[int]]:
    """Successors of all nodes as (`following`, `starts`): those of node i are ``following[starts[i] : starts[i + 1]]``.

    Args:
        source: Integer [E], where each edge starts.
        target: Integer [E], where it ends; the successors of a node keep the order of its edges.
        count: Number of nodes.
    """
    by_source = np.argsort(source, kind="stable")
    return target[by_source].tolist(), np.searchsorted(source[by_source], np.arange(count + 1)).tolist()


def topological_order(source: NDArray[Any], target: NDArray[Any], count: int) -> tuple[list[int], int | None]:
    """Kahn's algorithm; ready nodes leave in order of discovery, so the result is deterministic.

    Args:
        source: Integer [E], where each edge starts.
        target: Integer [E], where it ends.
        count: Number of nodes.

    Returns:
        The nodes that could be ordered, and the first node that waits on a cycle, or None.
    """
    following, starts = successor_lists(source, target, count)
    missing = np.bincount(target, minlength=count).tolist()
    order = [node for node in range(count) if missing[node] == 0]
    for node in order:  # grows while it is read
        for successor in following[starts[node] : starts[node + 1]]:
            missing[successor] -= 1
            if missing[successor] == 0:
                order.append(successor)
    return order, None if len(order) == count else next(node for node in range(count) if missing[node] > 0)
