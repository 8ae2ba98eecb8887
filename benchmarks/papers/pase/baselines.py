"""Strategies that people use, to be compared with the searched one under the same cost function.

Data parallelism cuts every layer's batch. The experts, as the paper names them, decide the layers that they speak about, and
the search fills in the others as well as it can, so that no expert loses by a careless choice for a normalisation:

* CNNs, "one weird trick" (Krizhevsky, 2014): batch of convolutions, outputs of fully connected layers.
* RNNs (Wu et al., 2016, as GNMT): one pipeline stage a stacked LSTM layer, batch over the rest.
* Transformers (Shazeer et al., 2018, Mesh-TensorFlow): a mesh of batch by model; heads, feed-forward width and vocabulary are
  cut along the second axis. The paper's code uses 2 by 4 devices for 8; near-square meshes for other numbers are our rule.

A dimension that does not divide evenly is cut into the largest number of parts that does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from benchmarks.papers.pase.costs import CostTables, cost_tables, cuts, edge_costs, layer_costs
from benchmarks.papers.pase.elimination import eliminate
from benchmarks.papers.pase.layers import Configuration, Layer, LayerGraph, Machine, Strategy, strategy_of
from rlplace.errors import InputError, unknown_name

Wanted = Callable[[Layer, int], Mapping[str, int] | None]
"""For a layer and a number of devices the parts wanted of some dimensions, or None where the expert has no opinion."""


def data_parallel(graph: LayerGraph, devices: int, *, machine: Machine | None = None, batch: str = "b") -> Strategy:
    """Every layer's batch cut over all devices; layers without that dimension stay whole."""
    rows = tuple(_row(graph, layer, devices, {batch: devices}) for layer in graph.layers)
    return strategy_of(graph, devices, rows, strategy_cost(graph, rows, machine or Machine()))


def strategy_cost(graph: LayerGraph, configurations: tuple[Configuration, ...], machine: Machine) -> float:
    """Cost of any strategy in FLOP units, whether its configurations are legal or not."""
    rows = [np.array([row], dtype=np.int64) for row in configurations]
    total = sum(float(layer_costs(layer, row, machine)[0]) for layer, row in zip(graph.layers, rows, strict=True))
    for edge in graph.edges:
        ends = graph.layers[edge.source], graph.layers[edge.target], rows[edge.source], rows[edge.target]
        total += float(edge_costs(edge, *ends, machine)[0, 0])
    return total


def one_weird_trick(layer: Layer, devices: int) -> Mapping[str, int] | None:
    """Data parallel convolutions, fully connected layers cut by output."""
    return {"conv": {"b": devices}, "gemm": {"n": devices}}.get(layer.kind)


def layer_pipeline(layer: Layer, devices: int) -> Mapping[str, int] | None:
    """One stage an LSTM layer; batch over the devices of a stage."""
    if layer.kind == "lstm":
        stages = min(devices, next(dim.size for dim in layer.dims if dim.name == "l"))
        return {"l": stages, "b": devices // stages}
    return {"b": max(1, devices // 2)}


def mesh_hybrid(layer: Layer, devices: int) -> Mapping[str, int] | None:
    """Batch by model; the model axis cuts heads, feed-forward width or vocabulary, whichever the product has."""
    if layer.kind != "gemm":
        return None
    model = 1
    while model * model < devices:
        model *= 2
    names = [dim.name for dim in layer.dims]
    cut = next((name for name in ("h", "f", "v") if name in names), None)
    return {"b": devices // model} | ({cut: model} if cut else {})


EXPERTS: dict[str, Wanted] = {
    "alexnet": one_weird_trick,
    "inception_v3": one_weird_trick,
    "resnet101": one_weird_trick,
    "rnnlm": layer_pipeline,
    "transformer": mesh_hybrid,
    "transformer_large": mesh_hybrid,
}
"""The expert of each of the paper's networks, by name of its layer graph."""


def expert(graph: LayerGraph, devices: int, *, machine: Machine | None = None, rule: Wanted | None = None) -> Strategy:
    """The expert's strategy, completed.

    Args:
        graph: One of the paper's networks, or any with `rule`.
        devices: p.
        machine: Rates; default: the paper's.
        rule: What the expert wants; default: by name of the graph.

    Raises:
        InputError: No expert is known for a graph of that name.
    """
    if rule is None:
        if graph.name not in EXPERTS:
            raise unknown_name("layer graph with an expert strategy", graph.name, EXPERTS)
        rule = EXPERTS[graph.name]
    wanted = {i: parts for i, layer in enumerate(graph.layers) if (parts := rule(layer, devices)) is not None}
    fixed = {i: _row(graph, graph.layers[i], devices, parts) for i, parts in wanted.items()}
    return complete(graph, devices, fixed, machine=machine)


def complete(
    graph: LayerGraph, devices: int, fixed: Mapping[int, Configuration], *, machine: Machine | None = None
) -> Strategy:
    """The best strategy in which some layers, by index, have the configurations given.

    Raises:
        InputError: A configuration is not legal for its layer.
    """
    full = cost_tables(graph, devices, machine or Machine())
    keep: list[Any] = [slice(None)] * len(graph.layers)
    for i, row in fixed.items():
        found = (full.configurations[i] == row).all(axis=1).nonzero()[0]
        if len(found) != 1:
            raise InputError(f"layer {graph.layers[i].name!r} cannot be cut into {row} parts; see benchmarks.papers.pase.costs")
        keep[i] = found
    tables = CostTables(
        [rows[keep[i]] for i, rows in enumerate(full.configurations)],
        [cost[keep[i]] for i, cost in enumerate(full.layer_flop)],
        [cost[keep[e.source]][:, keep[e.target]] for e, cost in zip(graph.edges, full.edge_flop, strict=True)],
    )
    chosen = eliminate(tables.layer_flop, graph.ends, tables.edge_flop)
    return tables.strategy(graph, devices, chosen)


def _row(graph: LayerGraph, layer: Layer, devices: int, wanted: Mapping[str, int]) -> Configuration:
    """The legal configuration nearest to what is wanted, from below."""
    return tuple(max(cuts(dim, min(devices, wanted.get(dim.name, 1)), graph.smallest_part)) for dim in layer.dims)
