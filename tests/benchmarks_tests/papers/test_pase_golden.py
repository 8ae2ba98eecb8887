"""PaSE and its rivals on the paper's networks, against the authors' public code at 10 TFLOPS and 16 GB/s."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from benchmarks.papers.pase.baselines import complete, data_parallel, expert, one_weird_trick, strategy_cost
from benchmarks.papers.pase.cnns import alexnet, resnet101
from benchmarks.papers.pase.costs import all_configurations
from benchmarks.papers.pase.elimination import neighbours
from benchmarks.papers.pase.inception import inception_v3
from benchmarks.papers.pase.layers import LayerGraph, Machine, Strategy
from benchmarks.papers.pase.mcmc import mcmc
from benchmarks.papers.pase.orders import breadth_first, prefix_sets, search_statistics
from benchmarks.papers.pase.rnnlm import rnnlm
from benchmarks.papers.pase.search import least_cost_strategy
from benchmarks.papers.pase.tables import GOLDEN, network
from benchmarks.papers.pase.transformer import transformer, transformer_large
from rlplace.errors import InputError

DATA_PARALLEL = [
    (alexnet, 4, 5.775569e11),
    (alexnet, 8, 6.011088e11),
    (alexnet, 16, 6.128848e11),
    (alexnet, 32, 6.187728e11),
    (rnnlm, 4, 9.435357e12),
    (rnnlm, 8, 7.101223e12),
    (rnnlm, 16, 5.934156e12),
    (rnnlm, 32, 5.350622e12),
    (rnnlm, 64, 5.058855e12),
]

LAST_DIMENSION_OF_BATCH_SIZE = [
    (inception_v3, 4, 3.117273e12),
    (inception_v3, 8, 3.244379e12),
    (inception_v3, 16, 3.307932e12),
    (transformer, 4, 2.273414e13),
    (resnet101, 8, 1.352472e13),
]
"""Published beside the others as data parallelism, but made by cutting each layer's *last* dimension that is as long as the
batch: channels of 128 or heads of 64 where there are such."""


def seven_digits(value: float, golden: float) -> bool:
    """Whether a number rounds to a golden one of seven digits."""
    return f"{value:.6e}" == f"{golden:.6e}"


@pytest.mark.parametrize(("name", "devices"), GOLDEN)
def test_optimum(name: str, devices: int) -> None:
    graph = network(name)
    found = least_cost_strategy(graph, devices)
    assert seven_digits(found.cost_flop, GOLDEN[name, devices])
    assert found.cost_flop == pytest.approx(strategy_cost(graph, found.configurations, Machine()), rel=1e-12)
    assert all(math.prod(row) <= devices for row in found.configurations)


@pytest.mark.parametrize(("network", "devices", "golden"), DATA_PARALLEL)
def test_data_parallel(network: Callable[[], LayerGraph], devices: int, golden: float) -> None:
    assert seven_digits(data_parallel(network(), devices).cost_flop, golden)


@pytest.mark.parametrize(("network", "devices", "golden"), LAST_DIMENSION_OF_BATCH_SIZE)
def test_what_the_other_data_parallel_figures_are(network: Callable[[], LayerGraph], devices: int, golden: float) -> None:
    graph = network()
    batch = graph.layers[0].dims[0].size
    rows = []
    for layer in graph.layers:
        last = max((i for i, dim in enumerate(layer.dims) if dim.size == batch and dim.splittable), default=None)
        rows.append(tuple(devices if i == last else 1 for i in range(len(layer.dims))))
    assert seven_digits(strategy_cost(graph, tuple(rows), Machine()), golden)
    assert golden > 2 * data_parallel(graph, devices).cost_flop


@pytest.mark.parametrize(
    ("network", "layers", "edges", "dependent", "prefix"),
    [
        (alexnet, 14, 13, 1, None),
        (rnnlm, 4, 3, 1, None),
        (inception_v3, 219, 253, 2, 11),
        (transformer, 204, 256, 3, 37),
        (transformer_large, 204, 256, 3, 37),
        (resnet101, 245, 277, 2, None),
    ],
)
def test_structure(network: Callable[[], LayerGraph], layers: int, edges: int, dependent: int, prefix: int | None) -> None:
    graph = network()
    assert (len(graph.layers), len(graph.edges)) == (layers, edges)
    assert search_statistics(graph, 4).largest_dependent_set == dependent
    if prefix is not None:
        assert max(len(later) for later in prefix_sets(graph, breadth_first(graph))) == prefix


@pytest.mark.parametrize(
    ("network", "devices", "product"),
    [(inception_v3, 8, 25_200), (transformer, 4, 10_000), (transformer, 8, 160_000), (resnet101, 8, 12_500)],
)
def test_largest_product(network: Callable[[], LayerGraph], devices: int, product: int) -> None:
    assert search_statistics(network(), devices).largest_product == product


def test_inception_has_few_wide_layers_and_few_configurations() -> None:
    graph = inception_v3()
    assert sum(len(near) >= 5 for near in neighbours(len(graph.layers), graph.ends)) == 12
    assert search_statistics(graph, 8).largest_configurations == 30


def test_alexnet_strategy() -> None:
    graph = alexnet()
    rows = {
        layer.name.split(".")[0]: row
        for layer, row in zip(graph.layers, least_cost_strategy(graph, 32).configurations, strict=True)
    }
    assert [rows[i] for i in ("010", "011", "012", "013")] == [(1, 4, 8), (1, 8, 4), (1, 4, 8), (1, 4)]
    assert [rows[i][:2] for i in ("000", "002", "004", "005", "006")] == [(32, 1), (32, 1), (32, 1), (16, 2), (16, 2)]
    rows8 = least_cost_strategy(graph, 8).configurations
    assert rows8[10:13] == ((1, 2, 4), (1, 4, 2), (1, 2, 4))


def test_rnnlm_strategy() -> None:
    embedding, lstm, projection, loss = least_cost_strategy(rnnlm(), 32).configurations
    assert embedding == (1, 2, 1, 16)
    assert lstm == (2, 1, 4, 2, 2)
    assert projection == (4, 1, 8, 1)
    assert loss == (4, 1, 8)


def test_transformer_and_inception_strategies() -> None:
    graph = transformer()
    parts = least_cost_strategy(graph, 32).parts
    assert all(parts[layer.name] == {"b": 16, "f": 2} for layer in graph.layers if layer.name.endswith(".ffn"))
    heads = [parts[layer.name] == {"b": 16, "h": 2} for layer in graph.layers if layer.name.endswith(".scores")]
    assert sum(heads) > len(heads) / 2
    graph = inception_v3()
    parts = least_cost_strategy(graph, 32).parts
    convolutions = [parts[layer.name] == {"b": 32} for layer in graph.layers if layer.kind == "conv"]
    assert all(convolutions[:60]) and sum(convolutions) == 77  # splitting channels pays in the last blocks only


def check(graph: LayerGraph, strategy: Strategy, optimum: float, devices: int) -> None:
    """A strategy is legal, costs what it says and is no better than the optimum."""
    for rows, row in zip(all_configurations(graph, devices), strategy.configurations, strict=True):
        assert row in {tuple(r) for r in rows.tolist()}
    assert strategy.cost_flop == pytest.approx(strategy_cost(graph, strategy.configurations, Machine()), rel=1e-9)
    assert strategy.cost_flop >= optimum * (1 - 1e-12)


@pytest.mark.parametrize("network", [alexnet, inception_v3, rnnlm, transformer])
def test_no_baseline_beats_the_search(network: Callable[[], LayerGraph]) -> None:
    graph, devices = network(), 8
    optimum = least_cost_strategy(graph, devices).cost_flop
    start = expert(graph, devices)
    for strategy in (data_parallel(graph, devices), start, mcmc(graph, devices, start=start, proposals=20_000)):
        check(graph, strategy, optimum, devices)
    assert mcmc(graph, devices, start=start, proposals=20_000).cost_flop <= start.cost_flop


def test_experts_do_what_they_say() -> None:
    graph = alexnet()
    found = expert(graph, 8)
    for layer in graph.layers:
        if layer.kind == "conv":
            assert found.parts[layer.name] == {"b": 8}
        if layer.kind == "gemm":
            assert found.parts[layer.name] == {"n": 8}
    found = expert(rnnlm(), 8)
    assert found.parts["lstm"] == {"l": 2, "b": 4}
    assert found.parts["embedding"] == {"b": 4}
    graph = transformer()
    found = expert(graph, 8)
    for layer in graph.layers:
        names = {dim.name for dim in layer.dims}
        if layer.kind == "gemm":
            assert found.parts[layer.name]["b"] == 2
            assert any(found.parts[layer.name].get(name) == 4 for name in names & {"h", "f", "v"})


def test_mcmc_is_seeded_and_finds_the_optimum_of_a_small_graph() -> None:
    graph = alexnet()
    first, again = (mcmc(graph, 4, seed=3, proposals=60_000) for _ in range(2))
    assert first.configurations == again.configurations
    assert first.cost_flop == pytest.approx(least_cost_strategy(graph, 4).cost_flop, rel=1e-12)
    assert mcmc(graph, 4, proposals=0).cost_flop == data_parallel(graph, 4).cost_flop


def test_completion_is_the_best_of_what_is_left() -> None:
    graph = alexnet()
    optimum = least_cost_strategy(graph, 8)
    assert complete(graph, 8, {}).cost_flop == optimum.cost_flop
    everything = complete(graph, 8, dict(enumerate(optimum.configurations)))
    assert everything.configurations == optimum.configurations
    fixed = {10: (8, 1, 1)}
    pinned = complete(graph, 8, fixed)
    assert pinned.configurations[10] == (8, 1, 1)
    assert optimum.cost_flop < pinned.cost_flop <= data_parallel(graph, 8).cost_flop


def test_refusals() -> None:
    graph = alexnet()
    with pytest.raises(InputError, match="cannot be cut into"):
        complete(graph, 8, {10: (7, 1, 1)})
    with pytest.raises(InputError, match="unknown layer graph"):
        expert(LayerGraph("mine", graph.layers, graph.edges, graph.smallest_part), 4)
    assert expert(LayerGraph("mine", graph.layers, graph.edges, 4), 4, rule=one_weird_trick) == expert(graph, 4)
    with pytest.raises(InputError, match="start from a legal strategy"):
        mcmc(graph, 4, start=data_parallel(graph, 8))
    assert np.prod(data_parallel(graph, 64).configurations[0]) == 32  # parts of a CNN's dimension have at least 4 elements
