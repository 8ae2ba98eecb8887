"""The search of PaSE against brute force, that for the paper's networks and that for blocks."""

import itertools
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.papers.pase import elimination, search
from benchmarks.papers.pase.baselines import strategy_cost
from benchmarks.papers.pase.costs import CostTables, configurations, cost_tables
from benchmarks.papers.pase.elimination import eliminate
from benchmarks.papers.pase.kinds import contiguous, gemm
from benchmarks.papers.pase.layers import Dim, Layer, LayerEdge, LayerGraph, Machine
from rlplace.errors import InputError
from rlplace.strategy.layouts.cut_moves import eliminate as eliminate_blocks

MACHINE = Machine()


def brute_force(graph: LayerGraph, tables: CostTables) -> float:
    """Cheapest of all combinations, each of them added up."""
    count = len(graph.layers)
    axes = np.ix_(*(range(len(rows)) for rows in tables.configurations))
    total = np.zeros([len(rows) for rows in tables.configurations])
    for vertex in range(count):
        total = total + tables.layer_flop[vertex][axes[vertex]]
    for edge, cost in zip(graph.edges, tables.edge_flop, strict=True):
        total = total + cost[axes[edge.source], axes[edge.target]]
    return float(total.min())


@st.composite
def random_case(draw: st.DrawFn) -> tuple[LayerGraph, CostTables, tuple[int, ...]]:
    """A random DAG, a random cost for everything, and a random order."""
    count = draw(st.integers(1, 7))
    pairs = [pair for pair in itertools.combinations(range(count), 2) if draw(st.booleans())]
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    options = [int(k) for k in rng.integers(1, 6, count)]
    layers = tuple(Layer(f"v{i}", "any", (Dim("b", 1),)) for i in range(count))
    edges = tuple(LayerEdge(u, v, (1,), (("b",),), (("b",),)) for u, v in pairs)
    # Whole numbers up to 8 make ties frequent and sums exact.
    tables = CostTables(
        [np.ones((k, 1), dtype=np.int64) for k in options],
        [rng.integers(0, 8, k).astype(float) for k in options],
        [rng.integers(0, 8, (options[u], options[v])).astype(float) for u, v in pairs],
    )
    return LayerGraph("random", layers, edges), tables, tuple(draw(st.permutations(range(count))))


@given(random_case())
@settings(max_examples=120)
def test_search_equals_brute_force_in_any_order(case: tuple[LayerGraph, CostTables, tuple[int, ...]]) -> None:
    graph, tables, order = case
    best = brute_force(graph, tables)
    for sequence in (None, order):
        chosen = eliminate(tables.layer_flop, graph.ends, tables.edge_flop, sequence)
        assert tables.total(graph, chosen) == best
    for unit in (1.0, 0.1):  # whole numbers tie, and sums of tenths are rounded: both choose the same all the same
        own, between = ([unit * costs for costs in each] for each in (tables.layer_flop, tables.edge_flop))
        assert (eliminate_blocks(own, graph.ends, between) == eliminate(own, graph.ends, between)).all()


@given(random_case())
@settings(max_examples=40)
def test_pieces_give_the_same_choice(case: tuple[LayerGraph, CostTables, tuple[int, ...]]) -> None:
    graph, tables, order = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(elimination, "MAX_SUM_BYTES", 64)
        chosen = eliminate(tables.layer_flop, graph.ends, tables.edge_flop, order)
    assert tables.total(graph, chosen) == brute_force(graph, tables)


def matmuls(widths: list[int]) -> LayerGraph:
    """A chain of products with its shortcut from the first to the last."""
    layers = tuple(
        Layer(f"fc{i}", "gemm", (Dim("b", 8), Dim("n", n), Dim("k", k)), gemm("b", "n", "k"))
        for i, (k, n) in enumerate(itertools.pairwise(widths))
    )
    out, read = (("b",), ("n",)), (("b",), ("k",))
    chain = [LayerEdge(i, i + 1, (8, widths[i + 1]), out, read) for i in range(len(layers) - 1)]
    return LayerGraph("chain", layers, (*chain, LayerEdge(0, len(layers) - 1, (8, widths[1]), out, read)))


def test_real_costs_brute_force() -> None:
    graph = matmuls([64, 512, 512, 512])
    tables = cost_tables(graph, 4, MACHINE)
    found = search.least_cost_strategy(graph, 4, machine=MACHINE)
    assert found.cost_flop == pytest.approx(brute_force(graph, tables), rel=1e-12)
    assert found.cost_flop == pytest.approx(strategy_cost(graph, found.configurations, MACHINE), rel=1e-12)
    assert all(prod(row) <= 4 for row in found.configurations)
    cuts = zip(graph.layers[0].dims, found.configurations[0], strict=True)
    assert found.parts["fc0"] == {dim.name: parts for dim, parts in cuts if parts > 1}


def test_more_devices_never_cost_more() -> None:
    graph = matmuls([64, 1024, 1024, 1024])
    costs = [search.least_cost_strategy(graph, p).cost_flop for p in (1, 2, 3, 4, 8, 16)]
    assert costs == sorted(costs, reverse=True)
    assert search.least_cost_strategy(graph, 1).configurations == ((1, 1, 1),) * 3


def test_a_slow_link_makes_splitting_dear() -> None:
    graph = matmuls([512, 512, 512, 512])
    fast = search.least_cost_strategy(graph, 8, machine=Machine(bandwidth_bytes_per_s=1e15))
    slow = search.least_cost_strategy(graph, 8, machine=Machine(bandwidth_bytes_per_s=1e3))
    assert all(prod(row) == 8 for row in fast.configurations)
    assert all(prod(row) == 1 for row in slow.configurations)


def test_configurations() -> None:
    layer = Layer("x", "any", (Dim("a", 12), Dim("h", 12, splittable=False), Dim("c", 6)))
    rows = {tuple(row) for row in configurations(layer, 6).tolist()}
    assert rows == {(a, 1, c) for a in (1, 2, 3, 4, 6) for c in (1, 2, 3, 6) if a * c <= 6}
    assert {tuple(row) for row in configurations(layer, 6, 4).tolist()} == {(1, 1, 1), (2, 1, 1), (3, 1, 1)}
    flat = Layer("x", "reshape", (Dim("a", 2), Dim("b", 4), Dim("c", 4)), allows=contiguous)
    assert configurations(flat, 8).tolist() == [[1, 1, 1], [2, 1, 1], [2, 2, 1], [2, 4, 1]]


def test_refusals() -> None:
    graph = matmuls([64, 64, 64])
    with pytest.raises(InputError, match="at least 1"):
        search.least_cost_strategy(graph, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "MAX_TABLES_BYTES", 8)
        with pytest.raises(InputError, match="bytes of tables"):
            search.least_cost_strategy(graph, 4)
