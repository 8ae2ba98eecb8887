"""Rivals of the searched strategy under the same costs: data parallelism, experts, a Markov chain.

The experts, as the paper names them, decide the layers that they speak about, and the search fills in the others as well as it
can, so that no expert loses by a careless choice for a normalisation:

* CNNs, "one weird trick" (Krizhevsky, 2014): batch of convolutions, outputs of fully connected layers.
* RNNs (Wu et al., 2016, as GNMT): one pipeline stage a stacked LSTM layer, batch over the rest.
* Transformers (Shazeer et al., 2018, Mesh-TensorFlow): a mesh of batch by model; heads, feed-forward width and vocabulary are
  cut along the second axis. The paper's code uses 2 by 4 devices for 8; near-square meshes for other numbers are our rule.

A dimension that does not divide evenly is cut into the largest number of parts that does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from benchmarks.papers.pase.graph import (
    Configuration,
    CostTables,
    Layer,
    LayerGraph,
    Machine,
    Strategy,
    cost_tables,
    cuts,
    strategy_cost,
    strategy_of,
)
from rlplace.errors import InputError
from rlplace.strategy.layouts.cut_moves import eliminate

RESTART_PROPOSALS = 1000
"""After so many proposals, or a hundredth of the budget where that is less, the chain returns to the best strategy."""


def data_parallel(graph: LayerGraph, devices: int, *, machine: Machine | None = None) -> Strategy:
    """Cuts every layer's batch over all devices; layers without that dimension stay whole."""
    rows = [nearest(graph, layer, devices, {"b": devices}) for layer in graph.layers]
    return strategy_of(graph, rows, strategy_cost(graph, rows, machine or Machine()))


def nearest(graph: LayerGraph, layer: Layer, devices: int, wanted: Mapping[str, int]) -> Configuration:
    """Finds the legal configuration nearest to what is wanted, from below."""
    return tuple(max(cuts(dim, min(devices, wanted.get(dim.name, 1)), graph.smallest_part)) for dim in layer.dims)


def one_weird_trick(layer: Layer, devices: int) -> Mapping[str, int] | None:
    """Wants data parallel convolutions, and fully connected layers cut by output."""
    return {"conv": {"b": devices}, "gemm": {"n": devices}}.get(layer.kind)


def layer_pipeline(layer: Layer, devices: int) -> Mapping[str, int] | None:
    """Wants one stage an LSTM layer, and the batch over the devices of a stage."""
    if layer.kind != "lstm":
        return {"b": max(1, devices // 2)}
    stages = min(devices, layer.dims[0].size)
    return {"l": stages, "b": devices // stages}


def mesh_hybrid(layer: Layer, devices: int) -> Mapping[str, int] | None:
    """Wants products cut by batch and, along the model axis, by heads, feed-forward width or vocabulary."""
    if len(layer.terms) < 4 or layer.terms[0].factor != 3.0:  # no product
        return None
    model = 2 ** math.ceil(math.log2(devices) / 2)
    names = [dim.name for dim in layer.dims]
    cut = next((name for name in "hfv" if name in names), None)
    return {"b": devices // model} | ({cut: model} if cut else {})


EXPERTS: dict[str, Callable[[Layer, int], Mapping[str, int] | None]] = {
    "alexnet": one_weird_trick, "inception_v3": one_weird_trick, "resnet101": one_weird_trick, "rnnlm": layer_pipeline,
    "transformer": mesh_hybrid, "transformer_large": mesh_hybrid,
}  # fmt: skip
"""By network, for a layer and a number of devices the parts wanted of some dimensions, or None where it has no opinion."""


def expert(graph: LayerGraph, devices: int, *, machine: Machine | None = None) -> Strategy:
    """Makes the strategy of a network's expert, completed."""
    wanted = {i: parts for i, layer in enumerate(graph.layers) if (parts := EXPERTS[graph.name](layer, devices)) is not None}
    fixed = {i: nearest(graph, graph.layers[i], devices, parts) for i, parts in wanted.items()}
    return complete(graph, devices, fixed, machine=machine)


def complete(
    graph: LayerGraph, devices: int, fixed: Mapping[int, Configuration], *, machine: Machine | None = None
) -> Strategy:
    """Finds the best strategy in which some layers, by index, have the configurations given.

    Raises:
        InputError: A configuration is not legal for its layer.
    """
    full = cost_tables(graph, devices, machine or Machine())
    kept = [[index_of(graph, full, i, fixed[i])] if i in fixed else slice(None) for i in range(len(graph.layers))]
    tables = CostTables(
        [rows[keep] for rows, keep in zip(full.configurations, kept, strict=True)],
        [cost[keep] for cost, keep in zip(full.layer_flop, kept, strict=True)],
        [cost[kept[e.source]][:, kept[e.target]] for e, cost in zip(graph.edges, full.edge_flop, strict=True)],
    )
    return tables.strategy(graph, eliminate(tables.layer_flop, graph.ends, tables.edge_flop))


def index_of(graph: LayerGraph, tables: CostTables, layer: int, row: Configuration) -> int:
    """Finds the index of a configuration.

    Raises:
        InputError: It is not legal for its layer.
    """
    found = (tables.configurations[layer] == row).all(axis=1).nonzero()[0]
    if len(found) != 1:
        raise InputError(f"layer {graph.layers[layer].name!r} cannot be cut into {row} parts")
    return int(found[0])


def mcmc(
    graph: LayerGraph, devices: int, *, start: Strategy, seed: int = 0, proposals: int = 250_000, alpha_per_ms: float = 1.0
) -> Strategy:
    """Finds the best strategy that FlexFlow's Markov chain meets.

    A random layer gets a random legal configuration. A better strategy is always taken, a worse one with probability
    ``exp(-alpha (new - current))``; the chain returns to the best strategy now and then, and stops after its budget of
    proposals or when half of it brought nothing new.

    Paper: Jia, Zaharia, Aiken, "Beyond data and model parallelism for deep neural networks", MLSys 2019. Acceptance, restarts
    and alpha = 1 are those of its public code, whose costs are milliseconds; costs in FLOP are turned into those of one device.
    Departure: its cost is a simulation of measured operators; here it is PaSE's sum, so that only the searches differ.
    """
    machine = Machine()
    tables = cost_tables(graph, devices, machine)
    current = [index_of(graph, tables, i, row) for i, row in enumerate(start.configurations)]
    costs = [cost.tolist() for cost in tables.layer_flop]
    near: list[list[tuple[int, list[list[float]]]]] = [[] for _ in graph.layers]  # tables by own option, then the neighbour's
    lists: dict[int, tuple[list[list[float]], list[list[float]]]] = {}
    for edge, cost in zip(graph.edges, tables.edge_flop, strict=True):
        rows, columns = lists.setdefault(id(cost), (cost.tolist(), cost.T.tolist()))
        near[edge.source].append((edge.target, rows))
        near[edge.target].append((edge.source, columns))
    rng = np.random.default_rng(seed)
    layers = rng.integers(0, len(graph.layers), proposals).tolist()
    picks, accepts = rng.random(proposals).tolist(), rng.random(proposals).tolist()
    beta, restart = alpha_per_ms * 1e3 / machine.flop_per_s, min(RESTART_PROPOSALS, max(1, proposals // 100))
    best, gap, last = list(current), 0.0, 0  # the gap is the current cost less the best
    for step, layer in enumerate(layers):
        if step - last > max(1, proposals // 2):
            break
        if step % restart == 0:
            current, gap = list(best), 0.0
        old, new = current[layer], int(picks[step] * len(costs[layer]))
        if new == old:
            continue
        change = costs[layer][new] - costs[layer][old]
        for other, table in near[layer]:
            change += table[new][current[other]] - table[old][current[other]]
        if change <= 0.0 or accepts[step] < math.exp(-beta * change):
            current[layer] = new
            gap += change
            if gap < 0.0:
                best, gap, last = list(current), 0.0, step
    return tables.strategy(graph, best)
