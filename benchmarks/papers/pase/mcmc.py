"""FlexFlow-style search by Markov chain Monte Carlo on the same costs: the rival that the paper compares with.

From a start (an expert's strategy, as in the paper, or data parallelism) a random layer gets a random legal configuration. A
better strategy is always taken, a worse one with probability ``exp(-alpha (new - current))``; the chain goes back to the best
strategy now and then, and stops after its budget of proposals or when half of it brought nothing new. A proposal re-evaluates
only the layer and its edges.

Paper: Jia, Zaharia, Aiken, "Beyond data and model parallelism for deep neural networks", MLSys 2019. Acceptance, restarts and
alpha = 1 are those of its public code, whose costs are milliseconds; costs in FLOP are turned into milliseconds of one device.
Departure: its cost is a simulation of measured operators; here it is PaSE's sum, so that only the searches differ.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from benchmarks.papers.pase.baselines import data_parallel
from benchmarks.papers.pase.costs import CostTables, cost_tables
from benchmarks.papers.pase.layers import LayerGraph, Machine, Strategy
from rlplace.errors import InputError

RESTART_PROPOSALS = 1000
"""After so many proposals, or a hundredth of the budget where that is less, the chain goes back to the best strategy."""


def mcmc(
    graph: LayerGraph,
    devices: int,
    *,
    machine: Machine | None = None,
    start: Strategy | None = None,
    seed: int = 0,
    proposals: int = 250_000,
    alpha_per_ms: float = 1.0,
) -> Strategy:
    """The best strategy that the chain met.

    Args:
        graph: Layers and tensors.
        devices: p.
        machine: Rates; default: the paper's.
        start: Where the chain starts; default: data parallelism.
        seed: Seed of all random choices.
        proposals: Most proposals; the paper: 250,000.
        alpha_per_ms: Reluctance to take a strategy that is a millisecond worse.

    Raises:
        InputError: The start is not legal for the graph.
    """
    from benchmarks.papers.pase.walk import walk

    machine = machine or Machine()
    tables = cost_tables(graph, devices, machine)
    start = start or data_parallel(graph, devices, machine=machine)
    current = _indices(graph, tables, start)
    near = _incidence(graph, tables)
    offsets = np.concatenate([[0], np.cumsum([len(cost) for cost in tables.layer_flop])])
    rng = np.random.default_rng(seed)
    layers = rng.integers(0, len(graph.layers), proposals)
    picks, accepts = rng.random(proposals), rng.random(proposals)
    beta = alpha_per_ms * 1e3 / machine.flop_per_s
    restart = min(RESTART_PROPOSALS, max(1, proposals // 100))
    flat = np.concatenate(tables.layer_flop)
    best = walk(current, flat, offsets, *near, layers, picks, accepts, beta, restart, max(1, proposals // 2))
    return tables.strategy(graph, devices, best)


def _indices(graph: LayerGraph, tables: CostTables, strategy: Strategy) -> NDArray[np.int64]:
    """A strategy by index of its configurations."""
    found = np.zeros(len(graph.layers), dtype=np.int64)
    for i, (rows, row) in enumerate(zip(tables.configurations, strategy.configurations, strict=True)):
        hits = (rows == row).all(axis=1).nonzero()[0]
        if len(hits) != 1:
            raise InputError(
                f"start: layer {graph.layers[i].name!r} cannot be cut into {row} parts; start from a legal strategy"
            )
        found[i] = hits[0]
    return found


def _incidence(graph: LayerGraph, tables: CostTables) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """Edges by layer: pointers, the other end, where the edge's table starts, strides of both ends; and all tables in one."""
    starts: dict[int, int] = {}
    blocks: list[NDArray[np.float64]] = []
    length = 0
    rows: list[list[tuple[int, int, int, int]]] = [[] for _ in graph.layers]
    for edge, cost in zip(graph.edges, tables.edge_flop, strict=True):
        if id(cost) not in starts:
            starts[id(cost)] = length
            blocks.append(np.ascontiguousarray(cost).reshape(-1))
            length += cost.size
        at, wide = starts[id(cost)], cost.shape[1]
        rows[edge.source].append((edge.target, at, wide, 1))
        rows[edge.target].append((edge.source, at, 1, wide))
    pointers = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
    flat = np.array([entry for row in rows for entry in row], dtype=np.int64).reshape(-1, 4)
    return pointers, flat, np.concatenate(blocks) if blocks else np.zeros(0)
