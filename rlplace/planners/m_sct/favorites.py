"""Favorite children: which consumer of an op should run right after it on the same device.

A linear program relaxes the schedule of a task graph on enough devices (Hanen, Munier, 1995): ``x`` of an edge is 0 when the
consumer is its producer's favorite child, whose input then need not travel, and 1 when it is not.

    minimize w
    start_i + time_i + transfer_ij * x_ij <= start_j      for every edge
    start_i + time_i                      <= w            for every op
    sum over the consumers j of i of x_ij >= consumers - 1  (at most one favorite child)
    sum over the producers i of j of x_ij >= producers - 1  (favorite of at most one)

An optimum leaves x open on edges that do not delay the end; there the solver's vertex decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

THRESHOLD = 0.5
"""Edges with x up to this are favorites."""


@dataclass(frozen=True, eq=False)
class Favorites:
    """Solution of the linear program.

    Attributes:
        child: int32 [N], favorite child of every node, -1 for none.
        makespan: Length of the relaxed schedule, in the unit of the times.
        x: float64 [E], relaxed values of the edges.
    """

    child: NDArray[np.int32]
    makespan: float
    x: NDArray[np.float64]


def favorite_children(
    time: NDArray[np.float64],
    source: NDArray[np.int32],
    target: NDArray[np.int32],
    transfer: NDArray[np.float64],
    *,
    bound: NDArray[np.bool_] | None = None,
    threshold: float = THRESHOLD,
    time_limit_s: float | None = None,
) -> Favorites | None:
    """Solves the program with HiGHS and rounds it.

    Args:
        time: float64 [N], of every node.
        source: int32 [E], where the edges of an acyclic graph begin; no two edges have both ends in common.
        target: int32 [E], where they end.
        transfer: float64 [E], when the ends sit apart, in the same unit.
        bound: bool [E], edges whose ends share a device anyway: no transfer, and no favorites.
        threshold: Edges with x up to this are favorites; of several the last one holds.
        time_limit_s: For the solver.

    Returns:
        The favorites, or None when the solver ran out of time.
    """
    if time_limit_s is not None and time_limit_s <= 0.0:  # HiGHS takes 0 for no limit
        return None
    if bound is None:
        bound = np.zeros(len(source), dtype=bool)
    x, makespan = _solve(time, source, target, np.where(bound, 0.0, transfer), ~bound, time_limit_s)
    if x is None:
        return None
    return Favorites(_round(len(time), source, target, x, ~bound & (x <= threshold + 1e-9)), makespan, x)


def _solve(
    time: NDArray[np.float64],
    source: NDArray[np.int32],
    target: NDArray[np.int32],
    transfer: NDArray[np.float64],
    free: NDArray[np.bool_],
    time_limit_s: float | None,
) -> tuple[NDArray[np.float64] | None, float]:
    """Values of the edges and the makespan; variables are x [E], start [N] and w."""
    from scipy.optimize import linprog
    from scipy.sparse import csr_matrix

    nodes, edges = len(time), len(source)
    # The solver works with absolute tolerances: make times of order 1.
    scale = float(np.mean(time)) or float(np.mean(transfer)) if edges else float(np.mean(time))
    scale = scale if scale > 0 else 1.0
    edge, node = np.arange(edges), np.arange(nodes)
    rows: list[NDArray[Any]] = [edge, edge, edge, edges + node, edges + node]
    columns: list[NDArray[Any]] = [edge, edges + source, edges + target, edges + node, np.full(nodes, edges + nodes)]
    values: list[NDArray[Any]] = [transfer / scale, np.ones(edges), -np.ones(edges), np.ones(nodes), -np.ones(nodes)]
    right: list[NDArray[Any]] = [-time[source] / scale, -time / scale]
    height = edges + nodes
    for end in (source, target):
        degree = np.bincount(end[free], minlength=nodes)
        several = np.flatnonzero(degree > 1)
        row = np.full(nodes, -1)
        row[several] = height + np.arange(len(several))
        counted = np.flatnonzero(free & (row[end] >= 0))
        rows.append(row[end[counted]])
        columns.append(counted)
        values.append(-np.ones(len(counted)))
        right.append(1.0 - degree[several])
        height += len(several)
    matrix = csr_matrix(
        (np.concatenate(values), (np.concatenate(rows), np.concatenate(columns))), shape=(height, edges + nodes + 1)
    )
    cost = np.zeros(edges + nodes + 1)
    cost[-1] = 1.0
    upper = np.full(edges + nodes + 1, np.inf)
    upper[:edges] = 1.0
    # The dual simplex method is quicker here than the interior-point method, and keeps to its time limit.
    options = {} if time_limit_s is None else {"time_limit": time_limit_s}
    result = linprog(
        cost, A_ub=matrix, b_ub=np.concatenate(right), bounds=np.stack([np.zeros_like(upper), upper], axis=1),
        method="highs-ds", options=options,
    )  # fmt: skip
    if result.status != 0:  # the program is feasible and bounded, so that only time can end it early
        return None, float("inf")
    return result.x[:edges], float(result.x[-1]) * scale


def _round(
    nodes: int, source: NDArray[np.int32], target: NDArray[np.int32], x: NDArray[np.float64], chosen: NDArray[np.bool_]
) -> NDArray[np.int32]:
    """Favorites from the chosen edges; where they collide the last writer wins, as in Baechi's code, smallest x last."""
    child, parent = np.full(nodes, -1, dtype=np.int32), np.full(nodes, -1, dtype=np.int32)
    edges = np.flatnonzero(chosen)
    for edge in edges[np.argsort(-x[edges], kind="stable")]:
        i, j = int(source[edge]), int(target[edge])
        if child[i] >= 0:
            parent[child[i]] = -1
        if parent[j] >= 0:
            child[parent[j]] = -1
        child[i], parent[j] = j, i
    return child
