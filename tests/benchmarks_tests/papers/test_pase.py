"""PaSE on the paper's networks, against the authors' public code and against its measured speed-ups."""

import itertools
import math

import numpy as np
import pytest

from benchmarks.papers.pase import search
from benchmarks.papers.pase.__main__ import COUNTS, GOLDEN, MACHINES, MEASURED, ratios
from benchmarks.papers.pase.graph import (
    Dim,
    Layer,
    LayerEdge,
    LayerGraph,
    Machine,
    configurations,
    cost_tables,
    gemm,
    strategy_cost,
)
from benchmarks.papers.pase.networks import NETWORKS, alexnet, inception_v3, rnnlm, transformer
from benchmarks.papers.pase.search import data_parallel, least_cost_strategy, statistics
from rlplace.cost.timings import rank_correlation
from rlplace.errors import InputError
from tests.strategy.test_layouts import brute_force

DATA_PARALLEL = {
    ("alexnet", 4): 5.775569e11, ("alexnet", 8): 6.011088e11, ("alexnet", 16): 6.128848e11, ("alexnet", 32): 6.187728e11,
    ("rnnlm", 4): 9.435357e12, ("rnnlm", 8): 7.101223e12, ("rnnlm", 16): 5.934156e12, ("rnnlm", 32): 5.350622e12,
    ("rnnlm", 64): 5.058855e12,
}  # fmt: skip
LAST_DIMENSION_OF_BATCH_SIZE = {
    ("inception_v3", 4): 3.117273e12, ("inception_v3", 8): 3.244379e12, ("inception_v3", 16): 3.307932e12,
    ("transformer", 4): 2.273414e13, ("resnet101", 8): 1.352472e13,
}  # fmt: skip
"""Published beside the others as data parallelism, but made by cutting each layer's *last* dimension that is as long as the
batch: channels of 128 or heads of 64 where there are such."""


def seven_digits(value, golden):
    return f"{value:.6e}" == f"{golden:.6e}"


@pytest.mark.parametrize(("name", "devices"), GOLDEN)
def test_optimum(name, devices):
    graph = NETWORKS[name]()
    found = least_cost_strategy(graph, devices)
    assert seven_digits(found.cost_flop, GOLDEN[name, devices])
    assert found.cost_flop == pytest.approx(strategy_cost(graph, found.configurations, Machine()), rel=1e-12)
    assert all(math.prod(row) <= devices for row in found.configurations)


@pytest.mark.parametrize(("name", "devices"), DATA_PARALLEL)
def test_data_parallel(name, devices):
    assert seven_digits(data_parallel(NETWORKS[name](), devices).cost_flop, DATA_PARALLEL[name, devices])


@pytest.mark.parametrize(("name", "devices"), LAST_DIMENSION_OF_BATCH_SIZE)
def test_what_the_other_data_parallel_figures_are(name, devices):
    graph = NETWORKS[name]()
    batch, rows = graph.layers[0].dims[0].size, []
    for layer in graph.layers:
        last = max((i for i, dim in enumerate(layer.dims) if dim.size == batch and dim.splittable), default=None)
        rows.append(tuple(devices if i == last else 1 for i in range(len(layer.dims))))
    golden = LAST_DIMENSION_OF_BATCH_SIZE[name, devices]
    assert seven_digits(strategy_cost(graph, rows, Machine()), golden)
    assert golden > 2 * data_parallel(graph, devices).cost_flop


@pytest.mark.parametrize(
    ("name", "layers", "edges", "dependent", "product"),
    [
        ("alexnet", 14, 13, 1, {}),
        ("rnnlm", 4, 3, 1, {}),
        ("inception_v3", 219, 253, 2, {8: 25_200}),
        ("transformer", 204, 256, 3, {4: 10_000, 8: 160_000}),
        ("resnet101", 245, 277, 2, {8: 12_500}),
    ],
)
def test_structure(name, layers, edges, dependent, product):
    graph = NETWORKS[name]()
    assert (len(graph.layers), len(graph.edges), statistics(graph, 4).neighbours) == (layers, edges, dependent)
    assert {devices: statistics(graph, devices).largest for devices in product} == product


def test_inception_has_few_wide_layers_and_few_configurations():
    graph = inception_v3()
    degrees = [len({*itertools.chain(*(end for end in graph.ends if n in end))} - {n}) for n in range(len(graph.layers))]
    assert sum(degree >= 5 for degree in degrees) == 12
    assert statistics(graph, 8).configurations == 30


@pytest.mark.slow
def test_published_strategies():
    rows = least_cost_strategy(alexnet(), 32).configurations
    assert rows[10:14] == ((1, 4, 8), (1, 8, 4), (1, 4, 8), (1, 4))
    assert [rows[i][:2] for i in (0, 2, 4, 5, 6)] == [(32, 1), (32, 1), (32, 1), (16, 2), (16, 2)]
    assert least_cost_strategy(alexnet(), 8).configurations[10:13] == ((1, 2, 4), (1, 4, 2), (1, 2, 4))
    assert least_cost_strategy(rnnlm(), 32).configurations == ((1, 2, 1, 16), (2, 1, 4, 2, 2), (4, 1, 8, 1), (4, 1, 8))
    graph = transformer()
    parts = least_cost_strategy(graph, 32).parts
    assert all(parts[layer.name] == {"b": 16, "f": 2} for layer in graph.layers if layer.kind == "ffn")
    heads = [parts[layer.name] == {"b": 16, "h": 2} for layer in graph.layers if layer.kind == "scores"]
    assert sum(heads) > len(heads) / 2
    graph = inception_v3()
    parts = least_cost_strategy(graph, 32).parts
    convolutions = [parts[layer.name] == {"b": 32} for layer in graph.layers if layer.kind == "conv"]
    assert all(convolutions[:60]) and sum(convolutions) == 77  # splitting channels pays in the last blocks only


def matmuls(*widths):
    """Returns a chain of products with its shortcut from the first to the last."""
    layers = tuple(
        Layer(f"fc{i}", "gemm", (Dim("b", 8), Dim("n", n), Dim("k", k)), gemm("b", "n", "k"))
        for i, (k, n) in enumerate(itertools.pairwise(widths))
    )
    out, read = ("b", "n"), ("b", "k")
    chain = [LayerEdge(i, i + 1, (8, widths[i + 1]), out, read) for i in range(len(layers) - 1)]
    return LayerGraph("chain", layers, (*chain, LayerEdge(0, len(layers) - 1, (8, widths[1]), out, read)))


def test_real_costs_brute_force():
    graph = matmuls(64, 512, 512, 512)
    tables, found = cost_tables(graph, 4, Machine()), least_cost_strategy(graph, 4)
    assert found.cost_flop == pytest.approx(brute_force(tables.layer_flop, graph.ends, tables.edge_flop), rel=1e-12)
    cuts = zip(graph.layers[0].dims, found.configurations[0], strict=True)
    assert found.parts["fc0"] == {dim.name: parts for dim, parts in cuts if parts > 1}


def test_more_devices_never_cost_more_and_a_slow_link_makes_splitting_dear():
    graph = matmuls(64, 1024, 1024, 1024)
    costs = [least_cost_strategy(graph, p).cost_flop for p in (1, 2, 3, 4, 8, 16)]
    assert costs == sorted(costs, reverse=True)
    assert least_cost_strategy(graph, 1).configurations == ((1, 1, 1),) * 3
    graph = matmuls(512, 512, 512, 512)
    for rate, used in ((1e15, 8), (1e3, 1)):
        found = least_cost_strategy(graph, 8, machine=Machine(bandwidth_bytes_per_s=rate))
        assert all(math.prod(row) == used for row in found.configurations)


def test_configurations():
    layer = Layer("x", "any", (Dim("a", 12), Dim("h", 12, splittable=False), Dim("c", 6)))
    rows = {tuple(row) for row in configurations(layer, 6).tolist()}
    assert rows == {(a, 1, c) for a in (1, 2, 3, 4, 6) for c in (1, 2, 3, 6) if a * c <= 6}
    assert {tuple(row) for row in configurations(layer, 6, 4).tolist()} == {(1, 1, 1), (2, 1, 1), (3, 1, 1)}
    flat = Layer("x", "reshape", (Dim("a", 2), Dim("b", 4), Dim("c", 4)), contiguous=True)
    assert configurations(flat, 8).tolist() == [[1, 1, 1], [2, 1, 1], [2, 2, 1], [2, 4, 1]]


def test_refusals(monkeypatch):
    graph = alexnet()
    assert np.prod(data_parallel(graph, 64).configurations[0]) == 32  # parts of a CNN's dimension have at least 4 elements
    with pytest.raises(InputError, match="at least 1"):
        least_cost_strategy(graph, 0)
    monkeypatch.setattr(search, "MAX_BYTES", 8)
    with pytest.raises(InputError, match="bytes of tables"):
        least_cost_strategy(graph, 4)


SIZES = COUNTS[:3]


@pytest.fixture(scope="module")
def rows():
    return {(card, name, p): ratios(name, p, MACHINES[card]) for card, name in MEASURED for p in SIZES}


@pytest.mark.slow
def test_no_row_of_the_headline_is_slower_than_data_parallelism(rows):
    assert len(rows) == 8 * len(SIZES)
    assert all(1 <= whole and hidden <= whole for whole, hidden in rows.values())


def test_slower_links_make_every_gain_larger_and_so_do_more_cards(rows):
    for name in {name for _, name in MEASURED}:
        assert all(rows["RTX 2080 Ti", name, p][0] > rows["GTX 1080 Ti", name, p][0] for p in SIZES)
        for card in MACHINES:
            gains = [rows[card, name, p][0] for p in SIZES]
            assert gains == sorted(gains)


def test_networks_gain_in_the_order_that_was_measured_and_more_than_the_headline(rows):
    """The page says so: 1.85 and 4 were measured, the cost says more, since it sums work and traffic that cards overlap."""
    said = [whole for whole, _ in rows.values()]
    seen = [MEASURED[card, name][COUNTS.index(p)] for card, name, p in rows]
    assert rank_correlation(said, seen) > 0.7
    for card, measured in zip(MACHINES, (1.85, 4), strict=True):
        order = sorted((name for other, name in MEASURED if other == card), key=lambda name: rows[card, name, 4][0])
        assert order[0] == "inception_v3" and order[-1] == "alexnet"
        assert max(whole for (one, _, _), (whole, _) in rows.items() if one == card) > 2 * measured
