"""m-SCT: small communication times, with memory.

Problem: makespan on devices of limited memory, when transfers are no longer than ops. A linear program picks for every op a
favorite child that should follow it on the same device (`rlplace.planners.m_sct.m_sct`). The schedule is then that of
`m_etf`, except that a device whose last op's favorite child is ready, open, and starts nowhere earlier stays awake for it: it
takes only the child, or an urgent op, one that every device could have started by now.

Papers: Jeon et al., "Baechi: fast device placement of machine learning graphs", SoCC 2020, algorithm m-SCT; the memory-free
algorithm is Hanen, Munier, "An approximation algorithm for scheduling dependent tasks on m processors with small
communication delays", ETFA 1995. The program, rounding at 0.5, the last writer that wins and the awake device are those of
Baechi's published code.

Departures: colliding favorites are written with the smallest x last; edges within a group are free and no favorites; the
program covers the ops that place their group (forward ops, and all ops of groups without one), since backward and update ops
follow (Baechi's co-located gradients); above `MAX_NODES` of them, or when the solver runs out of time, it covers a contracted
graph of consecutive runs of ops, of which the last op that feeds the favorite run keeps it. Memory, channels and ties are as in
`m_etf`. Candidates differ in the number of devices and in the share of memory that may be planned. Merging an op into its only
consumer is left to the groups.

Favorite children: which consumer of an op should run right after it on the same device.

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

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.plan import PlacementPlan
from rlplace.planners.common.evaluate import Assignment
from rlplace.planners.common.floor import one_shot
from rlplace.planners.common.groupgraph import finite_mean, mean_transfer_s
from rlplace.planners.common.oparrays import earliest_assignments, op_arrays
from rlplace.problem import FORWARD, Problem

MAX_NODES = 6000
"""Nodes of the largest program that is solved; twice as many take HiGHS about four times as long."""


def m_sct(problem: Problem, *, seed: int = 0, time_limit_s: float | None = None) -> PlacementPlan:
    """The best of m-SCT's assignments; see the module docstring."""
    solver_limit_s = None if time_limit_s is None else 0.5 * time_limit_s
    rule = partial(candidates, solver_limit_s=solver_limit_s)
    return one_shot(problem, "m_sct", rule, seed=seed, time_limit_s=time_limit_s)


def candidates(problem: Problem, seed: int, *, solver_limit_s: float | None = None) -> Iterator[Assignment]:
    """Assignments for every number of devices and share of memory.

    Args:
        problem: The problem.
        seed: Not used.
        solver_limit_s: Seconds for the linear program; when they are spent, a smaller graph is solved.
    """
    return earliest_assignments(problem, favorites(problem, time_limit_s=solver_limit_s))


def leading_edges(problem: Problem) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32], NDArray[np.float64]]:
    """The graph of the ops that place their group: forward ops, and all ops of groups that have none.

    Returns:
        int32 [n] ops in topological order; int32 [e] and int32 [e], ends of the edges as positions in it; float64 [e] mean
        seconds of all tensors that an edge carries, once each.
    """
    order = problem.topological_order
    forward = problem.op_phase == FORWARD
    headed = np.zeros(problem.num_groups, dtype=bool)
    headed[problem.op_group[forward]] = True
    leads = forward | ~headed[problem.op_group]
    ops = order[leads[order]]
    at = np.full(problem.num_ops, -1, dtype=np.int64)
    at[ops] = np.arange(len(ops))
    tensor = problem.edge_tensor
    producer = problem.tensor_producer[tensor]
    inner = (producer >= 0) & (at[np.maximum(producer, 0)] >= 0) & (at[problem.consumers] >= 0)
    tensor, source, target = tensor[inner], at[producer[inner]], at[problem.consumers[inner]]
    seconds = mean_transfer_s(problem)
    pair, which = np.unique(source * len(ops) + target, return_inverse=True)
    transfer: NDArray[np.float64] = np.bincount(which, weights=seconds[tensor], minlength=len(pair)).astype(np.float64)
    return ops, (pair // max(len(ops), 1)).astype(np.int32), (pair % max(len(ops), 1)).astype(np.int32), transfer


def favorites(problem: Problem, *, max_nodes: int = MAX_NODES, time_limit_s: float | None = None) -> NDArray[np.int32]:
    """int32 [N], the favorite child of every op, -1 for none.

    Args:
        problem: The problem.
        max_nodes: Larger graphs are contracted to this number of nodes.
        time_limit_s: Seconds for the solver; when they are spent, half the nodes are tried, and so on.
    """
    arrays = op_arrays(problem)
    ops, source, target, transfer = leading_edges(problem)
    mean = finite_mean(arrays.time_s[ops])
    group = problem.op_group[ops]
    nodes = min(len(ops), max_nodes)
    end_s = None if time_limit_s is None else time.monotonic() + time_limit_s
    result = np.full(problem.num_ops, -1, dtype=np.int32)
    while nodes > 1:
        # Runs of a topological order never form a cycle.
        run = np.arange(len(ops)) * nodes // len(ops)
        first, second = run[source], run[target]
        pair, which = np.unique(first * nodes + second, return_inverse=True)
        carried = np.bincount(which, weights=transfer, minlength=len(pair))
        apart = pair // nodes != pair % nodes
        bound = np.ones(len(pair), dtype=bool)
        bound[which[group[source] != group[target]]] = False
        left_s = None if end_s is None else max(0.02, (end_s - time.monotonic()) / 2)
        length = np.bincount(run, weights=mean, minlength=nodes).astype(np.float64)
        solution = favorite_children(
            length, (pair // nodes)[apart].astype(np.int32),
            (pair % nodes)[apart].astype(np.int32), carried[apart], bound=bound[apart], time_limit_s=left_s,
        )  # fmt: skip
        if solution is not None:
            chosen = (solution.child[first] == second) & (first != second) & (group[source] != group[target])
            # Later edges overwrite earlier ones: the last op of a run that feeds the favorite run keeps it.
            taken = np.full(nodes, -1, dtype=np.int64)
            taken[first[chosen]] = np.flatnonzero(chosen)
            edges = taken[taken >= 0]
            result[ops[source[edges]]] = ops[target[edges]]
            return result
        nodes //= 4
    return result


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
        time: float64 [N], time of every node.
        source: int32 [E], sources of the edges of an acyclic graph; no two edges have both ends in common.
        target: int32 [E], targets of the edges.
        transfer: float64 [E], transfer time between different devices, in the same unit.
        bound: bool [E], edges whose ends share a device anyway: no transfer, and no favorites.
        threshold: Edges with x up to this are favorites; among several the last one counts.
        time_limit_s: Seconds for the solver.

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
